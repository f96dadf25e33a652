"""Input and output that several commands share. Options are in `assay.cli.options`."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import click

from assay.cli.wording import in_flags
from assay.support.refused import Refused, refused
from assay.support.scrubbing import mask_secrets, message, results
from assay.support.terminal import echo, escaped, protected, rich_console
from assay.support.values import json_text

PROGRESS_LINE_EVERY_S = 30.0
REFUSED_BEFORE = "refused_before"  # key of a command's context: what was refused before it began
REPORTED = "reported"  # key of a command's context, once it has printed its JSON


def pairs(values: tuple[str, ...], flag: str) -> dict[str, str]:
    """`NAME=VALUE` arguments as a dictionary."""
    values_by_name = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{flag} {value!r} must be NAME=VALUE")
        if name in values_by_name:
            raise click.UsageError(f"{flag} gives {name!r} twice")
        values_by_name[name] = text
    return values_by_name


def open_store(store: str | None) -> Any:
    """Opens an existing store. Raises `StoreError` where the database file does not exist, instead of creating it."""
    from assay.errors import StoreError
    from assay.traces.store.location import store_file

    file = store_file(store)
    if file is not None and not file.is_file():
        raise StoreError(f"there is no store at {file}: no command has written one yet, or name it with --store")
    from assay.traces.store import Store

    return Store(store)


def dry_run(
    kind: str, program: str, settings: Mapping[str, Any], *, as_json: bool, store: str | None, name: str | None = None
) -> None:
    """Prints the estimate of a job."""
    from assay.api.plan import plan

    estimate = plan(kind, program, store=store, name=name, **settings)
    if as_json:
        print_json(estimate.to_dict())
    else:
        echo("\n".join(estimate.lines()))


def json_or_text(text: str) -> Any:
    """The value of a flag, parsed as JSON if possible, else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def require_coverage(data: Any, *, least: float | None = None) -> None:
    """Raises `LowCoverage` if a report in `data` has a coverage below `--min-coverage`. Call it after the report is
    printed.

    A report is a mapping with `coverage` and `undecided`, as of `assay.rubrics.scoring`, at any depth.
    """
    from assay.commands.groups import check_coverage

    check_coverage(data, float(click.get_current_context().meta.get("min_coverage", 0.9)))


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


def warn_of_gaps(rich: Any, data: dict[str, Any]) -> None:
    """Prints `gap_lines`."""
    from assay.reports.markdown import gap_lines

    for line in gap_lines(data):
        rich.print(line)


def print_openings(rich: Any, openings: dict[str, int] | None) -> None:
    """Prints how often the test split was opened, if a job opened it."""
    from assay.traces.store.sealing import openings_line

    if openings:
        rich.print(openings_line(openings))


def print_models(rich: Any, data: Mapping[str, Any], of: str = "") -> None:
    """Prints the LM calls by model, if others than the report's model answered.

    Args:
        of: whose calls they are, if the report is one of several.
    """
    from assay.reports.markdown import models_text

    if text := models_text(data):
        rich.print(f"LM calls by model{of}: {text}", soft_wrap=True)


def warn_of_failures(rich: Any, report: dict[str, Any], *, is_error: bool = False) -> None:
    """Prints `failure_lines`."""
    from assay.reports.markdown import failure_lines

    for line in failure_lines(report, is_error=is_error):
        rich.print(in_flags(line))


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


def pop_values(values: dict[str, Any], *names: str) -> list[Any]:
    """Takes the named flags out of `values`, in order."""
    return [values.pop(name) for name in names]
