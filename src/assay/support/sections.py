"""Reads the fields of prompts and answers in every prompt format, and the thoughts in an answer. Does not import DSPy.

Formats:

- `chat`: DSPy's sections, `[[ ## name ## ]]` and the value below it.
- `xml`: `<name>value</name>`. DSPy 3.4 escapes values, 3.5 writes them literally. `<name/>` is null. The value of an
  object or a list is nested elements, see `structure_in`.
- `json`: an object.
- `lean`: `name: value` lines; a value may have several.

With native function calling the fields of an answer are the arguments of a tool call, see `answer_fields`.

Thoughts are what a reasoning model writes between `<think>` and `</think>`. Servers that know a model's marks return
its thoughts apart; the others leave them in the text.
"""

import bisect
import html
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAMES = "think|thinking|thoughts?|reasoning|reflection|scratchpad|seed:think"
# marks of DeepSeek, Qwen and Seed; Mistral; OpenThoughts; Kimi; Cohere; gpt-oss; Gemma. A quoted mark is a mention.
_MARK = re.compile(
    rf"(?<!['\"`])(?:(?P<opens><(?:{_NAMES})(?:\s[^<>]*)?>|\[THINK\]|<\|begin_of_thought\|>|◁think▷"
    r"|<\|START_THINKING\|>|<\|channel\|>(?:analysis|commentary)\b|<unused94>)"
    rf"|</(?:{_NAMES})\s*>|\[/THINK\]|<\|end_of_thought\|>|◁/think▷|<\|END_THINKING\|>"
    r"|<\|channel\|>final(?:<\|message\|>)?|<unused95>)",
    re.IGNORECASE,
)
_TAG = re.compile(r"</?(\w+)")
LINES = "x-assay-lines"  # schema keyword: one `name: value` line per property, in order


def without_thoughts(text: str, fields: Collection[str] = ()) -> str:
    """The text outside of thoughts.

    A thought that is not closed reaches to the end of the text: an answer that was cut within it is empty. What comes
    before a closing mark without an opening one is a thought too, because some templates open it in the prompt.

    Args:
        fields: names of tags that are fields of the answer, such as `reasoning` in XML.
    """
    spans = _spans_outside(text, fields)
    return text if spans is None else "".join(text[start:end] for start, end in spans).strip()


def blanked_thoughts(text: str, fields: Collection[str] = ()) -> str:
    """The text with spaces instead of thoughts, so that positions stay the same; see `without_thoughts`."""
    spans = _spans_outside(text, fields)
    if spans is None:
        return text
    parts, at = list[str](), 0
    for start, end in spans:
        parts += [" " * (start - at), text[start:end]]
        at = end
    return "".join([*parts, " " * (len(text) - at)])


def _spans_outside(text: str, fields: Collection[str]) -> list[tuple[int, int]] | None:
    """Spans of the text outside of thoughts; None if it has no marks."""
    kept, depth, at = list[tuple[int, int]](), 0, 0
    for mark in _MARK.finditer(text):
        if fields and (tag := _TAG.match(mark[0])) and tag[1] in fields:
            continue
        if depth == 0:
            kept.append((at, mark.start()))
        if mark["opens"]:
            depth += not mark["opens"].startswith("<|channel|>") or depth == 0  # channels follow each other
        elif depth == 0:
            kept.clear()
        else:
            depth = 0 if mark[0].startswith("<|channel|>") else depth - 1
        at = mark.end()
    return None if at == 0 else [*kept, *([(at, len(text))] if depth == 0 else [])]


