"""`assay deploy`: staged rollout."""

import click

from assay.cli.deploy.simulate import simulate_command

__all__ = ["command"]


@click.group("deploy")
def command() -> None:
    """Roll a better version out in stages, and back when it is not better."""


command.add_command(simulate_command)
