"""`assay deploy`: staged rollout."""

import click

from assay.cli.deploy.orders import advance_command, history_command, order_commands, status_command
from assay.cli.deploy.simulate import simulate_command
from assay.cli.deploy.start import start_command

__all__ = ["command"]


@click.group("deploy")
def command() -> None:
    """Replace a version of an agent in stages, and roll back if the new one is worse."""


for subcommand in (start_command, status_command, advance_command, *order_commands, history_command, simulate_command):
    command.add_command(subcommand)
