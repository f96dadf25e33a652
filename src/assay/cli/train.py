"""`assay train`: weights from traces."""

from typing import Any

import click

from assay.cli.shared import Console, json_option, keep, print_json

__all__ = ["command"]


@click.group("train")
def command() -> None:
    """Train weights on exported traces: an adapter that is served at once."""


@command.command("sft")
@click.argument("export", type=click.Path())
@click.option("--name", required=True, help="The adapter's name; it is served as MODEL+NAME.")
@click.option(
    "--model", default="embedded/smollm2-135m", show_default=True, help="What is trained; adapters in its name are merged before. Or a hub model."
)
@click.option("--min-quality", type=click.FloatRange(0, 1), default=0.8, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="At most.")
@click.option("--learning-rate", type=float, default=2e-4, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Rows an optimizer step.")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Of the LoRA matrices.")
@click.option("--max-length", type=click.IntRange(16), default=2048, show_default=True, help="Tokens; longer rows are left out.")
@click.option("--held-out", type=click.FloatRange(0, 0.5), default=0.1, show_default=True, help="Share of the tasks that says when to stop.")
@click.option("--patience", type=click.IntRange(1), default=2, show_default=True, help="Evaluations without a lower held-out loss.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--report-to", default="none", show_default=True, help="tensorboard, trackio, wandb.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint.")
@json_option()
def sft(**values: Any) -> None:
    """A warm-up on the good rows of `assay export sft` (its folder), or on JSON lines with prompt and completion."""
    from assay.optimizers.weights import SFTConfig, train_sft

    as_json, source, name, resume = keep(values, "as_json", "export", "name", "resume")
    shown = Console()
    data = train_sft(source, name, SFTConfig(**values), resume=resume, progress=shown).to_dict()  # type: ignore[arg-type]
    if as_json:
        print_json(data)
        return
    _show(data)


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    rich, table = Rich(highlight=False), Table("step", "loss", "held out", title="mean loss of a completion's token")
    losses, held_out = data["loss"], data["held_out_loss"]
    steps = sorted(held_out) or sorted(losses)[:: max(1, len(losses) // 8)]
    for step in steps:
        near = max((at for at in losses if at <= step), default=None)
        row = [str(step), "" if near is None else f"{losses[near]:.3f}", f"{held_out[step]:.3f}" if step in held_out else ""]
        table.add_row(*row, style="bold" if step == data["best_step"] else None)
    rich.print(table)
    rich.print(
        f"{data['rows']} rows of {data['tasks']} tasks, {data['held_out_rows']} held out; {data['steps']} steps, the best is {data['best_step']}"
    )
    for why, count in data["left_out"].items():
        rich.print(f"{count} rows left out: {why}", markup=False)
    if data["agreement"] is not None:
        rich.print(f"served beside torch: {100 * data['agreement']:.0f} % of greedy texts are the same")
    for note in [*data["notes"], *([data["stopped"]] if data["stopped"] else [])]:
        rich.print(f"note: {note}", markup=False)
    if data["name"]:
        rich.print(f"{data['path']}\nIn any command: --model {data['name']}", markup=False, soft_wrap=True)
    else:
        rich.print(str(data["path"]), markup=False, soft_wrap=True)
