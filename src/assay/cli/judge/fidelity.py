"""`assay judge fidelity`: the card of a simulated user."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.judge.tables import spent_text
from assay.cli.options import job_options
from assay.cli.shared import Console, pop_values, print_json
from assay.runs.settings import FidelitySettings
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("fidelity")
@click.argument("user")
@settings_flags(FidelitySettings)
@job_options(resume=False)
def fidelity_command(user: str, **values: Any) -> None:
    """Audit the simulated USER (rules, model or file.py:Class) of conversations. Exit code 1 if it fails."""
    from assay.api.judge.fidelity import audit_user

    (as_json,) = pop_values(values, "as_json")
    values |= command_settings(values, FidelitySettings)
    card = audit_user(user, progress=Console(), **values)
    if as_json:
        print_json(card)
    else:
        _show_card(card)
    if not card["passed"]:
        click.get_current_context().exit(1)


def _show_card(card: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.judges.quality.fidelity import FAULTS

    rich, table = rich_console(), Table(title=f"fidelity of the user {card['user']}", title_justify="left")
    for column in ("fault", "runs", "95 %", "the user"):
        table.add_column(column, justify="right" if column in ("runs", "95 %") else "left")
    for name, fault in [*card["faults"].items(), ("faithful", card["faithful"])]:
        share = "–" if fault["share"] is None else f"{fault['share']:.0%}"
        text = FAULTS.get(name, "made no fault")
        table.add_row(name, share, f"{fault['low']:.0%} to {fault['high']:.0%}", text)
    rich.print(table)
    for name, fault in card["faults"].items():
        if fault["share"] is not None and fault["share"] > card["fail_over"]:
            rich.print(f"{name}: {' | '.join(fault['example'])}")
    for reason in card["why_failed"]:
        rich.print(f"note: the user failed: {reason}")
    verdict = "passed" if card["passed"] else "FAILED"
    counts = f"{counted(card['n'], 'runs')}, {card['failed']} in which the user failed"
    limit = f"at most {card['fail_over']:.0%} of the runs with a fault"
    rich.print(f"{verdict}: {limit}; {counts}; {spent_text(card)}")
