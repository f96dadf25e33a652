"""`assay judge compile`: optimize and calibrate a judge against human labels."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.judge.tables import MEASURES, gain_text, interval_text, number, show_agreement, show_card
from assay.cli.options import job_options
from assay.cli.shared import Console, pop_values, print_json, print_openings, require_coverage
from assay.cli.wording import in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.reports.markdown import cost_words, gain_claim, why_sealed
from assay.runs.settings import JudgeCompileSettings
from assay.support.numbers import calls_text, counted
from assay.support.terminal import rich_console


@click.command("compile")
@click.argument("judge")
@settings_flags(JudgeCompileSettings)
@job_options(out="New folder to write the artifact to.")
def compile_command(judge: str, **values: Any) -> None:
    """Compile JUDGE against human labels, and report its agreement on sealed items next to the human ceiling.

    JUDGE is a YAML file, path/to/file.py:NAME, an artifact's folder, or one sentence that says what to judge.
    """
    from assay.api.judge import compile as judging

    as_json, store, out, resume = pop_values(values, "as_json", "store", "out", "resume")
    report = judging.compile_judge(
        judge, store=store, out=out, resume=resume, progress=Console(), **command_settings(values, JudgeCompileSettings)
    )
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        show_report(data)
    require_coverage(data)


def show_report(data: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.api.judge.report import UNPROVEN

    rich = rich_console()
    before, after, ceiling, card = data["test"]["baseline"], data["test"]["compiled"], data["ceiling"], data["card"]
    if before and after:
        table = Table(title=f"agreement with raters, {after['n']} sealed items", title_justify="left")
        for column in ("", "baseline", "compiled", "95 %", "raters"):
            table.add_column(column, justify="left" if not column else "right")
        for name in MEASURES:
            style = "bold" if name == data["objective"] else ""
            table.add_row(
                name.replace("_", " "),
                number(before[name]),
                number(after[name]),
                interval_text(after["intervals"].get(name)),
                number(ceiling[name]),
                style=style,
            )
        table.add_row("unscored", str(before["unscored"]), str(after["unscored"]), "", "")
        rich.print(table)
        for prefix, side in (("", after), ("raters' ", ceiling)):
            for name, reason in sorted(side["undefined"].items()):
                if not prefix or name != "brier":  # raters give no probabilities
                    rich.print(f"{prefix}{name.replace('_', ' ')} is undefined: {reason}")
        gain, accuracy = data["test"]["gain"], data["test"]["accuracy_gain"]
        measure = data["objective"].replace("_", " ")
        claim = "" if gain["low"] is None else f": {gain_claim(gain['low'], gain['high'], data['test_openings'])}"
        rich.print(f"gain in {measure}: {gain_text(gain)}{claim}; in accuracy: {gain_text(accuracy)}")
        show_card(rich, card, reported=after["undefined"])
        print_openings(rich, data["test_openings"])
    else:
        if card:
            show_agreement(rich, card)
            show_card(rich, card)
        rich.print(why_sealed(data))
    if data["gate"]:
        verdict = "the compiled judge replaces the baseline" if data["replaces"] else UNPROVEN
        rich.print(f"gate ({counted(data['gate']['n'], 'items')}): {gain_text(data['gate'])}: {verdict}")
    rich.print(
        f"winner: {data['winner']}; LM calls: {calls_text(data['calls'], data['cached'])}, "
        f"{cost_words(data['cost_usd'])}",
    )
    for note in [
        *data["notes"],
        *near_notes(data["data"]),
        *stop_note(data["stopped"]),
    ]:
        rich.print(f"note: {in_flags(note)}")
    for name, key in (("artifact", "artifact"), ("unproven judge", "unproven")):
        if data[key]:
            rich.print(f"{name}: {data[key]}", soft_wrap=True)
