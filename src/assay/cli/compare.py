"""`assay compare`: two programs or artifacts, paired, task by task."""

from typing import Any

import click

from assay.cli.shared import Console, keep, print_json, require_coverage, run_config, run_options, say_openings
from assay.cli.wording import in_flags

__all__ = ["command"]


@click.command("compare")
@click.argument("a")
@click.argument("b")
@run_options
@click.option(
    "--split",
    type=click.Choice(["train", "val", "gate", "test"]),
    default="val",
    show_default=True,
    help="Split to score; test is sealed, and each opening is counted.",
)
@click.option("--size", type=click.IntRange(1), help="Largest number of tasks taken from the split.")
def command(a: str, b: str, **values: Any) -> None:
    """Score A and B (programs' names or artifacts' folders) on the same tasks. The gain is the score of B minus that of A, with a 95 % interval."""
    from assay.comparing import compare

    as_json, store, split, size, _ = keep(values, "as_json", "store", "split", "size", "resume")
    sizes = {split: size} if size is not None else {}
    report = compare(a, b, split=split, store=store, progress=Console(), sizes=sizes, **run_config(values))  # type: ignore[arg-type]
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(data)
    require_coverage(data)


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    from assay.compilereport import figure, percent, with_interval

    rich, a, b = Rich(highlight=False, markup=False), data["a"], data["b"]
    table = Table("", "a", "b", title=f"{data['split']}, {b['n']} tasks", title_justify="left")
    table.add_row("program", a["program"], b["program"])
    table.add_row("model", a["model"], b["model"])
    table.add_row("score", figure(a["score"]), figure(b["score"]), style="bold")
    for name in b["criteria"]:
        table.add_row(f"  {name}", percent(a["criteria"].get(name)), percent(b["criteria"][name]))
    table.add_row("failed, unscored", f"{a['failed']}, {a['unscored']}", f"{b['failed']}, {b['unscored']}")
    rich.print(table)
    both = [task for task in data["tasks"] if task["a"] is not None and task["b"] is not None]
    better, worse = sum(task["b"] > task["a"] for task in both), sum(task["b"] < task["a"] for task in both)
    rich.print(f"b is better on {better} tasks, worse on {worse}, level on {len(both) - better - worse}")
    gain = data["gain"]
    what = "no significant difference" if gain["mean"] is None or gain["low"] <= 0 <= gain["high"] else "a gain" if gain["low"] > 0 else "a loss"
    rich.print(f"gain of b: {with_interval(gain)}: {what}")
    for note in data["notes"]:
        rich.print(f"note: {in_flags(note)}")
    say_openings(rich, data["test_openings"])
