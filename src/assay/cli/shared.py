"""Options and output that several commands share."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from assay.cli.numbers import Number
from assay.cli.wording import counted, in_flags
from assay.support.scrubbing import mask_secrets, message, results, unscrubbed

__all__ = [
    "PROGRESS_LINE_EVERY_S",
    "Console",
    "Decorator",
    "dry_run",
    "job_options",
    "json_option",
    "json_or_text",
    "min_coverage_option",
    "open_store",
    "pairs",
    "pop_values",
    "print_json",
    "print_openings",
    "require_coverage",
    "store_option",
    "trust_option",
    "warn_of_failures",
    "warn_of_gaps",
    "with_options",
]

PROGRESS_LINE_EVERY_S = 30.0

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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


def with_options(function: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    """The command with options, shown in their order."""
    for option in reversed(options):
        function = option(function)
    return function


def job_options(*, resume: bool = True, dry_run: bool = False, out: str = "") -> Decorator:
    """Options of commands that run a job, in addition to their settings.

    Args:
        out: help of `--out`; empty for commands that write no folder.
    """
    options: list[Decorator] = [
        *([click.option("--out", help=out)] if out else []),
        *(
            [
                click.option(
                    "--dry-run",
                    is_flag=True,
                    help="Print the estimate of calls, tokens, dollars and minutes, and run nothing.",
                )
            ]
            if dry_run
            else []
        ),
        store_option(),
        *([click.option("--resume", is_flag=True, help="Continue this job's unfinished run.")] if resume else []),
        min_coverage_option(),
        trust_option(),
        json_option(),
    ]
    return lambda function: with_options(function, options)


def report_option() -> Decorator:
    """`--report`."""
    help_text = "Also write the report to this HTML file, which can be sent: it loads nothing."
    return click.option("--report", metavar="FILE.html", callback=_writable, help=help_text)


def _writable(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuses a file that cannot be written, before the job costs anything."""
    if value is None or (os.access(Path(value).resolve().parent, os.W_OK) and not Path(value).is_dir()):
        return value
    raise click.BadParameter(f"{value} cannot be written: name a file in a folder that exists")


def store_option() -> Decorator:
    """`--store`."""
    return click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")


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
        click.echo("\n".join(estimate.lines()))


def json_or_text(text: str) -> Any:
    """The value of a flag, parsed as JSON if possible, else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def trust_option() -> Decorator:
    """`--trust`: permanently trust the artifacts that the command loads."""

    def trust_them(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            from assay.sources.trust import trusting

            ctx.with_resource(trusting())

    text = "Permanently trust the artifacts given here, so that their code may be run. See assay trust."
    return click.option("--trust", is_flag=True, expose_value=False, callback=trust_them, help=text)


def min_coverage_option() -> Decorator:
    """`--min-coverage`, which `require_coverage` reads."""

    def keep_it(ctx: click.Context, parameter: click.Parameter, value: float) -> None:
        ctx.meta["min_coverage"] = value

    text = "Smallest share of tasks on which each criterion must be scored; below it the exit code is 1."
    return click.option(
        "--min-coverage",
        type=Number(0, 1),
        default=0.9,
        show_default=True,
        expose_value=False,
        callback=keep_it,
        help=text,
    )


def require_coverage(data: Any) -> None:
    """Raises `LowCoverage` if a report in `data` has a coverage below `--min-coverage`. Call it after the report is
    printed.

    A report is a mapping with `coverage` and `undecided`, as of `assay.rubrics.coverage`, at any depth.
    """
    from assay.errors import LowCoverage

    least = float(click.get_current_context().meta.get("min_coverage", 0.9))
    low = [report for report in _coverages(data) if report["coverage"] < least]
    if low:
        worst = min(low, key=lambda report: float(report["coverage"]))
        gaps = [
            f"{name} was not decided on {gap['n']} of {gap['of']}: {gap['reason']}"
            for name, gap in worst["undecided"].items()
        ]
        if worst.get("why_failed"):
            gaps.append(f"{worst['failed']} of {counted(worst['n'], 'runs')} failed: {worst['why_failed']}")
        raise LowCoverage(
            f"coverage {worst['coverage']:.2f} is below the required {least:g}. {'; '.join(gaps)}. Correct "
            f"what failed, or lower --min-coverage"
        )


def _coverages(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        if isinstance(data.get("coverage"), float | int) and isinstance(data.get("undecided"), dict):
            yield data
        for value in data.values():
            yield from _coverages(value)
    elif isinstance(data, list):
        for value in data:
            yield from _coverages(value)


def json_option(help_text: str = "One JSON object on standard output, nothing else.") -> Decorator:
    """`--json`. From then on all other output, including that of the user's program, goes to standard error."""

    def redirect(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta["stdout"] = sys.stdout
            ctx.with_resource(redirect_stdout(sys.stderr))
        return value

    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=redirect, help=help_text)


def print_json(value: Any, *, with_key: bool = False) -> None:
    """One object on standard output. `with_key`: it holds a key that was made for the user, and is printed as it is."""
    context = click.get_current_context(silent=True)
    out: Any = sys.stdout if context is None else context.meta.get("stdout", sys.stdout)
    text = json.dumps(value if with_key else results(value), ensure_ascii=False, allow_nan=False, default=str)
    (unscrubbed(out) if with_key else out).write((text if with_key else mask_secrets(text)) + "\n")
    out.flush()  # whoever waits for the line on a pipe gets it now


def warn_of_gaps(rich: Any, data: dict[str, Any]) -> None:
    """Warns of calls that were not recorded and rows that could not be stored."""
    if data["unrecorded"] is None:
        least = f" ({data['unrecorded_seen']} were seen)" if data["unrecorded_seen"] else ""
        reason = data["unrecorded_reason"]
        rich.print(f"warning: the number of LM calls that were not recorded is unknown{least}: {reason}", markup=False)
    elif data["unrecorded"]:
        rich.print(f"warning: {counted(data['unrecorded'], 'LM calls')} could not be recorded", markup=False)
    if data["rows_not_stored"]:
        rich.print(f"warning: {counted(data['rows_not_stored'], 'rows')} could not be stored", markup=False)


def print_openings(rich: Any, openings: dict[str, int] | None) -> None:
    """Prints how often the test split was opened, if a job opened it."""
    from assay.traces.store.sealing import openings_line

    if openings:
        rich.print(openings_line(openings), markup=False)


def warn_of_failures(rich: Any, report: dict[str, Any], *, is_error: bool = False) -> None:
    """Prints reasons of failed runs and of unscored criteria, which a score does not show.

    Args:
        is_error: the command ends with the reason of the failed runs as its error if no run was scored.
    """
    if report["failed"] and not (is_error and report["unscored"] == report["n"]):
        rich.print(
            f"note: {report['failed']} of {counted(report['n'], 'runs')} failed; the commonest reason: "
            f"{in_flags(report['why_failed'])}",
            markup=False,
        )
    for name, part in report["undecided"].items():
        rich.print(
            f"warning: {name} was not decided on {part['n']} of {part['of']} and is not in their score: "
            f"{part['reason']}",
            markup=False,
        )


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Implements `assay.evaluation.Progress`."""

    def __init__(self) -> None:
        from rich.console import Console as Rich

        context = click.get_current_context(silent=True)
        self.rich, self._command = Rich(stderr=True, highlight=False), context.command if context else None

    def say(self, text: str) -> None:
        self.rich.print(in_flags(message(text), self._command), markup=False, soft_wrap=True)

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
        with Progress(*columns, console=self.rich, transient=False) as progress:
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
