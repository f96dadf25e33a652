"""`assay loop`: from production to a better version, again and again."""

import click

from assay.cli.loop.pool import pool_command
from assay.cli.loop.runs import install_command, run_command, start_command, status_command, stop_command

__all__ = ["command"]


@click.group("loop")
def command() -> None:
    """Improve an agent on its production data: pool tasks, improve, register, deploy, monitor."""


for subcommand in (run_command, start_command, stop_command, status_command, pool_command, install_command):
    command.add_command(subcommand)
