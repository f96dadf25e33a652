"""`assay compile`: the main job."""

from collections.abc import Iterator
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
from assay.cli.wording import in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.reports.markdown import cost_words
from assay.runs.settings import CompileSettings
from assay.support.numbers import calls_text, counted, figure, price, signed
from assay.support.terminal import rich_console


@click.command("compile")
@click.argument("program", required=False)
@settings_flags(CompileSettings)
@job_options(dry_run=True, out="New folder to write the artifact to.")
@report_option()
@click.option("--trainset", metavar="FILE", help="Tasks of train; the splits that have no file are taken from --data.")
@click.option("--valset", metavar="FILE", help="Tasks of val, as --trainset.")
def command(program: str | None, **values: Any) -> None:
    """Compile PROGRAM's prompts against a rubric, and report it on a sealed test split.

    PROGRAM is path/to/file.py[:Class], package.module:Class, an artifact's folder, or a shipped program
    (math_qa, classify, extract, tool_user, code_repair, answer_from_documents, text_to_sql, nim, experiment,
    converse).
    """
    from assay.api.compile import compile
    from assay.api.pages import write_compile_page
    from assay.runs.arguments import split_data

    as_json, store, out, resume, dry, page = pop_values(
        values, "as_json", "store", "out", "resume", "dry_run", "report"
    )
    trainset, valset = pop_values(values, "trainset", "valset")
    program, settings = command_job(values, program, CompileSettings)
    settings["data"] = split_data(settings["data"], trainset, valset)
    if dry:
        return dry_run("compile", program, settings, as_json=as_json, store=store)
    report = compile(program, out=out, store=store, resume=resume, progress=Console(), words=in_flags, **settings)
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        print_report(data)
    if page is not None:
        write_compile_page(page, report, store=store, words=in_flags)
    # the baseline's on val where the test stayed sealed
    require_coverage(data["candidates"][:1] if data["test"]["compiled"] is None else data["test"])
    if data["failed"]:
        click.get_current_context().exit(1)


def print_report(data: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.reports.markdown import why_sealed

    rich = rich_console()
    before, after, gain = (data["test"][key] for key in ("baseline", "compiled", "gain"))
    if before and after and gain:
        sides = [before, after]
        table = Table(title=f"sealed test split, {counted(after['n'], 'tasks')}", title_justify="left")
        table.add_column("", justify="left")
        for column in ("baseline", "compiled"):
            table.add_column(column, justify="right")
        for label, *cells, style in table_rows(sides):
            table.add_row(label, *cells, style=style)
        rich.print(table)
        warn_of_failures(rich, after)
        rich.print(_gain_line(gain, data["test_openings"]))
    else:
        rich.print(why_sealed(data))
    print_openings(rich, data["test_openings"])
    gate = data["gate"]
    if gate:
        verdict = (
            "the compiled program replaces the baseline"
            if data["replaces"]
            else "no proof on gate that it is better: the baseline is kept, in the artifact too"
        )
        rich.print(
            f"gate ({counted(gate['n'], 'tasks')}): {signed(gate['mean'])}, "
            f"95 % [{signed(gate['low'])}, {signed(gate['high'])}]: {verdict}",
        )
    elif data["winner"] != "baseline":
        rich.print(
            "gate: not decided, so nothing proves that the compiled program is better: the baseline is kept"
            if data["unproven"]
            else "gate: not asked to decide; the artifact has the winner on val",
        )
    cost = cost_words(data["cost_usd"]) + (
        f" ({data['unpriced_calls']} calls without a known price)" if data["unpriced_calls"] else ""
    )
    rich.print(
        f"winner: {data['winner']}; LM calls: {calls_text(data['calls'], data['cached'])}, "
        f"{data['search_calls']:,} of them searching; {data['tokens']:,} tokens, {cost}",
    )  # fmt: skip
    print_models(rich, data)
    warn_of_gaps(rich, data)
    for note in [
        *data["notes"],
        *near_notes(data["data"]),
        *stop_note(data["stopped"]),
    ]:
        rich.print(f"note: {in_flags(note)}")
    rich.print(f"artifact: {data['artifact']}", soft_wrap=True)
    if data["unproven"]:
        rich.print(f"unproven program: {data['unproven']}", soft_wrap=True)


def table_rows(sides: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Rows of the table: label, a cell for each side, style."""
    from assay.reports.markdown import graded, tool_rows, type_label

    kinds = sides[-1]["task_types"]
    yield "score", *(figure(side["score"]) for side in sides), "bold"
    for name in sides[-1]["criteria"]:
        yield f"  {name}", *(graded(side, name) for side in sides), ""
    for kind in kinds if len(kinds) > 1 else ():
        yield f"  {type_label(kind)}", *(figure(side["task_types"].get(kind)) for side in sides), ""
    for row in tool_rows(sides):
        yield *row, ""
    for label, key in (("failed runs", "failed"), ("unscored", "unscored")):
        yield label, *(str(side[key]) for side in sides), ""
    for label, key in (("LM calls a task", "calls_per_task"), ("tokens a task", "tokens_per_task")):
        yield label, *(f"{side[key]:.1f}" for side in sides), ""
    unpriced = any(
        side["cost_usd"] is None for side in sides
    )  # then a side that came from the cache has no cost to compare with either
    yield "cost", *(price(None if unpriced else side["cost_usd"]) for side in sides), ""


def _gain_line(gain: dict[str, Any], openings: dict[str, int] | None) -> str:
    from assay.reports.markdown import gain_claim

    if gain["mean"] is None:
        return "gain: nothing was scored in both"
    verdict = gain_claim(gain["low"], gain["high"], openings)
    return (
        f"gain: {signed(gain['mean'])}, paired 95 % interval [{signed(gain['low'])}, {signed(gain['high'])}]: {verdict}"
    )
