"""Output of the command line: JSON, lists, progress, and messages of the library in its words.

The library names Python arguments (`max_calls=250`, `rename={'COLUMN': 'NAME'}`). `in_flags` makes each the flag of the
command that runs. Only what is printed is changed: nothing is decided by a message.
"""

import ast
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import click

from assay.support.refused import Refused, refused
from assay.support.scrubbing import mask_secrets, message, results
from assay.support.terminal import echo, escaped, protected, rich_console
from assay.support.values import json_text

PROGRESS_LINE_EVERY_S = 30.0
REFUSED_BEFORE = "refused_before"  # key of a command's context: what was refused before it began
REPORTED = "reported"  # key of a command's context, once it has printed its JSON
_VALUE = r"\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|-?(?:nan|inf)\b|'[^']*'|\"[^\"]*\"|…|-?\d[\w.+-]*\w|-?\d|[A-Z]\w*"
# not after the separators of a data spec (`mutants:FILE?seed=1&size=5`), whose options are no flags
_ASSIGNED = re.compile(rf"(?<![\w.?&:-])(?P<name>[a-z]\w*)=(?P<value>{_VALUE})")
_BARE = re.compile(r"(?<![\w.'\"/-])[a-z]+(?:_[a-z]+)+\b(?![\w='\"./:(])")
_LISTED = re.compile(r"\((?P<names>[a-z_]+(?:, (?:or )?[a-z_]+)+)\)")
_PAIR = re.compile(r"'(\w+)': (?:'([^']*)'|([^,}]+))")
_PYTHON_ONLY = re.compile(r"\blm=…,? or ")


def print_json(value: Any, *, with_key: bool = False) -> None:
    """One object on standard output. `with_key`: it holds a key that was made for the user, and is printed as it is."""
    context = click.get_current_context(silent=True)
    out = None
    if context is not None:
        out, context.meta[REPORTED] = context.meta.get("stdout"), True
    value = value if with_key else results(value)
    if isinstance(value, dict) and (rows := refused_by_command().rows):
        value = {**value, "rows_not_stored": rows}
    text = json_text(value)
    echo(text if with_key else mask_secrets(text), file=out, with_key=with_key)


def refused_by_command() -> Refused:
    """What disk and store did not take since the command began."""
    context, now = click.get_current_context(silent=True), refused()
    return now.since(now if context is None else context.meta.get(REFUSED_BEFORE, now))


def echo_line(line: str) -> None:
    """Prints one line of a list. In a terminal it is cut at the right edge, so that each item has one line."""
    line = escaped(line)
    if sys.stdout.isatty() and len(line) > (width := shutil.get_terminal_size().columns):
        line = f"{line[: width - 1]}…"
    echo(line)


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Implements `assay.evaluation.Progress`."""

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        self.rich, self._command = rich_console(err=True), context.command if context else None

    def say(self, text: str) -> None:
        self.rich.print(in_flags(message(text), self._command), soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        if not self.rich.is_terminal:
            self.say(f"{name} ({total}) …" if total is not None else f"{name} …")
            yield self._lines(name, total)
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with (
            Progress(*columns, console=self.rich, transient=False) as progress,  # puts streams of its own in place
            redirect_stdout(protected(sys.stdout, texts=True)),
            redirect_stderr(protected(sys.stderr)),
        ):
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)

    def _lines(self, name: str, total: int | None) -> Callable[[int], None]:
        """Progress where there is no terminal: a line every `PROGRESS_LINE_EVERY_S` seconds at most."""
        done, printed_at = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, printed_at
            done += count
            if done != total and time.monotonic() - printed_at >= PROGRESS_LINE_EVERY_S:
                printed_at = time.monotonic()
                self.say(f"{name}: {done}" + ("" if total is None else f" of {total}"))

        return advance


@contextmanager
def stdout_apart() -> Iterator[TextIO]:
    """Standard output as a file of its own; inside, file descriptor 1, which other processes inherit, is standard
    error.
    """
    try:
        if sys.stdout.fileno() != 1:
            raise OSError  # what a test or a caller has put in its place is not written by other processes
        sys.stdout.flush()
        apart = os.dup(1)
    except OSError:
        yield sys.stdout
        return
    try:
        os.dup2(2, 1)
        with open(apart, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False) as file:
            yield protected(file, texts=True)
    finally:
        os.dup2(apart, 1)
        os.close(apart)


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
