"""`assay judge`: compile judges against human labels, audit them, and use them."""

import click

from assay.cli.judge.audit import audit_command
from assay.cli.judge.card import card_command
from assay.cli.judge.compile import compile_command
from assay.cli.judge.drift import drift_command
from assay.cli.judge.fidelity import fidelity_command
from assay.cli.judge.forget import forget_command
from assay.cli.judge.label import label_command
from assay.cli.judge.lint import lint_command
from assay.cli.judge.score import score_command

__all__ = ["command"]


@click.group("judge")
def command() -> None:
    """Compile judges against human labels, audit them, and score data with them."""


for subcommand in (
    compile_command, audit_command, score_command, card_command, drift_command, label_command, forget_command,
    lint_command, fidelity_command,
):  # fmt: skip
    command.add_command(subcommand)
