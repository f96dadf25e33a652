"""Which tasks a prompt shows beside its own: those that its demonstrations, or its instructions, came from.

Demonstrations are matched by content, because DSPy's optimizers rebuild them: by the text of a task's inputs, and by the prompt of an
earlier call that was made for a task, which is what the demonstration of a later step of a program looks like.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__all__ = ["Carried", "OwnTask", "TaskTexts", "message_texts"]

_WORD = re.compile(r"\w+")
_SHARED = 8  # tasks that may have an input in common and are still told by it
_SHORT = 12  # characters under which a text must stand by itself in its line
_CACHED = 20_000  # messages
_REQUEST = "\n\nRespond with"  # where DSPy's formats end the fields of the task at hand, and a demonstration does not have


@dataclass(eq=False)
class _Part:
    """One input's text: in any of its renderings, all texts of which must stand in a prompt."""

    renderings: tuple[tuple[str, ...], ...]
    holders: list[str] = field(default_factory=list)  # tasks that have it, as far as they are told by it
    anchored: list[str] = field(default_factory=list)  # tasks that have no rarer part

    @property
    def tells(self) -> bool:
        """Whether it tells its tasks from others, without their other inputs."""
        return len(self.holders) <= _SHARED and all(sum(map(len, texts)) >= _SHORT for texts in self.renderings)

    def stands_in(self, text: str) -> bool:
        for texts in self.renderings:  # no generators: it is asked of every call's prompt
            for one in texts:
                if not _stands_in(one, text):
                    break
            else:
                return True
        return False


@dataclass(frozen=True)
class _Reading:
    """What a text shows. `whole`: tasks of which all inputs stand in it; `prompt`: by which a prompt like it is known, where it has fields."""

    whole: frozenset[str]
    telling: tuple[_Part, ...]
    prompt: int | None

    def tasks(self, own: Collection[Any]) -> frozenset[str]:
        """All that are shown; inputs of the text's own task (`own`, by their renderings) tell of no other."""
        telling = [part.holders for part in self.telling if part.renderings not in own]
        if not telling:
            return self.whole
        found = self.whole.union(holders[0] for holders in telling if len(holders) == 1)
        return found.union(*(holders for holders in telling if found.isdisjoint(holders)))


