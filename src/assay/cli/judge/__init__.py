"""`assay judge`: compile judges against human labels, audit them, and use them."""

import click

from assay.cli.derived import PartlyDerived
from assay.cli.judge.audit import audit_command
from assay.cli.judge.card import card_command
from assay.cli.judge.compile import compile_command
from assay.cli.judge.drift import drift_command
from assay.cli.judge.fidelity import fidelity_command
from assay.cli.judge.score import score_command

__all__ = ["command"]


@click.group("judge", cls=PartlyDerived)
def command() -> None:
    """Compile judges against human labels, audit them, and score data with them."""


for subcommand in (
    compile_command, audit_command, score_command, card_command, drift_command, fidelity_command,
):  # fmt: skip
    command.add_command(subcommand)
