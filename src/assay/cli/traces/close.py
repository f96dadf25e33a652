"""`assay traces close`: end the rollouts of a gateway that was killed."""

import click

from assay.cli.numbers import Number
from assay.cli.shared import json_option, open_store, print_json, store_option
from assay.cli.wording import counted

__all__ = ["close_command"]


@click.command("close")
@click.option(
    "--idle-minutes",
    type=Number(0),
    default=60.0,
    show_default=True,
    help="End the rollouts whose last LM call is at least this many minutes ago.",
)
@store_option()
@json_option()
def close_command(idle_minutes: float, store: str | None, as_json: bool) -> None:
    """End the rollouts that a killed gateway left open. Only ended rollouts are scored and exported.

    A running gateway ends its rollouts itself.
    """
    from assay.traces.gateway.left_open import close_abandoned

    with open_store(store) as opened:
        counts = close_abandoned(opened, idle_s=60 * idle_minutes)
    if as_json:
        print_json(counts)
        return
    click.echo(f"{counted(counts['done'], 'rollouts')} ended with their answer, {counts['error']} without one")
    if counts["running"]:
        click.echo(
            f"{counted(counts['running'], 'rollouts')} still running, with a call in the last {idle_minutes:g} "
            f"minutes. "
            "A running gateway ends them itself (assay serve --idle-s, or when it is stopped); "
            "if it was killed, --idle-minutes 0 ends them now"
        )
