"""`assay export`: training data behind gates."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import (
    Decorator,
    json_option,
    out_option,
    rubric_option,
    store_option,
    trust_option,
    with_options,
)
from assay.cli.shared import Console, pop_values, print_json
from assay.cli.wording import in_flags
from assay.reports.texts import readable
from assay.runs.settings.export import OF_KIND, BalanceSettings, ExportSettings, GateSettings, SelectionSettings
from assay.support.numbers import counted
from assay.support.settings import settings_of
from assay.support.terminal import rich_console


@click.group("export")
def command() -> None:
    """Write training data from the store. An export that fails the gate of cleanliness or privacy is not written.

    Rollouts of the gate and test splits are never exported, nor other rollouts with the same inputs.
    """


_SHARED = (*settings_of(SelectionSettings), *settings_of(GateSettings), *settings_of(BalanceSettings))


def _options(kind: str) -> Decorator:
    """The flags of every kind of export, and those of this one."""
    options = [
        out_option("Folder to write; it must not exist.", "DIR", required=True),
        store_option(),
        settings_flags(ExportSettings, only=(*_SHARED, *OF_KIND[kind])),
        trust_option(),
        json_option(),
    ]
    return lambda function: with_options(function, options)


@command.command("sft")
@_options("sft")
def sft(**values: Any) -> None:
    """Prompts and completions of good rollouts, one row per LM call."""
    _export("sft", values)


@command.command("grpo")
@_options("grpo")
@rubric_option("A rubric's name or YAML file, by which completions are scored.", required=True)
def grpo(**values: Any) -> None:
    """Prompts, the columns that the rubric reads, and the rubric as a reward module for plain `trl grpo`."""
    _export("grpo", values)


@command.command("preferences")
@_options("preferences")
def preferences(**values: Any) -> None:
    """Pairs of answers to the same prompt, from groups, for DPO (or --unpaired for KTO)."""
    _export("preferences", values)


@command.command("transitions")
@_options("transitions")
def transitions(**values: Any) -> None:
    """Every LM call with token ids, logprobs, reward, return and advantage, as JSON lines and Parquet."""
    _export("transitions", values)


def _export(kind: str, values: dict[str, Any]) -> None:
    from assay.api.export import export
    from assay.traces.export.settings import UngatedExport

    as_json, out, store = pop_values(values, "as_json", "out", "store")
    rubric = values.pop("rubric", None)  # of grpo alone
    settings = command_settings(values, ExportSettings)
    _open(store)
    try:
        report = export(kind, out, store=store, rubric=rubric, progress=Console(), **settings)
    except UngatedExport as error:
        if as_json:
            print_json({"path": None, "rows": 0, "gates": error.gates})
        else:
            _show_gates(error.gates)
        raise UngatedExport(
            f"{error}. On the command line: --run, --program, --min-clean, --privacy", error.gates
        ) from None
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(kind, data)


def _open(store: str | None) -> None:
    from assay.cli.shared import open_store

    open_store(store).close()


def _gate_text(gate: dict[str, Any]) -> str:
    if not gate["passed"]:
        return f"{'FAILED' if gate['enforced'] else 'WARNING'}: {gate['missing']}"
    return f"passed; WARNING: {gate['warning']}" if gate.get("warning") else "passed"


def _show_gates(gates: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from assay.traces.export.settings import format_value

    table = Table("gate", "value", "required", "", title="gates", title_justify="left")
    for gate in gates:
        table.add_row(gate["gate"], format_value(gate["value"]), format_value(gate["required"]), _gate_text(gate))
    rich_console().print(table)


def _show(kind: str, data: dict[str, Any]) -> None:
    from rich.table import Table

    _show_gates(data["gates"])
    rich = rich_console()
    before, after = data["balance"]["before"], data["balance"]["after"]
    if data["balance"]["method"] != "none":
        table = Table(
            "rollouts of", "before", "after", title=f"balance: {data['balance']['method']}", title_justify="left"
        )
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
        table.add_row(f"rows of {readable(kind_)}", str(count))
    for reason, count in data["left_out"].items():
        table.add_row(f"left out: {reason}", str(count))
    for problem, count in data["problems"].items():
        table.add_row(f"calls with a problem: {problem}", str(count))
    if data["groups_without_spread"]:
        table.add_row("zero-variance groups (advantage 0)", str(data["groups_without_spread"]))
    overlap = data["overlap"]
    if overlap["shared"]:
        table.add_row(
            f"tasks that share {overlap['ngram']} words with a sealed one", f"{overlap['shared']} of {overlap['tasks']}"
        )
    privacy = data["privacy"]
    replaced = ", ".join(f"{count} {name}" for name, count in privacy.get("found", {}).items()) or "nothing"
    result = "not replaced" if privacy["engine"] == "off" else f"{replaced}; {privacy['state']}"
    table.add_row("personal data", f"{privacy['engine']}: {result}")
    for language, types in privacy.get("recall", {}).items():
        shares = ", ".join(f"{name} {result['found']}/{result['planted']}" for name, result in types.items())
        table.add_row(f"planted values found, {language}", shares)
    rich.print(table)
    for note in [*([privacy["note"]] if privacy.get("note") else []), *data["notes"]]:
        rich.print(f"note: {in_flags(note)}")
    rich.print(str(data["path"]), soft_wrap=True)
