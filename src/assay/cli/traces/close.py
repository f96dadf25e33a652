"""`assay traces close`: end the rollouts of a gateway that was killed."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.runs.settings import TracesCloseSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("close")
@settings_flags(TracesCloseSettings)
@store_option()
@json_option()
def close_command(store: str | None, as_json: bool, **values: Any) -> None:
    """End the rollouts that a killed gateway left open. Only ended rollouts are scored and exported.

    A running gateway ends its rollouts itself.
    """
    from assay.api.rollouts import close_rollouts

    settings = TracesCloseSettings(**command_settings(values, TracesCloseSettings))
    with open_store(store) as opened:
        counts = close_rollouts(opened, idle_minutes=settings.idle_minutes)
    if as_json:
        print_json(counts)
        return
    echo(f"{counted(counts['done'], 'rollouts')} ended with their answer, {counts['error']} without one")
    if counts["running"]:
        echo(
            f"{counted(counts['running'], 'rollouts')} still running, with a call in the last "
            f"{settings.idle_minutes:g} minutes. "
            "A running gateway ends them itself (assay serve --idle-s, or when it is stopped); "
            "if it was killed, --idle-minutes 0 ends them now"
        )
