"""`assay traces rate`: human ratings of rollouts."""

from typing import Any

import click

from assay.cli.flags import command_settings, is_set, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.errors import ConfigError
from assay.runs.settings import TracesRateSettings
from assay.support.numbers import counted
from assay.support.terminal import ask, echo
from assay.support.values import json_text


@click.command("rate")
@click.argument("rollout_id", required=False)
@click.argument("rating", type=float, required=False)
@settings_flags(TracesRateSettings)
@store_option()
@json_option()
def rate_command(rollout_id: str | None, rating: float | None, store: str | None, as_json: bool, **values: Any) -> None:
    """Rate one rollout from 0 to 1. Without ROLLOUT_ID, ask for a rating of each rollout that has none.

    An export of training data uses the rating in place of the rubric's score. Therefore rollouts of the sealed splits
    gate and test take none, and neither do verdicts of judges and running rollouts.
    """
    from assay.api.rollouts import rate_rollout

    settings = command_settings(values, TracesRateSettings)
    if rollout_id is not None and rating is None:
        raise click.UsageError("the rating is missing; give one from 0 to 1: assay traces rate ROLLOUT 0.8")
    if rollout_id is not None and (unused := [name for name in ("run_id", "limit") if is_set(name)]):
        raise ConfigError(f"{unused[0]}={settings[unused[0]]!r} would have no effect on the rating of one rollout")
    with open_store(store) as opened:
        if rollout_id is None or rating is None:
            rated = _ask_rating(opened, settings)
        else:
            rated = {rate_rollout(opened, rollout_id, rating): rating}
    if as_json:
        print_json({"rated": rated})
    else:
        echo(f"{counted(len(rated), 'rollouts')} rated")


def _ask_rating(opened: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Asks for ratings on the terminal. Returns the ratings by rollout id."""
    from assay.api.rollouts import rate_rollout, rollouts_to_rate

    rated: dict[str, float] = {}
    waiting = rollouts_to_rate(opened, **settings)
    for number, rollout in enumerate(waiting, 1):
        output = rollout.error if rollout.prediction is None else json_text(rollout.prediction)
        echo(f"\n[{number} of {len(waiting)}] {json_text(rollout.inputs)}\n  -> {output}", err=True)
        answer = ask("rating 0 to 1 (Enter: skip, q: quit): ")
        if answer is None or answer == "q":
            break
        if answer and (value := _number(answer)) is not None:
            rated[rate_rollout(opened, rollout.id, value)] = value
    return rated


def _number(text: str) -> float | None:
    """A rating; None, with a message, if the text is not a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= 1:
        return value
    echo(f"{text!r} is not a number from 0 to 1; the rollout was not rated", err=True)
    return None
