"""`assay traces rate`: human ratings of rollouts."""

from typing import Any

import click

from assay.cli.numbers import Integer
from assay.cli.shared import json_option, open_store, print_json, store_option
from assay.cli.wording import counted

__all__ = ["rate_command"]


@click.command("rate")
@click.argument("rollout_id", required=False)
@click.argument("rating", type=float, required=False)
@click.option("--run", "run_id", help="Ask only about rollouts of this run.")
@click.option(
    "--limit", type=Integer(1), default=20, show_default=True, help="Maximum number of rollouts to ask about."
)
@store_option()
@json_option()
def rate_command(
    rollout_id: str | None, rating: float | None, run_id: str | None, limit: int, store: str | None, as_json: bool
) -> None:
    """Rate one rollout from 0 to 1. Without ROLLOUT_ID, ask for a rating of each rollout that has none.

    An export of training data uses the rating in place of the rubric's score. Therefore rollouts of the sealed splits
    gate and test take none, and neither do verdicts of judges and running rollouts.
    """
    with open_store(store) as opened:
        if rollout_id is None:
            rated = _ask_rating(opened, run_id, limit)
        elif rating is None:
            raise click.UsageError("the rating is missing; give one from 0 to 1: assay traces rate ROLLOUT 0.8")
        else:
            rated = {_rate(opened, rollout_id, rating): rating}
    if as_json:
        print_json({"rated": rated})
    else:
        click.echo(f"{counted(len(rated), 'rollouts')} rated")


def _ask_rating(opened: Any, run_id: str | None, limit: int) -> dict[str, float]:
    """Asks for ratings on the terminal. Returns the ratings by rollout id."""
    from assay.traces.rating import why_not_rated

    rated: dict[str, float] = {}
    waiting = [
        rollout
        for rollout in opened.rollouts(run_id=run_id, limit=None)
        if rollout.human_rating is None and rollout.status in ("done", "failed") and why_not_rated(rollout) is None
    ][:limit]
    for number, rollout in enumerate(waiting, 1):
        output = rollout.prediction if rollout.prediction is not None else rollout.error
        click.echo(f"\n[{number} of {len(waiting)}] {rollout.inputs}\n  -> {output}", err=True)
        try:
            answer = click.prompt(
                "rating 0 to 1 (Enter: skip, q: quit)", default="", show_default=False, err=True
            ).strip()
        except click.Abort:  # end of the input
            break
        if answer == "q":
            break
        if answer and (value := _number(answer)) is not None:
            rated[_rate(opened, rollout.id, value)] = value
    return rated


def _rate(opened: Any, rollout_id: str, rating: float) -> str:
    """Stores a rating. Returns the full id of the rollout."""
    from assay.traces.rating import rate_rollout

    rollout = opened.rollout(rollout_id)
    rate_rollout(opened, rollout, rating)
    return str(rollout.id)


def _number(text: str) -> float | None:
    """A rating; None, with a message, if the text is not a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= 1:
        return value
    click.echo(f"{text!r} is not a number from 0 to 1; the rollout was not rated", err=True)
    return None
