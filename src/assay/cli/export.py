"""`assay export`: training data behind gates."""

from collections.abc import Callable
from typing import Any

import click

from assay.cli.shared import Console, json_option, keep, print_json, trust_option, with_options
from assay.cli.wording import counted, in_flags

__all__ = ["command"]


@click.group("export")
def command() -> None:
    """Write training data from the store. An export that fails the gate of cleanliness or privacy is not written.

    Rollouts of the gate and test splits are never exported, nor other rollouts with the same inputs.
    """


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--out", required=True, metavar="DIR", help="Folder to write; it must not exist."),
        click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE."),
        click.option("--run", "runs", multiple=True, help="Only rollouts of this run; repeatable, as are the next four."),
        click.option("--program", "programs", multiple=True, help="Only rollouts of this program, by its full name as in assay traces list."),
        click.option("--task-type", "task_types", multiple=True, help="Only rollouts of this task type."),
        click.option("--source", "sources", multiple=True, help="Only rollouts of this source: program, gateway, otlp, …"),
        click.option("--tenant", "tenants", multiple=True, help="Tenant whose rollouts may be exported; those of other tenants never are."),
        click.option("--require-consent", is_flag=True, help="Only rollouts with a consent on record."),
        click.option("--rated", is_flag=True, help="Only rollouts with a human rating."),
        click.option(
            "--min-transitions", type=click.IntRange(0), default=5000, show_default=True, help="Gate: number of transitions; 0 switches it off."
        ),
        click.option("--min-clean", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Gate: share of clean transitions."),
        click.option("--min-task-types", type=click.IntRange(0), default=5, show_default=True, help="Gate: number of task types; 0 switches it off."),
        click.option("--gated", is_flag=True, help="Enforce all gates; by default too few transitions or task types only warn."),
        click.option(
            "--privacy",
            type=click.Choice(["auto", "patterns", "names", "presidio", "off"]),
            default="auto",
            show_default=True,
            help="Personal data to replace. auto: names too where assay[privacy] is installed; names: or nothing is written.",
        ),
        click.option(
            "--privacy-key",
            metavar="FILE",
            help="Key file of the replacements, kept outside of the export: the same in every export, and reversible.",
        ),
        click.option("--balance", type=click.Choice(["none", "down", "over", "temperature"]), default="none", show_default=True),
        click.option("--by", "by", default="task_type", show_default=True, metavar="A,B", help="Balance by task_type, difficulty, outcome."),
        click.option("--balance-temperature", type=click.FloatRange(0, 1), default=0.5, show_default=True),
        click.option("--most-copies", type=click.IntRange(1), default=3, show_default=True, help="Most copies of a rollout, with --balance over."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
        click.option("--licence", default="not stated", show_default=True, help="Licence of the data, written into the manifest."),
        trust_option(),
        json_option(),
    ]
    return with_options(function, options)


_quality = click.option(
    "--min-quality", type=click.FloatRange(0, 1), default=0.8, show_default=True, help="Lowest rating or score that counts as good."
)


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            "--model",
            default="HuggingFaceTB/SmolLM2-135M-Instruct",
            show_default=True,
            metavar="NAME",
            help="Model that will be trained: a hub name, a folder, embedded/NAME or embedded:FILE. Its chat template renders each row.",
        ),
        click.option(
            "--tools",
            type=click.Choice(["auto", "native", "text"]),
            default="auto",
            show_default=True,
            help="text: write tool calls into the messages; native: keep them as fields; auto: text where the chat template ignores tools.",
        ),
    ]
    return with_options(function, options)


def _credit(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            "--group-by", type=click.Choice(["group", "task"]), default="group", show_default=True, help="task: all rollouts of a task, of any run."
        ),
        click.option("--returns", type=click.Choice(["to_go", "episode", "step", "uniform"]), default="to_go", show_default=True),
        click.option("--discount", type=click.FloatRange(0, 1), default=1.0, show_default=True),
        click.option("--step-weight", type=float, default=1.0, show_default=True, help="Weight of step rewards in the return."),
        click.option("--outcome-weight", type=float, default=1.0, show_default=True, help="Weight of the score in the return."),
        click.option(
            "--outcome",
            type=click.Choice(["score", "human"]),
            default="human",
            show_default=True,
            help="human: the human rating where there is one, else the score.",
        ),
    ]
    return with_options(function, options)


@command.command("sft")
@_options
@_target
@_quality
@click.option("--whole", is_flag=True, help="Write one row per conversation, as messages, instead of one per LM call.")
@click.option("--without-demos", is_flag=True, help="Leave out the demonstrations that a compiled program showed: the model learns to do without.")
def sft(**values: Any) -> None:
    """Prompts and completions of good rollouts, one row per LM call."""
    values["demos"] = not values.pop("without_demos")
    _export("sft", values)


@command.command("grpo")
@_options
@_target
@click.option("--rubric", required=True, metavar="R", help="A rubric's name or YAML file, by which completions are scored.")
@click.option(
    "--call",
    type=click.Choice(["last", "first", "all"]),
    default="last",
    show_default=True,
    help="Which LM call of a rollout the policy is trained to make.",
)
def grpo(**values: Any) -> None:
    """Prompts, the columns that the rubric reads, and the rubric as a reward module for plain `trl grpo`."""
    _export("grpo", values)


