"""Options of commands that are no settings: what a call names (a folder, a store), and how it is run and reported.

Each is defined once. Flags of settings are made by `assay.cli.flags`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import click

from assay.cli.value_types import Number
from assay.support.places import is_other_file
from assay.support.terminal import protected

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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
        *([out_option(out, "DIR")] if out else []),
        *(
            [dry_run_option("Print the estimate of calls, tokens, dollars and minutes, and run nothing.")]
            if dry_run
            else []
        ),
        store_option(),
        *([resume_option()] if resume else []),
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
    """Refuses a file that cannot be written or is not a page, before the job costs anything."""
    if value is not None and is_other_file(value, ".html"):
        raise click.BadParameter(f"{value} exists and is not overwritten, because its name does not end in .html")
    if value is None or (os.access(Path(value).resolve().parent, os.W_OK) and not Path(value).is_dir()):
        return value
    raise click.BadParameter(f"{value} cannot be written: name a file in a folder that exists")


def store_option() -> Decorator:
    """`--store`. Indexes and memories of the program are in it too, unless the program names another one."""
    help_text = "Database of traces; by default .assay/assay.db or $ASSAY_STORE."
    return click.option("--store", callback=_as_default, help=help_text)


def _as_default(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    from assay.traces.store.location import default_store

    if value:
        context.with_resource(default_store(value))
    return value


def out_option(help: str, metavar: str, *, required: bool = False) -> Decorator:
    """`--out`: the folder (DIR) or file (FILE) to write."""
    return click.option("--out", required=required, metavar=metavar, help=help)


def resume_option(help: str = "Continue this job's unfinished run.") -> Decorator:
    """`--resume`."""
    return click.option("--resume", is_flag=True, help=help)


def dry_run_option(help: str) -> Decorator:
    """`--dry-run`: shows what would be done, and changes nothing."""
    return click.option("--dry-run", is_flag=True, help=help)


def name_option(help: str) -> Decorator:
    """`--name`: of the adapter that a training makes."""
    return click.option("--name", required=True, help=help)


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


def json_option(help_text: str = "One JSON object on standard output, nothing else.") -> Decorator:
    """`--json`. From then on all other output goes to standard error: that of the user's program, of child processes
    and of native libraries.
    """

    def redirect(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta["stdout"] = ctx.with_resource(stdout_apart())
            ctx.with_resource(redirect_stdout(sys.stderr))
        return value

    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=redirect, help=help_text)
