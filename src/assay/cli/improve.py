"""`assay improve`: prompts and weights in turn."""

from typing import Any

import click

from assay.cli.shared import Console, keep, print_json, run_config, run_options

__all__ = ["command"]

_ORDER = "prompts,sft,prompts"


@click.command("improve")
@click.argument("program")
@run_options
@click.option("--name", required=True, help="Of this improvement; its adapters are NAME-1, NAME-2, …")
@click.option("--order", default=_ORDER, show_default=True, help="Steps out of prompts, sft and grpo, in order.")
@click.option("--rollouts", type=click.IntRange(1), default=2, show_default=True, help="Of each train task that sft collects.")
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="Of sft, at most.")
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True, help="Of grpo.")
@click.option("--max-search-calls", type=click.IntRange(1), help="Most LM calls of each search; 300 by default.")
@click.option("--train-size", type=click.IntRange(1), help="Most tasks taken of train.")
@click.option("--val-size", type=click.IntRange(1), help="Most tasks taken of val.")
@click.option("--gate-size", type=click.IntRange(1), help="Most tasks taken of gate.")
@click.option("--test-size", type=click.IntRange(1), help="Most tasks taken of test.")
@click.option("--out", help="Folder of the artifact.")
def command(program: str, **values: Any) -> None:
    """Improve PROGRAM: prompts, then weights, then prompts again.

    Each step is kept only where the gate split favours it; the sealed test is reported at the end. Run it again, on the artifact and
    under another name, as data arrives.
    """
    from assay.improving import improve

    as_json, store, out, resume, name, order, rollouts, epochs, steps = keep(
        values, "as_json", "store", "out", "resume", "name", "order", "rollouts", "epochs", "steps"
    )
    sizes = {split: size for split in ("train", "val", "gate", "test") if (size := values.pop(f"{split}_size")) is not None}
    report = improve(
        program, name=name, order=[step.strip() for step in order.split(",") if step.strip()], rollouts=rollouts, sft={"epochs": epochs},
        grpo={"steps": steps}, out=out, store=store, resume=resume, progress=Console(), sizes=sizes, **run_config(values),  # type: ignore[arg-type]
    ).to_dict()  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    from assay.optimizers.weights.page import in_numbers, interval

    rich = Rich(highlight=False)
    table = Table("step", "gate, paired 95 %", "", "model", title="steps")
    for told in report["steps"]:
        table.add_row(told["step"], interval(told["gate"]), "kept" if told["kept"] else "not kept", told.get("model", ""))
    rich.print(table)
    for told in report["steps"]:
        if told.get("note"):
            rich.print(f"note: {told['step']}: {told['note']}", markup=False)
    if report["test"]:
        table = Table("", "start", "end", "gain, paired 95 %", title=f"sealed tasks, {report['test']['before']['n']}")
        for row in in_numbers({"test": report["test"]}):
            table.add_row(*row)
        rich.print(table)
    else:
        rich.print("nothing was kept, so there is nothing to compare: the program stays as it is")
    rich.print(f"model: {report['model']}\nartifact: {report['artifact']}", markup=False, soft_wrap=True)