class TaskTexts:
    """Tasks by the text of their inputs, found by the rarest of its words: the time to search a text does not grow with the number of tasks.

    A program need not show all columns of its data. So a task is found by all of its inputs, and by any one that is long enough and that few
    other tasks have. Where tasks share that one and nothing else tells which of them is meant, all of them count as shown.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[tuple[str, ...], ...], _Part] = {}
        self._by_word: dict[str, list[_Part]] = defaultdict(list)
        self._in_parts: Counter[str] = Counter()  # parts that a word is in
        self._known: dict[str, list[_Part]] = {}
        self._asked: dict[int, str] = {}
        self._read: dict[int, _Reading] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, content: str, inputs: Mapping[str, Any]) -> None:
        """Makes a task known by its content hash."""
        if content in self._known:
            return
        parts = [self._part(found) for found in dict.fromkeys(_renderings(value) for value in inputs.values()) if found]
        if not parts:
            return
        self._known[content] = parts
        for part in parts:
            if len(part.holders) <= _SHARED:
                part.holders.append(content)
        min(parts, key=lambda part: (len(part.holders), -len(part.renderings[0][0]))).anchored.append(content)
        self._read.clear()

    def _part(self, renderings: tuple[tuple[str, ...], ...]) -> _Part:
        part = self._parts.get(renderings)
        if part is None:
            part = self._parts[renderings] = _Part(renderings)
            words = [dict.fromkeys(word for text in texts for word in _WORD.findall(text)) for texts in renderings]
            self._in_parts.update({word for found in words for word in found})
            for rarest in {min(found, key=lambda word: (self._in_parts[word], -len(word))) for found in words}:
                self._by_word[rarest].append(part)
        return part

    def asked(self, content: str, messages: Sequence[str]) -> None:
        """Remembers the prompt of a call that was made for a task."""
        if messages and (key := self._reading(messages[-1]).prompt) is not None:
            self._asked[key] = content

    def shown(self, messages: Sequence[str], *, own: str = "", inputs: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Content hashes of the tasks that the messages show, without the one they are about; sorted.

        Args:
            own: the content hash of that one, and `inputs` its inputs, where it may be unknown here. What others have in common with it is its own.
        """
        theirs = {part.renderings for part in self._known.get(own, ())}.union(_renderings(value) for value in (inputs or {}).values())
        found: set[str] = set()
        last = len(messages) - 1
        for place, text in enumerate(messages):
            reading = self._reading(text)
            found |= reading.tasks(theirs)
            if place < last and reading.prompt in self._asked:
                found.add(self._asked[reading.prompt])
        found.discard(own)
        return tuple(sorted(found))

    def within(self, text: str) -> frozenset[str]:
        """Content hashes of the tasks that a text shows."""
        return self._reading(text).tasks(frozenset())

    def _reading(self, text: str) -> "_Reading":
        key = hash(text)
        known = self._read.get(key)
        if known is None:
            fields, request, rest = text.partition(_REQUEST)
            fields, (rest, words) = _plain(fields), _plain_words(request + rest)
            plain = f"{fields}\n{rest}" if fields and rest else fields or rest
            candidates = {part for word in words.union(_WORD.findall(fields)) if word in self._by_word for part in self._by_word[word]}
            standing = {part for part in candidates if part.stands_in(plain)}
            whole = frozenset(content for part in standing for content in part.anchored if standing.issuperset(self._known[content]))
            if len(self._read) >= _CACHED:
                self._read.clear()
            known = self._read[key] = _Reading(whole, tuple(part for part in standing if part.tells), hash(fields) if fields else None)
        return known


class Carried:
    """Tasks that a program's own demonstrations show, found in prompts by the demonstrations' text.

    A demonstration counts as shown where a line of it is in the prompt, or where it has no line by which it could be told. It then
    shows the tasks that it is known to come from, or, where that is not known, all that no other demonstration comes from.

    Args:
        tasks: content hashes of all tasks that may be shown.
        demos: by demonstration: its lines, and the tasks that it is known to show. Without any, every prompt may show all tasks.
    """

    def __init__(self, tasks: Iterable[str] = (), demos: Sequence[tuple[Sequence[str], Sequence[str]]] | None = None) -> None:
        self.tasks = frozenset(tasks)
        known = {task for _, shown in demos or () for task in shown}
        self._demos = None if demos is None else [(_told_by(lines), frozenset(shown) or self.tasks - known) for lines, shown in demos]

    def shown(self, messages: Sequence[str]) -> frozenset[str]:
        """Content hashes of the tasks that messages show."""
        if self._demos is None:
            return self.tasks
        text = _plain("\n".join(messages))
        return frozenset(task for lines, tasks in self._demos if not lines or any(line in text for line in lines) for task in tasks)


def _told_by(lines: Iterable[str]) -> list[str]:
    """Lines that are long enough to tell a demonstration, and the same in JSON as in text."""
    plain = (" ".join(line.split()) for line in lines)
    return [line for line in plain if len(line) >= _SHORT and line.isascii() and not {'"', "\\"} & set(line)]