FORMATS = ("chat", "xml", "json", "lean")
SUBMIT = "submit"  # tool with which DSPy's ReActV2 returns the outputs
_LAST = "completed"  # section after the last output in DSPy's chat format
_CHAT = re.compile(r"^[ \t]*\[\[ ## (\w+) ## \]\]", re.MULTILINE)
_LINE = re.compile(r"^[ \t]*([A-Za-z_]\w*):(?=\s|\Z)[ \t]*", re.MULTILINE)
_LINE_TAG = re.compile(r"^[ \t]*<(\w+)\s*/?>", re.MULTILINE)
_NEXT_TAG = re.compile(r"\s*<(\w+)\s*/?>")
_CLOSING = re.compile(r"</(\w+)\s*>")
_AFTER = re.compile(r"\s*(?:\Z|<\w+\s*/?>|```|Respond with\b)")  # what follows the closing tag of a field
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#\d+|#x[\da-fA-F]+);")
_ELEMENT = re.compile(r"<(/?)([^\W\d][\w.\-]*)(?:\s+key=(\"[^\"<]*\"|'[^'<]*'))?\s*(/?)>")
_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_NEXT = re.compile(r"\s*,(?=\s*\")")
_MARKS = {"chat": _CHAT, "lean": _LINE}
ASKS = "\n\nRespond with"  # begins the request for outputs after the inputs of a DSPy prompt; demonstrations have none
_THOUGHTS = ("reasoning", "thought")  # tags that are output fields in XML, not the marks of a thought
_OUTPUTS = re.compile(
    r"^Your output(?: fields are|s must contain):\n(.*?)(?:^All interactions |^You should lay out |\Z)", re.M | re.S
)
_LISTED = re.compile(r"^\d+\. `(\w+)`", re.MULTILINE)
_ARGUMENTS = ("args", "arguments", "parameters")
_NESTED = re.compile(r"^<(\w+)>(?:<|\.\.\.)", re.MULTILINE)  # others have their value on a line of its own
_REPLY = re.compile(r"^Reply with: (\w+: …(?:, \w+: …)*)\s*\Z", re.MULTILINE)
_DEEPEST = 64  # nesting of elements in a value
_MOST_READINGS = 64  # of a prompt whose values may contain marks
_MOST_OF_LEAN = 16  # of them where two prompts are compared
_MOST_MARKS = 4096  # of all readings of a prompt
_MOST_OBJECTS = 64  # JSON objects of a text that are read to find one with a wanted member
_decode = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True)
class Section:
    """A field in a text.

    Attributes:
        name: name of the field.
        begin: position of its mark.
        start: position of its value.
        end: position after its value.
        value: a text; of JSON any value, of XML also a list or None.
        complete: False if the text ends within a JSON value.
    """

    name: str
    begin: int
    start: int
    end: int
    value: Any
    complete: bool = True


class _Span(NamedTuple):
    name: str
    begin: int
    start: int
    end: int


def fields_in(text: str, names: Collection[str] = (), *, formats: Collection[str] = FORMATS) -> dict[str, Any]:
    """Values of an answer's fields by name; empty if it has none. The first of several values for a field counts.

    Args:
        names: names of the fields; by default all that the text has.
        formats: prompt formats in which the answer is read.
    """
    fields: dict[str, Any] = {}
    for section in sections_in(text, names, formats=formats):
        if section.complete:
            fields.setdefault(section.name, section.value)
    return fields


def answer_fields(
    text: str,
    tools: Iterable[tuple[str, Mapping[str, Any]]] = (),
    names: Collection[str] = (),
    nested: Collection[str] = (),
) -> dict[str, Any]:
    """`fields_in` of an answer that may have tool calls, whose arguments are fields too.

    A call of `submit`, also one in the text, has all fields of the answer.

    Args:
        tools: name and arguments of each tool call.
        nested: names of the fields that are objects or lists, see `nested_outputs`.
    """
    calls = list(tools)
    for name, arguments in [*calls, *_written_calls(text)]:
        if name == SUBMIT:
            return dict(arguments)
    fields = fields_in(text, names)
    fields |= {name: structure_in(fields[name]) for name in nested if isinstance(fields.get(name), str)}
    for _, arguments in calls:
        fields = {**arguments, **fields}
    return fields