@command.command("preferences")
@_options
@_target
@_quality
@_credit
@click.option(
    "--margin", type=click.FloatRange(0), default=0.1, show_default=True, help="Smallest difference between the returns of the two answers."
)
@click.option("--unpaired", is_flag=True, help="Rows for KTO: each completion with a label.")
def preferences(**values: Any) -> None:
    """Pairs of answers to the same prompt, from groups, for DPO (or --unpaired for KTO)."""
    _export("preferences", values)


@command.command("transitions")
@_options
@_quality
@_credit
@click.option("--advantage", type=click.Choice(["group", "batch", "none"]), default="group", show_default=True)
@click.option("--by-outcome", is_flag=True, help="Compute advantages separately for the good and the other rollouts of a group.")
def transitions(**values: Any) -> None:
    """Every LM call with token ids, logprobs, reward, return and advantage, as JSON lines and Parquet."""
    _export("transitions", values)


def _export(kind: str, values: dict[str, Any]) -> None:
    from pathlib import Path

    from assay.exporting import export
    from assay.traces.balance import Balance
    from assay.traces.gates import Gates, UngatedExport
    from assay.traces.selection import Selection

    as_json, out, store, key = keep(values, "as_json", "out", "store", "privacy_key")
    names = ("runs", "programs", "task_types", "sources", "tenants", "require_consent", "rated")
    selection = Selection(**dict(zip(names, keep(values, *names), strict=True)))
    method, by, temperature, copies, seed = keep(values, "balance", "by", "balance_temperature", "most_copies", "seed")
    balance = Balance(
        method=method, by=tuple(part.strip() for part in by.split(",") if part.strip()), temperature=temperature, most_copies=copies, seed=seed
    )
    limits = ("min_transitions", "min_clean", "min_task_types", "gated")
    gates = Gates(**dict(zip(limits, keep(values, *limits), strict=True)))
    _open(store)
    try:
        report = export(
            kind, out, store=store, progress=Console(),  # type: ignore[arg-type]
            selection=selection, gates=gates, balance=balance,
            privacy_key=Path(key) if key else None, **values,
        )  # fmt: skip
    except UngatedExport as error:
        if as_json:
            print_json({"path": None, "rows": 0, "gates": error.gates})
        else:
            _show_gates(error.gates)
        raise UngatedExport(f"{error}. On the command line: --run, --program, --min-clean, --privacy", error.gates) from None
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(kind, data)


def _open(store: str | None) -> None:
    from assay.cli.traces import open_store

    open_store(store).close()


def _said_of(gate: dict[str, Any]) -> str:
    if not gate["passed"]:
        return f"{'FAILED' if gate['enforced'] else 'WARNING'}: {gate['missing']}"
    return f"passed; WARNING: {gate['warning']}" if gate.get("warning") else "passed"


def _show_gates(gates: list[dict[str, Any]]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    from assay.traces.gates import shown_value

    table = Table("gate", "value", "required", "", title="gates", title_justify="left")
    for gate in gates:
        table.add_row(gate["gate"], shown_value(gate["value"]), str(gate["required"]), _said_of(gate))
    Rich(highlight=False, markup=False).print(table)


def _show(kind: str, data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    _show_gates(data["gates"])
    rich = Rich(highlight=False, markup=False)
    before, after = data["balance"]["before"], data["balance"]["after"]
    if data["balance"]["method"] != "none":
        table = Table("rollouts of", "before", "after", title=f"balance: {data['balance']['method']}", title_justify="left")
        for cell in before:
            table.add_row(cell, str(before[cell]), str(after.get(cell, 0)))
        rich.print(table)
    table = Table(
        "",
        "",
        title=f"{counted(data['rows'], 'rows')} for {kind} from {counted(data['rollouts'], 'rollouts')}",
        title_justify="left",
        show_header=False,
    )
    for kind_, count in data["task_types"].items():
        table.add_row(f"rows of {kind_}", str(count))
    for reason, count in data["left_out"].items():
        table.add_row(f"left out: {reason}", str(count))
    for why, count in data["problems"].items():
        table.add_row(f"calls with a problem: {why}", str(count))
    if data["groups_without_spread"]:
        table.add_row("groups without spread (advantage 0)", str(data["groups_without_spread"]))
    overlap = data["overlap"]
    if overlap["shared"]:
        table.add_row(f"tasks that share {overlap['ngram']} words with a sealed one", f"{overlap['shared']} of {overlap['tasks']}")
    privacy = data["privacy"]
    found = ", ".join(f"{count} {name}" for name, count in privacy.get("found", {}).items()) or "nothing"
    table.add_row("personal data", f"{privacy['engine']}: {found}")
    rich.print(table)
    for note in [*([privacy["note"]] if privacy.get("note") else []), *data["notes"]]:
        rich.print(f"note: {in_flags(note)}")
    rich.print(str(data["path"]), soft_wrap=True)
