"""Options and output that several commands share."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click

from assay.cli.wording import counted, in_flags
from assay.scrubbing import known, message, results, unscrubbed

__all__ = [
    "Console",
    "decision_options",
    "dry_run",
    "endpoint_options",
    "executor_option",
    "json_option",
    "json_or_text",
    "keep",
    "min_coverage_option",
    "no_preflight_option",
    "pairs",
    "print_json",
    "program_endpoint",
    "reflection_endpoint",
    "require_coverage",
    "run_config",
    "run_options",
    "say_openings",
    "task_timeout_option",
    "token_margin_option",
    "trust_option",
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


def endpoint_options(whose: str, role: str = "") -> list[Decorator]:
    """`--api-base` and `--api-key-env` of a role; a key itself is never a flag, so that none is stored."""
    prefix, other = (f"--{role}-", "; 'provider' for the provider's own where --api-base names another") if role else ("--", "")
    return [
        click.option(f"{prefix}api-base", metavar="URL", help=f"Address of an OpenAI-compatible server of {whose}{other}."),
        click.option(f"{prefix}api-key-env", metavar="NAME", help="Environment variable with its key; the provider's usual one by default."),
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
            help="The program's language model, or embedded:FILE.gguf; an artifact brings its own.",
        ),
        *endpoint_options("--model and, unless they have one of their own, of the other models"),
        click.option("--judge-model", help="Model of the rubric's judges; by default the program's."),
        *endpoint_options("the judges", "judge"),
        click.option("--adapter", type=click.Choice(["json", "lean", "chat"]), help="How a program's fields become messages (prompt format)."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An agent parameter, e.g. temperature=0.1."),
        click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Rename a column of the data."),
        click.option("--salt", help="Salt of the splits; by default the store's own (a new store: the artifact's, else assay)."),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--threads", type=int, help="Number of concurrent runs; by default what suits the model's engine."),
        task_timeout_option(),
        *cap_options(),
        click.option("--dry-run", is_flag=True, help="Print the estimate of calls, tokens, dollars and minutes, and run nothing."),
        no_preflight_option(),
        click.option("--no-cache", is_flag=True, help="Do not read or write the response cache."),
        click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE."),
        click.option("--resume", is_flag=True, help="Continue this job's unfinished run."),
        min_coverage_option(),
        trust_option(),
        json_option(),
    ]
    return with_options(function, options)


def with_options(function: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    """The command with options, shown in their order."""
    for option in reversed(options):
        function = option(function)
    return function


def program_endpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--api-base` and `--api-key-env`."""
    return with_options(function, endpoint_options("--model and, unless it has one of its own, of --reflection-model"))


