"""`assay loop`: from production to a better version, again and again."""

import click

from assay.cli.loop.pool import pool_command

__all__ = ["command"]


@click.group("loop")
def command() -> None:
    """From production to a better version: pool, improve, register, deploy, watch."""


for subcommand in (pool_command,):
    command.add_command(subcommand)
