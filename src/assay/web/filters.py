"""Filters of lists, read from the query of an address."""

import math
from collections.abc import Mapping

from assay.errors import ConfigError, FailureKind
from assay.support.times import since
from assay.traces.store.paging import Cursor, RolloutFilters

__all__ = [
    "DOWNLOADS", "FAILURES", "MOST_DOWNLOADED", "ROLLOUT_FIELDS", "RUN_FIELDS", "SPLITS", "STATUSES", "cursor_of",
    "filled_in", "number_of", "rollout_filters",
]  # fmt: skip

SPLITS = ("train", "val", "gate", "test")
STATUSES = ("done", "failed", "error", "running")
FAILURES = tuple(kind.value for kind in FailureKind)
DOWNLOADS = ("sft", "preferences", "transitions")  # kinds of `assay export` that need no rubric
MOST_DOWNLOADED = 1_000  # rollouts
ROLLOUT_FIELDS = (
    "program", "text", "status", "split", "phase", "source", "failure", "least", "most", "since", "run", "task",
    "deployment", "arm",
    "criterion", "tool",
)  # fmt: skip
RUN_FIELDS = ("kind", "program", "status", "since")
_COLUMNS = {"status": "status", "split": "split", "phase": "phase", "source": "source", "failure": "failure",
            "run": "run_id", "deployment": "deployment", "arm": "arm", "task": "task_id"}  # fmt: skip


def filled_in(query: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The fields that are filled in. NUL, which no database takes in a text, and space around them are removed."""
    texts = {name: query.get(name, "").replace("\0", "").strip() for name in names}
    return {name: text.encode("utf-8", "replace").decode() for name, text in texts.items() if text}


def rollout_filters(query: Mapping[str, str]) -> tuple[dict[str, str], RolloutFilters]:
    """The fields that are filled in, and the filters that they stand for.

    Raises:
        ConfigError: a score is no number in [0, 1], or a time cannot be read.
    """
    values = filled_in(query, ROLLOUT_FIELDS)
    return values, RolloutFilters(
        equal={column: values[name] for name, column in _COLUMNS.items() if name in values},
        program=values.get("program", ""),
        text=values.get("text", ""),
        criterion=values.get("criterion", ""),
        tool=values.get("tool", ""),
        since=since(values["since"]) if "since" in values else None,
        least=number_of(values, "least"),
        most=number_of(values, "most"),
    )


def number_of(values: Mapping[str, str], name: str) -> float | None:
    """A number in [0, 1]; None if the field is empty.

    Raises:
        ConfigError: the text is no such number.
    """
    if (text := values.get(name, "")) == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={text[:80]!r} must be a number from 0 to 1")
    return value


def cursor_of(query: Mapping[str, str], name: str) -> Cursor | None:
    """The place in a list that the query names; None if it names none."""
    return Cursor.of(text) if (text := query.get(name, "")) else None
