"""Messages of the library in the words of the command line.

The library names Python arguments (`max_calls=250`, `rename={'COLUMN': 'NAME'}`). Here each becomes the flag of the
command that runs. Only what is printed is changed: nothing is decided by a message.
"""

import ast
import re
from typing import Any

import click

_VALUE = r"\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|-?(?:nan|inf)\b|'[^']*'|\"[^\"]*\"|…|-?\d[\w.+-]*\w|-?\d|[A-Z]\w*"
# not after the separators of a data spec (`mutants:FILE?seed=1&size=5`), whose options are no flags
_ASSIGNED = re.compile(rf"(?<![\w.?&:-])(?P<name>[a-z]\w*)=(?P<value>{_VALUE})")
_BARE = re.compile(r"(?<![\w.'\"/-])[a-z]+(?:_[a-z]+)+\b(?![\w='\"./:(])")
_LISTED = re.compile(r"\((?P<names>[a-z_]+(?:, (?:or )?[a-z_]+)+)\)")
_PAIR = re.compile(r"'(\w+)': (?:'([^']*)'|([^,}]+))")
_PYTHON_ONLY = re.compile(r"\blm=…,? or ")
_OPPOSITES = {
    "cache": "no_cache",
    "preflight": "no_preflight",
    "portable": "no_portable",
    "demos": "without_demos",
}


def stop_note(stopped: str | None) -> list[str]:
    """The note on what ended a run early and what to do; none for a run that nothing ended."""
    from assay.runs.ending import advised

    return [f"stopped early: {advised(stopped)}"] if stopped else []


def in_flags(text: str, command: click.Command | None = None) -> str:
    """A message with the flags of a command, by default the running one, in place of Python arguments. A traceback
    stays as it is."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context else None
    options = (
        {}
        if command is None
        else {str(option.name): option for option in command.params if isinstance(option, click.Option)}
    )
    if not options:
        return text
    return "\n".join(line if line.startswith((" ", "\t")) else _line(line, options) for line in text.split("\n"))


def message_of(error: Any, command: click.Command | None) -> str:
    """An error as the command line prints it: its message, and those of its flags that the message does not name."""
    from assay.errors import ProjectError

    if isinstance(error, ProjectError):  # it names keys of the file, not flags
        return str(error)
    if error.field:
        return str(error.text(error.names))
    text = in_flags(error.text(error.names), command)
    missing = [part for part in error.flag.split(", ") if part and not _names(text, part)]
    return f"{text} [{', '.join(missing)}]" if missing else text


def _names(text: str, part: str) -> bool:
    """Whether a message names a flag."""
    return part.startswith("--") and re.search(rf"{re.escape(part.split()[0])}(?![\w-])", text) is not None


def _line(line: str, options: dict[str, click.Option]) -> str:
    line = _PYTHON_ONLY.sub("", line)

    def assigned(match: re.Match[str]) -> str:
        shown = f"'{match['name']}': " in line  # as a key of a mapping, such as arguments of a check
        return (
            match[0]
            if shown or _in_call(line, match.start())
            else _flag(match["name"], match["value"], options) or match[0]
        )

    def bare(match: re.Match[str]) -> str:
        return (
            max(options[match[0]].opts or options[match[0]].secondary_opts, key=len)
            if match[0] in options
            else match[0]
        )

    def listed(match: re.Match[str]) -> str:
        names = re.split(r", (?:or )?", match["names"])
        return (
            f"({', '.join(max(options[name].opts or options[name].secondary_opts, key=len) for name in names)})"
            if all(name in options for name in names)
            else match[0]
        )

    return _BARE.sub(bare, _LISTED.sub(listed, _ASSIGNED.sub(assigned, line)))


def _in_call(line: str, at: int) -> bool:
    """Whether a position is among the arguments of a call in Python: `assay.load(path, program=…)`."""
    before = line[:at]
    return re.search(r"\w\([^()]*$", before) is not None


def _flag(name: str, value: str, options: dict[str, click.Option]) -> str | None:
    """`name=value` as a flag; None if the command does not have it."""
    if name in _OPPOSITES and value in ("True", "False") and _OPPOSITES[name] in options:
        flag = max(options[_OPPOSITES[name]].opts, key=len)
        return flag if value == "False" else f"no {flag}"
    if name == "sizes" and value.startswith("{"):
        return _sizes(value, options)
    option = options.get(name)
    if option is None:
        return None
    flag = max(option.opts or option.secondary_opts, key=len)
    if value == "True":
        return flag
    if value in ("False", "None"):
        return max(option.secondary_opts, key=len) if option.secondary_opts else f"no {flag}"
    if value == "…":
        return flag
    if value.startswith("{"):
        return " ".join(f"{flag} {key}={text}" for key, text in _pairs(value)) or flag
    texts = _as_typed(value)
    return " ".join(f"{flag} {text}" for text in (texts if option.multiple else [",".join(texts)])) or f"no {flag}"


def _sizes(value: str, options: dict[str, click.Option]) -> str | None:
    sizes = [(f"--{split}-size" if f"{split}_size" in options else "--size", size) for split, size in _pairs(value)]
    return (
        " ".join(f"{flag} {size}" for flag, size in sizes)
        if sizes and {"size", "val_size", "test_size"} & options.keys()
        else None
    )


def _pairs(value: str) -> list[tuple[str, str]]:
    return [(key, text or other) for key, text, other in _PAIR.findall(value)]


def _as_typed(value: str) -> list[str]:
    """A value as it is typed on the command line: the members of a list, otherwise one text."""
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return [value]
    items = parsed if isinstance(parsed, list | tuple) else [parsed]
    # with quotes where a text alone would not be seen, or would break the line
    hidden = [isinstance(item, str) and not (item.strip() and item.isprintable()) for item in items]
    return [repr(item) if quoted else str(item) for item, quoted in zip(items, hidden, strict=True)]
