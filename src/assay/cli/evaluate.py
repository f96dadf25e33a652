"""`assay evaluate`: score a program or an artifact on one split."""

from typing import Any

import click

from assay.cli.flags import command_job, settings_flags
from assay.cli.options import job_options, report_option
from assay.cli.shared import (
    Console,
    dry_run,
    pop_values,
    print_json,
    print_models,
    print_openings,
    require_coverage,
    warn_of_failures,
    warn_of_gaps,
)
from assay.cli.value_types import Number
from assay.cli.wording import in_flags, stop_note, thinking_row
from assay.datasets.rows import near_notes
from assay.runs.settings import EvaluateSettings
from assay.support.numbers import calls_text, counted, figure, price
from assay.support.terminal import echo, rich_console


@click.command("evaluate")
@click.argument("program", required=False)
@settings_flags(EvaluateSettings, sizes=())
@click.option(
    "--fail-under",
    type=Number(0, 1),
    metavar="SCORE",
    help="Exit with code 1 if the score is below this or missing (for CI).",
)
@job_options(dry_run=True)
@report_option()
def command(program: str | None, **values: Any) -> None:
    """Score PROGRAM (a program's name or an artifact's folder), with a 95 % interval, by criterion and by task type."""
    from assay.api.evaluate import evaluate
    from assay.api.pages import write_evaluation_page
    from assay.errors import ModelError

    as_json, store, resume, least, dry, page = pop_values(
        values, "as_json", "store", "resume", "fail_under", "dry_run", "report"
    )
    program, settings = command_job(values, program, EvaluateSettings)
    if dry:
        return dry_run("evaluate", program, settings, as_json=as_json, store=store)
    report = evaluate(program, store=store, resume=resume, progress=Console(), **settings)
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        print_result(program, data)
    if page is not None:
        write_evaluation_page(page, report, program=program, store=store, words=in_flags)
    if (reason := report.evaluation.why_unscored) is not None:
        raise ModelError(f"none of the {len(report.evaluation)} tasks could be scored: {reason}")
    require_coverage(data)
    if least is not None and (problem := _below(data, least)):
        echo(f"assay: the score {problem} --fail-under {least:g}", err=True)
        click.get_current_context().exit(1)


def _below(data: dict[str, Any], least: float) -> str:
    """Why a score does not meet a threshold; empty if it does. The score of a part of the tasks meets none."""
    score, scored, tasks = data["result"]["score"], data["result"]["n"], data["tasks"]
    if score is None:
        return "is missing and cannot meet"
    if data["stopped"] and scored < tasks:
        return f"{score:.3f} is of {scored} of {counted(tasks, 'tasks')} ({data['stopped']}) and cannot meet"
    return f"{score:.3f} is below" if score < least else ""


def print_result(program: str, data: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.reports.markdown import graded, tool_rows, type_label

    result, rich = data["result"], rich_console()
    finished = f"{counted(result['n'], 'tasks')}{' finished' if data['stopped'] else ''}"
    table = Table(title=f"{program} on {data['split']}, {finished}", title_justify="left", show_header=False)
    if result["score"] is None:
        table.add_row("score", "– (nothing could be scored)")
    else:
        low, high = result["interval"]
        table.add_row("score", f"{result['score']:.3f}  95 % [{low:.3f}, {high:.3f}]", style="bold")
    for name in result["criteria"]:
        table.add_row(f"  {name}", graded(result, name))
    for kind, mean in result["task_types"].items() if len(result["task_types"]) > 1 else ():
        table.add_row(f"  {type_label(kind)}", figure(mean))
    for row in tool_rows([result]):
        table.add_row(*row)
    table.add_row("failed runs, unscored", f"{result['failed']}, {result['unscored']}")
    table.add_row("LM calls, with the preflight's", calls_text(data["calls"], data["cached"]))
    if (thinking := result["thinking"]) is not None:
        table.add_row("thinking tokens a run", thinking_row(thinking))
    table.add_row("tokens, dollars", f"{data['tokens']:,}, {price(data['cost_usd'])}")
    rich.print(table)
    print_models(rich, data)
    for name, corrected in data["corrected"].items():
        text = (
            f"{name}, corrected by {corrected['n_people']} human labels: {corrected['mean']:.3f}, 95 % "
            f"[{corrected['low']:.3f}, {corrected['high']:.3f}] "
            f"(verdicts alone {corrected['verdicts_alone']:.3f})"
        )
        rich.print(text)
    print_openings(rich, data["test_openings"])
    warn_of_failures(rich, result, is_error=True)
    warn_of_gaps(rich, data)
    for note in [*data["notes"], *near_notes(data["data"]), *stop_note(data["stopped"])]:
        rich.print(f"note: {in_flags(note)}")