def reflection_endpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--reflection-api-base` and `--reflection-api-key-env`."""
    return with_options(function, endpoint_options("--reflection-model", "reflection"))


def decision_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How gate and test decide."""
    return with_options(
        function,
        [
            click.option(
                "--difference", type=float, default=0.1, show_default=True,
                help="Smallest gain in mean score that gate and test are to show; they take the tasks that this needs. A set size is taken whole.",
            ),
            click.option("--early-stop/--no-early-stop", default=True, show_default=True, help="End gate and test once they have decided."),
        ],
    )  # fmt: skip


def token_margin_option() -> Decorator:
    """`--token-margin` of what compiles prompts."""
    text = "Expected score by which a candidate on val may be lower and win with fewer prompt tokens, unless the better one is proven better."
    return click.option("--token-margin", type=click.FloatRange(0, 1, max_open=True), default=0.01, show_default=True, help=text)


def executor_option() -> Decorator:
    """`--executor`."""
    text = "Where tasks run: in threads here, or on the hosts of a Ray cluster (RAY_ADDRESS, or one started here)."
    return click.option("--executor", type=click.Choice(["threads", "ray"]), default="threads", show_default=True, help=text)


def run_config(values: dict[str, Any]) -> dict[str, Any]:
    """Flags as the fields of `RunConfig`."""
    parameters = {name: json_or_text(text) for name, text in pairs(values.pop("settings"), "--set").items()}
    rename, cache = pairs(values.pop("rename"), "--rename"), not values.pop("no_cache")
    preflight = not values.pop("no_preflight", False)
    values.pop("dry_run", None)
    if click.get_current_context().get_parameter_source("model") is not click.core.ParameterSource.COMMANDLINE:
        values.pop("model", None)  # an artifact brings its own; everything else has the default of the settings
    return {**values, "parameters": parameters, "rename": rename, "cache": cache, "preflight": preflight}


def dry_run(kind: str, program: str, values: dict[str, Any], *, as_json: bool, store: str | None, sizes: dict[str, int], **more: Any) -> None:
    """Prints what a job would take."""
    from assay.planning import plan

    found = plan(kind, program, store=store, sizes=sizes, **more, **run_config(values))
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo("\n".join(found.lines()))


def json_or_text(text: str) -> Any:
    """A flag's value: what it says as JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def no_preflight_option() -> Decorator:
    """`--no-preflight`."""
    return click.option("--no-preflight", is_flag=True, help="Skip the check, before anything is spent, that the program runs and its judges answer.")


def task_timeout_option() -> Decorator:
    """`--task-timeout`."""
    text = (
        "Seconds that one run with its tools, one check or one judge may take; beyond it the run fails, or there is no verdict. "
        "One tool call may take a quarter of it."
    )
    return click.option("--task-timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, metavar="SECONDS", help=text)


def trust_option() -> Decorator:
    """`--trust`: artifacts that the command loads are trusted, from now on."""

    def trust_them(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            from assay.deployment.trust import trusting

            ctx.with_resource(trusting())

    text = "Trust the artifacts given here, now and from now on: those of others may run code. See assay trust."
    return click.option("--trust", is_flag=True, expose_value=False, callback=trust_them, help=text)


def min_coverage_option() -> Decorator:
    """`--min-coverage`, which `require_coverage` reads."""

    def keep_it(ctx: click.Context, parameter: click.Parameter, value: float) -> None:
        ctx.meta["min_coverage"] = value

    text = "Least share of the tasks on which each criterion must be decided; below it the exit code is 1."
    return click.option(
        "--min-coverage", type=click.FloatRange(0, 1), default=0.9, show_default=True, expose_value=False, callback=keep_it, help=text
    )


def require_coverage(data: Any) -> None:
    """Raises `LowCoverage` where a report in `data` decided less than `--min-coverage`. Call it after the report is printed.

    A report is a mapping with `coverage` and `undecided`, as of `assay.rubrics.coverage`, at any depth.
    """
    from assay.errors import LowCoverage

    least = float(click.get_current_context().meta.get("min_coverage", 0.9))
    low = [report for report in _coverages(data) if report["coverage"] < least]
    if low:
        worst = min(low, key=lambda report: float(report["coverage"]))
        gaps = [f"{name} was not decided on {gap['n']} of {gap['of']}: {gap['reason']}" for name, gap in worst["undecided"].items()]
        if worst.get("why_failed"):
            gaps.append(f"{worst['failed']} of {counted(worst['n'], 'runs')} failed: {worst['why_failed']}")
        raise LowCoverage(
            f"coverage {worst['coverage']:.2f} is below the required {least:g}. {'; '.join(gaps)}. Mend what failed, or lower --min-coverage"
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
    """`--json`. Whatever else prints, a program of the user's own included, prints to standard error from there on."""

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
    (unscrubbed(out) if with_key else out).write((text if with_key else known(text)) + "\n")
    out.flush()  # whoever waits for the line on a pipe gets it now


def warn_of_gaps(rich: Any, data: dict[str, Any]) -> None:
    """What the store does not hold of a run."""
    if data["unrecorded"] is None:
        least = f" ({data['unrecorded_seen']} were seen)" if data["unrecorded_seen"] else ""
        reason = data["unrecorded_reason"]
        rich.print(f"warning: how many LM calls went past the recorder is unknown{least}: {reason}", markup=False)
    elif data["unrecorded"]:
        rich.print(f"warning: {counted(data['unrecorded'], 'LM calls')} went past the recorder", markup=False)
    if data["rows_not_stored"]:
        rich.print(f"warning: {counted(data['rows_not_stored'], 'rows')} could not be stored", markup=False)


def say_openings(rich: Any, openings: dict[str, int] | None) -> None:
    """How often the test split was opened, where a job opened it."""
    from assay.traces.sealing import openings_line

    if openings:
        rich.print(openings_line(openings), markup=False)


def warn_of_failures(rich: Any, report: dict[str, Any]) -> None:
    """Why runs failed and what the rubric could not decide: neither may hide behind a score."""
    if report["failed"]:
        rich.print(f"note: {report['failed']} of {counted(report['n'], 'runs')} failed; the commonest reason: {report['why_failed']}", markup=False)
    for name, part in report["undecided"].items():
        rich.print(f"warning: {name} was not decided on {part['n']} of {part['of']} and is not in their score: {part['reason']}", markup=False)


class Console:
    """Progress on standard error: bars in a terminal, plain lines elsewhere. Satisfies `assay.optimizers.Progress`."""

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
