"""Options and output that several commands share."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click

__all__ = [
    "Console",
    "executor_option",
    "json_option",
    "json_or_text",
    "keep",
    "pairs",
    "print_json",
    "run_config",
    "run_options",
    "warn_of_failures",
    "warn_of_gaps",
]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def pairs(values: tuple[str, ...], flag: str) -> dict[str, str]:
    """`NAME=VALUE` arguments as a dictionary."""
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{flag} {value!r} must be NAME=VALUE")
        if name in found:
            raise click.UsageError(f"{flag} gives {name!r} twice")
        found[name] = rest
    return found


def cap_options() -> list[Decorator]:
    return [
        click.option("--max-calls", type=int, help="Stop after so many LM calls."),
        click.option("--max-tokens", type=int, help="Stop after so many tokens."),
        click.option("--max-cost-usd", type=float, help="Stop after so many dollars."),
    ]


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The flags that `compile` and `evaluate` have in common."""
    options: list[Decorator] = [
        click.option("--rubric", required=True, metavar="R", help="A YAML file, or a shipped rubric: math_qa, classify, extract."),
        click.option("--data", required=True, metavar="D", help="A .jsonl, .csv or .parquet file, hf:…, reasoning_gym:…, arithmetic:…"),
        click.option(
            "--model",
            default="embedded/smollm2-135m",
            show_default=True,
            help="The program's language model; an artifact that is evaluated brings its own.",
        ),
        click.option("--judge-model", help="Model of the rubric's judges; by default the program's."),
        click.option("--api-base", help="Address of an OpenAI-compatible server for --model."),
        click.option("--adapter", type=click.Choice(["json", "lean", "chat"]), help="How fields become messages."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An agent parameter, e.g. temperature=0.1."),
        click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Rename a column of the data."),
        click.option("--salt", default="assay", show_default=True, help="Salt of the splits; keep it for a project's life."),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--threads", type=int, help="Runs at once; by default what the model's engine gains from."),
        *cap_options(),
        click.option("--no-cache", is_flag=True, help="Do not read or keep responses on disk."),
        click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE."),
        click.option("--resume", is_flag=True, help="Go on with this job's unfinished run."),
        json_option(),
    ]
    return with_options(function, options)


def with_options(function: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    """The command with options, shown in their order."""
    for option in reversed(options):
        function = option(function)
    return function


def executor_option() -> Decorator:
    """`--executor`."""
    text = "Where tasks run: in threads here, or on the hosts of a Ray cluster (RAY_ADDRESS, or one started here)."
    return click.option("--executor", type=click.Choice(["threads", "ray"]), default="threads", show_default=True, help=text)


def run_config(values: dict[str, Any]) -> dict[str, Any]:
    """Flags as the fields of `RunConfig`."""
    parameters = {name: json_or_text(text) for name, text in pairs(values.pop("settings"), "--set").items()}
    rename, cache = pairs(values.pop("rename"), "--rename"), not values.pop("no_cache")
    return {**values, "parameters": parameters, "rename": rename, "cache": cache}


def json_or_text(text: str) -> Any:
    """A flag's value: what it says as JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def json_option(help_text: str = "One JSON object on standard output, nothing else.") -> Decorator:
    """`--json`. Whatever else prints, a program of the user's own included, prints to standard error from there on."""

    def redirect(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta["stdout"] = sys.stdout
            ctx.with_resource(redirect_stdout(sys.stderr))
        return value

    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=redirect, help=help_text)


def print_json(value: Any) -> None:
    """One object on standard output."""
    context = click.get_current_context(silent=True)
    out: Any = sys.stdout if context is None else context.meta.get("stdout", sys.stdout)
    out.write(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str) + "\n")
    out.flush()  # whoever waits for the line on a pipe gets it now


def warn_of_gaps(rich: Any, data: dict[str, Any]) -> None:
    """What the store does not hold of a run."""
    for key, text in (("unseen_calls", "LM calls went past the recorder"), ("rows_not_stored", "rows could not be stored")):
        if data[key]:
            rich.print(f"warning: {data[key]} {text}", markup=False)


def warn_of_failures(rich: Any, report: dict[str, Any]) -> None:
    """Why runs failed and what the rubric could not decide: neither may hide behind a score."""
    if report["failed"]:
        rich.print(f"note: {report['failed']} of {report['n']} runs failed; the commonest reason: {report['why_failed']}", markup=False)
    for name, part in report["undecided"].items():
        rich.print(f"warning: {name} was not decided on {part['n']} of {report['n']} tasks and is not in their score: {part['reason']}", markup=False)


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Satisfies `assay.optimizers.Progress`."""

    def __init__(self) -> None:
        from rich.console import Console as Rich

        self.rich = Rich(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self.rich.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        if not self.rich.is_terminal:
            self.say(f"{name} ({total}) …" if total is not None else f"{name} …")
            yield lambda _: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.rich, transient=False) as progress:
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)


def keep(values: dict[str, Any], *names: str) -> list[Any]:
    """Takes the named flags out of `values`, in order."""
    return [values.pop(name) for name in names]
