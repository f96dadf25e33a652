"""Output of the command line: JSON, lists and progress."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import click

from assay.errors import Names, spoken
from assay.support.numbers import counted
from assay.support.refused import Refused, refused, waiting
from assay.support.scrubbing import mask_secrets, message, results
from assay.support.terminal import echo, escaped, protected, rich_console
from assay.support.values import json_text

PROGRESS_LINE_EVERY_S = 30.0
REFUSED_BEFORE = "refused_before"  # key of a command's context: what was refused before it began
REPORTED = "reported"  # key of a command's context, once it has printed its JSON


def print_json(value: Any, *, with_key: bool = False) -> None:
    """One object on standard output. `with_key`: it holds a key that was made for the user, and is printed as it is."""
    context = click.get_current_context(silent=True)
    out = None
    if context is not None:
        out, context.meta[REPORTED] = context.meta.get("stdout"), True
    value = value if with_key else results(value)
    if isinstance(value, dict) and (rows := refused_by_command().rows):
        value = {**value, "rows_not_stored": rows}
    if isinstance(value, dict) and (rows := sum(waiting.values())):
        value = {**value, "rows_waiting": rows}
    text = json_text(value)
    echo(text if with_key else mask_secrets(text), file=out, with_key=with_key)


def refused_by_command() -> Refused:
    """What disk and store did not take since the command began."""
    context, now = click.get_current_context(silent=True), refused()
    return now.since(now if context is None else context.meta.get(REFUSED_BEFORE, now))


def say_waiting() -> None:
    """Says which rows of other processes the command has found for the stores that it opened."""
    if rows := refused_by_command().recovered:
        echo(f"note: {counted(rows, 'rows')} that earlier processes could not write are in the store now", err=True)
    for place, rows in waiting.items():
        if rows:
            echo(f"warning: {counted(rows, 'rows')} of other processes wait for the store in {place}", err=True)


def echo_line(line: str) -> None:
    """Prints one line of a list. In a terminal it is cut at the right edge, so that each item has one line."""
    line = escaped(line)
    if sys.stdout.isatty() and len(line) > (width := shutil.get_terminal_size().columns):
        line = f"{line[: width - 1]}…"
    echo(line)


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Implements `assay.evaluation.Progress`."""

    def __init__(self, names: Names = str) -> None:
        self.rich, self._names = rich_console(err=True), names

    def say(self, text: str) -> None:
        self.rich.print(spoken(message(text), self._names), soft_wrap=True)

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