class OwnTask:
    """Whether a call's prompt demonstrates the very task that the call is about.

    A demonstration is an answered user message before the last one, or DSPy's instructions. What the rollout itself asked or was
    answered before is no demonstration, also where the client writes the answers in words of its own, as smolagents does. The calls of a
    rollout are asked about in their order.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._parts = [text for value in inputs.values() if value is not None and not isinstance(value, bool) and (text := _plain(_text(value)))]
        self._word = max((word for part in self._parts for word in _WORD.findall(part)), key=len, default="")
        self._answers: set[str] = set()  # what the rollout was answered so far
        self._asked: set[int] = set()  # its conversations so far, up to their last user message

    def possible(self, request_json: str) -> bool:
        """Whether the messages of a request are worth reading: without an assistant's, the task must be there twice."""
        return '"assistant"' in request_json or (bool(self._word) and request_json.count(self._word) > 1)

    def demonstrated(self, messages: Sequence[Mapping[str, Any]], *, instructions: bool) -> bool:
        """Whether these messages demonstrate the task.

        Args:
            instructions: whether system messages count: DSPy puts no task into them, other programs may.
        """
        texts = _texts(messages)
        last = _last_asked(messages)
        same = hash(_fields(texts[last])) if texts else 0
        for at, (message, text) in enumerate(zip(messages[:last], texts, strict=False)):
            if message.get("role") == "user" and messages[at + 1].get("role") == "assistant":
                own = texts[at + 1] in self._answers or _beginning(texts, at) in self._asked
                if not own and (hash(_fields(text)) == same or self._holds(text)):
                    return True
            elif instructions and message.get("role") == "system" and self._holds(text) and self._holds(texts[last]):
                return True
        return False

    def answered(self, messages: Sequence[Mapping[str, Any]], output: str) -> None:
        """Notes a call of the rollout whose prompt did not demonstrate the task: its messages, and its answer."""
        self._answers.add(output)
        self._asked.add(_beginning(_texts(messages), _last_asked(messages)))

    def _holds(self, text: str) -> bool:
        return bool(self._word) and self._word in text and all(_stands_in(part, _plain(text)) for part in self._parts)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A text for each message."""
    return [message_texts([message])[0] if message.get("content") else "" for message in messages]


def _last_asked(messages: Sequence[Mapping[str, Any]]) -> int:
    return max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)


def _beginning(texts: Sequence[str], at: int) -> int:
    return hash(tuple(texts[: at + 1]))


def message_texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The texts of chat messages, in order."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found.append("\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping)))
    return found


def _renderings(value: Any) -> tuple[tuple[str, ...], ...]:
    """How an input may stand in a prompt: as JSON, as Python says it, or, of a list, text by text. Of None, a bool and what has no word: none."""
    if value is None or isinstance(value, bool):
        return ()
    forms: list[list[str]] = [[value]] if isinstance(value, str) else [[_text(value)], [str(value)]]
    if isinstance(value, list | tuple):
        forms.append(list(_leaves(value)))
    plain = [tuple(text for one in texts if _WORD.search(text := _plain(one))) for texts in forms]
    return tuple(dict.fromkeys(texts for texts in plain if texts))


def _leaves(value: Any) -> Iterator[str]:
    for inner in value:
        if isinstance(inner, list | tuple):
            yield from _leaves(inner)
        elif inner is not None and not isinstance(inner, bool):
            yield _text(inner)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _plain(text: str) -> str:
    return "\n".join([line for raw in text.splitlines() if (line := " ".join(raw.split()))])


def _fields(text: str) -> str:
    return _plain(text.partition(_REQUEST)[0])


@lru_cache(256)
def _plain_words(text: str) -> tuple[str, frozenset[str]]:
    """A text in its plain form, with its words: how prompts end is the same for every task."""
    plain = _plain(text)
    return plain, frozenset(_WORD.findall(plain))


def _stands_in(part: str, text: str) -> bool:
    if part not in text:
        return False
    if len(part) < _SHORT:
        return re.search(rf"(?m)(?:^|: ?|[\"']){re.escape(part)}(?=[\"',.]|$)", text) is not None
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        if not (at and text[at - 1].isalnum() and part[0].isalnum()) and not (end < len(text) and text[end].isalnum() and part[-1].isalnum()):
            return True
        at = text.find(part, at + 1)
    return False
