"""`assay traces`: list, inspect, rate, score, import, export, delete recorded rollouts. One module per subcommand."""

import click

from assay.cli.traces.close import close_command
from assay.cli.traces.exporting import export_command
from assay.cli.traces.forget import forget_command
from assay.cli.traces.importing import import_command
from assay.cli.traces.list import list_command
from assay.cli.traces.rate import rate_command
from assay.cli.traces.score import score_command
from assay.cli.traces.show import show_command
from assay.cli.traces.stats import stats_command

__all__ = ["command"]


@click.group("traces")
def command() -> None:
    """List, inspect, rate, score, import, export and delete recorded rollouts."""


for subcommand in (
    list_command, show_command, stats_command, rate_command, close_command, score_command, forget_command,
    import_command, export_command,
):  # fmt: skip
    command.add_command(subcommand)
