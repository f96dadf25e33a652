"""Which rollouts a person may rate: one rule for the command line and the local page."""

from typing import Protocol

from assay.errors import ConfigError
from assay.traces.records import NOT_AGENTS, Rollout

UNRATED_SOURCES = ("outside", *NOT_AGENTS)  # sources of rollouts that no export uses by itself
_NAMES = {
    "judge": "a verdict of a judge",
    "check": "a group of LM calls of checks",
    "simulated_user": "a turn of a simulated user",
    "outside": "a group of LM calls outside of a task",
}
SEALED = ("gate", "test")  # splits whose ratings would be used for selection


def why_not_rated(rollout: Rollout) -> str | None:
    """Why a rollout takes no rating, as a sentence without a full stop; None if it may be rated.

    A rollout of a sealed split is refused too: a rating replaces the score wherever rollouts are selected.
    """
    if rollout.source in UNRATED_SOURCES:
        return f"{rollout.id} is {_NAMES.get(rollout.source, rollout.source)}, which no export uses"
    if rollout.split in SEALED:
        return f"{rollout.id} is of the sealed split {rollout.split}, on which nothing may be selected"
    if rollout.status == "running":
        return f"{rollout.id} is still running"
    return None


class Ratings(Protocol):
    """Stores ratings."""

    def rate(self, rollout_id: str, rating: float) -> None: ...


def store_rating(store: Ratings, rollout: Rollout, rating: float) -> None:
    """Stores a person's rating, in [0, 1].

    Raises:
        ConfigError: the rollout takes no rating.
    """
    if (reason := why_not_rated(rollout)) is not None:
        hint = ""
        if rollout.source in UNRATED_SOURCES:
            hint = ". Rate the program's rollout (see assay traces list); for a judge's example use assay judge label"
        raise ConfigError(f"not rated: {reason}{hint}")
    store.rate(rollout.id, rating)
