"""`assay compare`: two programs or artifacts, paired, task by task."""

from typing import Any

import click

from assay.cli.flags import command_settings, is_artifact, settings_flags
from assay.cli.options import job_options, report_option
from assay.cli.shared import Console, pop_values, print_json, print_models, print_openings, require_coverage
from assay.cli.wording import in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.runs.settings import CompareSettings
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("compare")
@click.argument("a")
@click.argument("b")
@settings_flags(CompareSettings, sizes=())
@job_options()
@report_option()
def command(a: str, b: str, **values: Any) -> None:
    """Score A and B (programs' names or artifacts' folders) on the same tasks. The gain is the score of B minus that of
    A, with a 95 % interval."""
    from assay.api.compare import compare
    from assay.api.pages import write_compare_page

    as_json, store, resume, page = pop_values(values, "as_json", "store", "resume", "report")
    settings = command_settings(values, CompareSettings, artifact=is_artifact(a, b))
    report = compare(a, b, store=store, resume=resume, progress=Console(), **settings)
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(data)
    if page is not None:
        write_compare_page(page, report, store=store, words=in_flags)
    require_coverage(data)


def _show(data: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.reports.markdown import figure, graded, tool_rows, with_interval

    rich, a, b = rich_console(), data["a"], data["b"]
    table = Table("", "a", "b", title=f"{data['split']}, {counted(b['n'], 'tasks')}", title_justify="left")
    table.add_row("program", a["program"], b["program"])
    if a["state"] or b["state"]:
        table.add_row("state", a["state"] or "–", b["state"] or "–")
    table.add_row("model", a["model"], b["model"])
    table.add_row("score", figure(a["score"]), figure(b["score"]), style="bold")
    for name in b["criteria"]:
        table.add_row(f"  {name}", graded(a, name), graded(b, name))
    for row in tool_rows([a, b]):
        table.add_row(*row)
    table.add_row("failed, unscored", f"{a['failed']}, {a['unscored']}", f"{b['failed']}, {b['unscored']}")
    rich.print(table)
    for side in "ab":
        print_models(rich, data[side], f" of {side}")
    paired = [task for task in data["tasks"] if task["a"] is not None and task["b"] is not None]
    better, worse = sum(task["b"] > task["a"] for task in paired), sum(task["b"] < task["a"] for task in paired)
    rich.print(f"b is better on {counted(better, 'tasks')}, worse on {worse}, level on {len(paired) - better - worse}")
    gain = data["gain"]
    verdict = (
        "no significant difference"
        if gain["mean"] is None or gain["low"] <= 0 <= gain["high"]
        else "a gain"
        if gain["low"] > 0
        else "a loss"
    )
    rich.print(f"gain of b: {with_interval(gain)}: {verdict}")
    for note in [*data["notes"], *near_notes(data["data"]), *stop_note(data["stopped"])]:
        rich.print(f"note: {in_flags(note)}")
    print_openings(rich, data["test_openings"])