def _written_calls(text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Calls of `submit` and others in the text of an answer: in `<tool_call>` of chat templates, or in the field
    `tool_calls`, in which DSPy has them without native function calling."""
    if SUBMIT not in text:
        return
    value = fields_in(text, ("tool_calls",)).get("tool_calls")
    if isinstance(value, str):
        value = structure_in(value)
    calls = value.get("tool_calls") if isinstance(value, Mapping) else value
    marked = [_value_of_json(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
    for call in [*marked, *(calls if isinstance(calls, list) else ())]:
        arguments = next((call[key] for key in _ARGUMENTS if key in call), None) if isinstance(call, Mapping) else None
        if isinstance(arguments, Mapping):
            yield str(call.get("name")), arguments


def _value_of_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def sections_in(text: str, names: Collection[str] = (), *, formats: Collection[str] = FORMATS) -> list[Section]:
    """Fields of an answer with their positions, in order.

    The text is read in the format in which it has most of the named fields; of several formats, or without names, in
    that which begins first. Thoughts are not part of an answer.
    """
    plain = {"": blanked_thoughts(text), "xml": blanked_thoughts(text, names or _THOUGHTS)}
    readings = {form: spans for form in formats if (spans := _FORMS[form][0](plain.get(form, plain[""]), names))}
    if not readings:
        return []

    def rank(form: str) -> tuple[int, bool, int]:
        spans = readings[form]
        prose = form == "lean" and spans[0].name[:1].isupper()  # before the fields, such as `Answer: …`
        return -len({span.name for span in spans} & set(names)), prose, spans[0].begin

    form = min(readings, key=rank)
    read, kept = _FORMS[form][1], (names or _THOUGHTS) if form == "xml" else ()
    sections = []
    for span in readings[form]:
        written = without_thoughts(text[span.start : span.end], kept)
        try:
            sections.append(Section(*span, read(text[span.begin : span.start], written)))
        except (ValueError, RecursionError):
            sections.append(Section(*span, written, complete=False))
    return sections


# -- positions in each format


def _between(marks: Sequence["re.Match[str]"], text: str) -> list[_Span]:
    """Spans of the values between marks."""
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [_trimmed(text, mark[1], mark.start(), mark.end(), end) for mark, end in zip(marks, ends, strict=False)]


def _trimmed(text: str, name: str, begin: int, start: int, end: int) -> _Span:
    value = text[start:end]
    start += len(value) - len(value.lstrip())
    return _Span(name, begin, start, max(start, start + len(value.strip())))


def _wanted(spans: Iterable[_Span], names: Collection[str]) -> list[_Span]:
    return [span for span in spans if (span.name in names if names else span.name != _LAST)]


def _chat(text: str, names: Collection[str]) -> list[_Span]:
    return _wanted(_between(list(_CHAT.finditer(text)), text), names) if "[[ ## " in text else []


def _lean(text: str, names: Collection[str]) -> list[_Span]:
    mark = re.compile(rf"^[ \t]*({_either(names)})[ \t]*:[ \t]*", re.MULTILINE) if names else _LINE
    return _between(list(mark.finditer(text)), text)


def _either(names: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _xml(text: str, names: Collection[str], *, last: bool = False) -> list[_Span]:
    """Elements at the top level; of the named fields also one that is not closed at the end of the text.

    Args:
        last: end each value at the last closing tag of its name, not at the first that another field may follow.
    """
    opening = re.compile(rf"<({_either(names)})(?:\s[^<>]*|/)?>") if names else _LINE_TAG
    closings, spans, at = _closings(text, last) if "<" in text else {}, list[_Span](), 0
    while tag := _NEXT_TAG.match(text, at) if spans and not names else opening.search(text, at):
        name, at = tag[1], tag.end()
        if tag[0].endswith("/>"):
            spans.append(_Span(name, tag.start(1) - 1, at, at))
            continue
        starts, tags = closings.get(name, ([], []))
        place = bisect.bisect_left(starts, at)
        if place < len(tags):
            spans.append(_trimmed(text, name, tag.start(1) - 1, at, tags[place].start()))
            at = tags[place].end()
        elif names:
            following = opening.search(text, at)
            at = following.start() if following else len(text)
            spans.append(_trimmed(text, name, tag.start(1) - 1, tag.end(), at))
        elif spans:
            break
    return spans


def _closings(text: str, last: bool) -> dict[str, tuple[list[int], list["re.Match[str]"]]]:
    """By name, positions of closing tags, and for each the closing tag of a value that begins before it; see `_xml`."""
    by_name: dict[str, list[re.Match[str]]] = {}
    for tag in _CLOSING.finditer(text):
        by_name.setdefault(tag[1], []).append(tag)
    closings = {}
    for name, tags in by_name.items():
        starts, fitting = [tag.start() for tag in tags], None
        for at in range(len(tags) - 1, -1, -1):
            if not (last and fitting) and _AFTER.match(text, tags[at].end()):
                fitting = tags[at]
            tags[at] = fitting or (tags[-1] if last else tags[at])
        closings[name] = starts, tags
    return closings


def _json(text: str, names: Collection[str]) -> list[_Span]:
    """Members of the first object with a wanted member; the last may be cut."""
    tried = 0
    for brace in re.finditer(r"^[^\n{]*\{", text, re.MULTILINE) if '"' in text else ():
        members = list(_members(text, brace.end()))
        if spans := [span for span in members if not names or span.name in names]:
            return [span._replace(begin=brace.end() - 1) if span is spans[0] else span for span in spans]
        tried += bool(members)
        if tried == _MOST_OBJECTS:
            break
    return []


def _members(text: str, at: int) -> Iterator[_Span]:
    while key := _KEY.match(text, at):
        try:
            name = _decode(key[1])[0]
            end = _decode(text, key.end())[1]
        except (ValueError, RecursionError):
            yield _Span(name, key.start(1), key.end(), len(text))
            return
        yield _Span(name, key.start(1), key.end(), end)
        following = _NEXT.match(text, end)
        if following is None:
            return
        at = following.end()


# -- values in each format


def _plain_value(mark: str, written: str) -> str:
    return written.strip()


def _xml_value(mark: str, written: str) -> Any:
    if mark.rstrip().endswith("/>"):
        return None
    text = written.strip()
    if text.startswith("<item") and isinstance(items := structure_in(text), list):
        return items
    return _literal(text)


def structure_in(text: str) -> Any:
    """The object or list that a text is: JSON, or nested elements as DSPy's XMLAdapter writes them. Else the text.

    Scalars in elements are texts; elements without a value are null.
    """
    stripped = text.strip()
    value = _value_of_json(stripped) if stripped[:1] in ("{", "[") else _elements(stripped)
    return value if isinstance(value, dict | list) else text


class _Open:
    """An element whose closing tag was not read yet."""

    def __init__(self, tag: str, name: str, start: int) -> None:
        self.tag, self.name, self.start, self.at = tag, name, start, start  # `at`: after its last child
        self.children: list[tuple[str, Any]] = []
        self.mixed = False  # has text beside its children: its value is literal


def _elements(text: str) -> Any:
    """The value of a text of elements only; None of any other text."""
    if not text.startswith("<") or not text.endswith(">"):
        return None
    path = [_Open("", "", 0)]
    for mark in _ELEMENT.finditer(text):
        closes, tag, key, empty = mark.groups()
        element = path[-1]
        between = text[element.at : mark.start()].strip()
        if closes:
            if element.tag != tag:
                return None
            path.pop()
            literal = between or element.mixed or not element.children
            value = _literal(text[element.start : mark.start()]) if literal else _grouped(element.children)
            path[-1].children.append((element.name, value))
        else:
            element.mixed |= bool(between)
            name = html.unescape(key[1:-1]) if key and tag == "entry" else tag
            if empty:
                element.children.append((name, None))
            elif len(path) > _DEEPEST:
                return None
            else:
                path.append(_Open(tag, name, mark.end()))
        path[-1].at = mark.end()
    return None if len(path) > 1 or path[0].mixed or path[0].at < len(text) else _grouped(path[0].children)


def _grouped(children: Sequence[tuple[str, Any]]) -> Any:
    """A list of items, or an object, in which elements of one name are a list."""
    by_name: dict[str, list[Any]] = {}
    for name, value in children:
        by_name.setdefault(name, []).append(value)
    if by_name.keys() == {"item"}:
        return by_name["item"]
    return {name: values[0] if len(values) == 1 else values for name, values in by_name.items()}


def _literal(written: str) -> str:
    """The text of an element, which is escaped, literal or in a CDATA section."""
    text = written.strip()
    cdata = text.startswith("<![CDATA[") and text.endswith("]]>")
    return text[len("<![CDATA[") : -len("]]>")] if cdata else _unescaped(text)


def _unescaped(text: str) -> str:
    """The text of escaped XML; one with `<` or a single `&` is literal."""
    return text if "<" in text or "&" in _ENTITY.sub("", text) else html.unescape(text)


def _json_value(mark: str, written: str) -> Any:
    return json.loads(written, strict=False)


_FORMS: dict[str, tuple[Callable[[str, Collection[str]], list[_Span]], Callable[[str, str], Any]]] = {
    "chat": (_chat, _plain_value),
    "xml": (_xml, _xml_value),
    "json": (_json, _json_value),
    "lean": (_lean, _plain_value),
}


# -- prompts


def prompt_fields(text: str) -> dict[str, str]:
    """Inputs in a prompt's last message as it was most likely written; empty if it has none.

    XML must be the whole message, up to the request for outputs.
    """
    body = _without_request(text)
    if fields := next(_inputs_in(body, "xml"), None):
        return fields
    marks = {form: mark.start() for form, pattern in _MARKS.items() if (mark := pattern.search(body))}
    return next(_inputs_in(body, min(marks, key=lambda form: marks[form]))) if marks else {}


def adapter_readings(system: str, text: str) -> list[dict[str, str]]:
    """Inputs that a prompt of an adapter may stand for, the most likely first; empty if no adapter wrote it.

    Lines are read only where the system message is that of `lean`, because users write them too.

    Args:
        system: the prompt's system message.
        text: its last message.
    """
    if _REPLY.search(system):
        return list(itertools.islice(_inputs_in(text, "lean"), _MOST_OF_LEAN))
    body = _without_request(text)
    fields = next(itertools.chain(_inputs_in(body, "xml"), _inputs_in(body, "chat")), {})
    return [fields] if fields else []


def prompt_readings(text: str) -> list[dict[str, Any]]:
    """All inputs that a prompt may stand for: a value may contain the marks of fields itself."""
    bodies = dict.fromkeys([_without_request(text), text])
    return [fields for body in bodies for form in _FORMS for fields in _inputs_in(body, form)]


def _without_request(text: str) -> str:
    return text[: text.rindex(ASKS)] if ASKS in text else text


def _inputs_in(body: str, form: str) -> Iterator[dict[str, Any]]:
    """Readings of a prompt in a format, the most likely first."""
    if form == "json":
        value = _value_of_json(body) if body.lstrip().startswith("{") else None
        yield from [value] if isinstance(value, dict) and value else []
    elif form == "xml":
        for last in (False, True):
            spans = _xml(body, (), last=last)
            if spans and not body[: spans[0].begin].strip() and _AFTER.match(body, _closed(body, spans[-1])):
                literal = _first_values(body, spans)
                yield literal
                yield {name: html.unescape(value) for name, value in literal.items()}
    else:
        for marks in _groupings(list(_MARKS[form].finditer(body))):
            yield _first_values(body, _wanted(_between(marks, body), ()))


def _first_values(text: str, spans: Sequence[_Span]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for span in spans:
        fields.setdefault(span.name, text[span.start : span.end])
    return fields


def _closed(body: str, span: _Span) -> int:
    closing = re.compile(rf"\s*</{re.escape(span.name)}\s*>").match(body, span.end)
    return closing.end() if closing else span.end


def _groupings(marks: Sequence["re.Match[str]"]) -> Iterator[list["re.Match[str]"]]:
    """The marks, then with fewer and fewer of those after the first, at most `_MOST_READINGS` in all; of many marks
    fewer."""
    kept = (
        [*marks[:1], *rest]
        for count in range(len(marks) - 1, -1, -1)
        for rest in itertools.combinations(marks[1:], count)
    )
    return itertools.islice(kept, max(1, min(_MOST_READINGS, _MOST_MARKS // max(1, len(marks)))))


def format_of(system: str) -> str:
    """The prompt format of a system message; "" if no adapter of DSPy or assay wrote it."""
    if _REPLY.search(system):
        return "lean"
    structure = system.partition("\nAll interactions will be structured in the following way")[2]
    if "\nOutputs will be a JSON object" in structure:
        return "json"
    return "chat" if f"[[ ## {_LAST} ## ]]" in structure else "xml" if _LINE_TAG.search(structure) else ""


def output_names(system: str) -> tuple[str, ...]:
    """Names of the output fields in the system message of a prompt; empty if no adapter of DSPy or assay wrote it."""
    if reply := _REPLY.search(system):
        return tuple(re.findall(r"(\w+): …", reply[1]))
    listed = _OUTPUTS.search(system)
    return tuple(_LISTED.findall(listed[1])) if listed else ()


def nested_outputs(system: str) -> frozenset[str]:
    """Names of the output fields that a system message in XML asks for as nested elements."""
    structure = system.partition("\nAll interactions will be structured in the following way")[2]
    return frozenset(_NESTED.findall(structure.partition("\nIn adhering to this structure, ")[0]))
