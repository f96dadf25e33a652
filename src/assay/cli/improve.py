"""`assay improve`: prompts and weights in turn."""

from typing import Any

import click

from assay.cli.shared import (
    Console,
    decision_options,
    dry_run,
    json_or_text,
    keep,
    pairs,
    print_json,
    require_coverage,
    run_config,
    run_options,
    say_openings,
    token_margin_option,
)
from assay.cli.wording import in_flags

__all__ = ["command"]

_ORDER = "prompts,sft,prompts"


@click.command("improve")
@click.argument("program")
@run_options
@decision_options
@token_margin_option()
@click.option("--name", required=True, help="Name of this improvement; its adapters are called NAME-1, NAME-2, …")
@click.option("--order", default=_ORDER, show_default=True, help="Comma-separated steps in order: prompts, sft, grpo.")
@click.option("--rollouts", type=click.IntRange(1), default=2, show_default=True, help="Rollouts that sft collects of each train task.")
@click.option("--sft", multiple=True, metavar="NAME=VALUE", help="A setting of sft, by its flag in `assay train sft`: epochs=2.")
@click.option("--grpo", multiple=True, metavar="NAME=VALUE", help="A setting of grpo, by its flag in `assay train grpo`: steps=12, beta=0.")
@click.option("--retain", multiple=True, metavar="PROGRAM,RUBRIC,DATA", help="Retention task: a program whose score grpo must not lower.")
@click.option("--watch", metavar="R", help="Monitor rubric: scores the rollouts of grpo and is not trained on.")
@click.option("--max-search-calls", type=click.IntRange(1), help="Cap on the LM calls of each search; 300 by default.")
@click.option("--train-size", type=click.IntRange(1), help="Largest number of train tasks.")
@click.option("--val-size", type=click.IntRange(1), help="Largest number of val tasks.")
@click.option("--gate-size", type=click.IntRange(1), help="Largest number of gate tasks.")
@click.option("--test-size", type=click.IntRange(1), help="Largest number of test tasks.")
@click.option("--out", help="Folder to write the artifact to.")
def command(program: str, **values: Any) -> None:
    """Improve PROGRAM: prompts, then weights, then prompts again.

    Each step is kept only where the gate split favours it; the sealed test is reported at the end. A cap that is reached ends it with
    the best version so far; --resume with a higher cap continues. Run it again, on the artifact and under another name, as data arrives.
    """
    from assay.improving import improve

    as_json, store, out, resume, name, order, rollouts, sft, grpo, retain, watch = keep(
        values, "as_json", "store", "out", "resume", "name", "order", "rollouts", "sft", "grpo", "retain", "watch"
    )
    steps, settings = [step.strip() for step in order.split(",") if step.strip()], (_settings(sft, "--sft"), _settings(grpo, "--grpo"))
    sizes = {split: size for split in ("train", "val", "gate", "test") if (size := values.pop(f"{split}_size")) is not None}
    if values["dry_run"]:
        dry_run(
            "improve", program, values, as_json=as_json, store=store, sizes=sizes, repeats=rollouts, order=steps,
            sft=settings[0], grpo=settings[1], retain=retain, watch=watch, name=None if resume else name,
        )  # fmt: skip
        return
    report = improve(
        program, name=name, order=steps, rollouts=rollouts, sft=settings[0], grpo=settings[1], retain=retain, watch=watch, out=out, store=store,
        resume=resume, sizes=sizes, progress=Console(),  # type: ignore[arg-type]
        **run_config(values),
    ).to_dict()  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _show(report)
    require_coverage(report)


def _settings(given: tuple[str, ...], flag: str) -> dict[str, Any]:
    return {name.replace("-", "_"): json_or_text(text) for name, text in pairs(given, flag).items()}


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
            rich.print(f"note: {told['step']}: {in_flags(told['note'])}", markup=False)
    for note in [*report["notes"], *([f"stopped early: {report['stopped']}; raise the cap and add --resume"] if report["stopped"] else [])]:
        rich.print(f"note: {in_flags(note)}", markup=False)
    if report["test"]:
        table = Table("", "start", "end", "gain, paired 95 %", title=f"sealed tasks, {report['test']['before']['n']}")
        for row in in_numbers({"test": report["test"]}):
            table.add_row(*row)
        rich.print(table)
    elif not any(told["kept"] for told in report["steps"]):
        rich.print("nothing was kept, so there is nothing to compare: the program stays as it is")
    say_openings(rich, report["test_openings"])
    rich.print(f"model: {report['model']}\nartifact: {report['artifact']}", markup=False, soft_wrap=True)
