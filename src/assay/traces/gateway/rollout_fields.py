"""Rules for what clients send about a rollout: its name, its fields, its status. Does not change rollouts."""

import hashlib
from collections.abc import Mapping
from typing import Any

from assay.datasets import SPLITS
from assay.datasets.tasks import consent_text, known_outputs
from assay.errors import ConfigError, FailureKind, UnknownRollout
from assay.support.settings import nearest, one_of
from assay.traces.records import Rollout

__all__ = [
    "check_name",
    "check_reward",
    "check_status",
    "checked_fields",
    "failure_kind",
    "gateway_rollout",
    "rollout_id_of",
    "text_or_none",
    "turn_count",
]

_LARGEST_REWARD = 1e6  # of a step reward
_NAME_CHARS = 200
_FIELDS = (
    "task_id",
    "task_type",
    "group_id",
    "split",
    "program",
    "program_version",
    "inputs",
    "expected",
    "metadata",
    "parameters",
    "tenant",
    "data_subject",
    "consent",
)
_MAPPINGS = ("inputs", "expected", "metadata", "parameters")
_TEXT_CHARS = 1000
_SHORT = {"split": 32, "program_version": 64, "consent": 64}  # characters, as wide as the store's columns


def rollout_id_of(name: str) -> str:
    """The store's id of a rollout by the name that a client chose. A name of 32 hex digits is the id itself."""
    plain = name.lower()
    if len(plain) == 32 and all(c in "0123456789abcdef" for c in plain):
        return plain
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]


def check_name(name: Any) -> str | None:
    """The name of a new rollout. Raises `ConfigError` unless it is None or a short text without a slash."""
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS or "/" in name):
        raise ConfigError(f"id must be a text of at most {_NAME_CHARS} characters without a slash")
    return name


def check_status(status: str) -> None:
    """Raises `ConfigError` if `status` is not one that a rollout can end with."""
    if status not in ("done", "failed", "error"):
        raise ConfigError(
            f"status={status!r} must be done, failed (the agent's own failure) or error (an infrastructure failure)"
        )


def check_reward(value: Any, t: Any) -> None:
    """Raises `ConfigError` unless `value` is a score in [0, 1] or, with a turn `t`, a finite step reward."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_REWARD:
        raise ConfigError(
            f"reward={value!r} must be a finite number of at most {_LARGEST_REWARD:g}; "
            "if there is no reward, post nothing"
        )
    if t is None and not 0 <= value <= 1:
        raise ConfigError(
            f"reward={value!r} is a rollout's score and must be between 0 and 1; "
            'with "t" it is the reward of that turn and may be any number'
        )
    if t is not None and (isinstance(t, bool) or not isinstance(t, int) or t < 0):
        raise ConfigError(f"t={t!r} must be the index of a turn, >= 0")


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a new rollout as keyword arguments of `Rollout`; fields that are None are left out.

    Raises:
        ConfigError: a field is unknown, of the wrong type or too long.
    """
    if unknown := sorted(set(fields) - {*_FIELDS, "group"}):
        known = ("id", "group", *_FIELDS)
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], known)) else ""
        raise ConfigError(
            f"a rollout has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(known)}{hint}"
        )
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        key = "group_id" if name == "group" else name
        if value is None:
            continue
        if key == "consent" and isinstance(value, bool):
            value = consent_text(value)
        if key in _MAPPINGS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be an object")
            checked[key] = known_outputs(value) if key == "expected" else dict(value)
        elif key == "split" and value not in ("", *SPLITS):
            raise ConfigError(f"split={value!r} {one_of(value, SPLITS, other='none')}")
        elif not isinstance(value, str) or len(value) > _SHORT.get(key, _TEXT_CHARS):
            raise ConfigError(f"{name} must be a text of at most {_SHORT.get(key, _TEXT_CHARS)} characters")
        else:
            checked[key] = value
    return checked


def failure_kind(value: Any) -> FailureKind | None:
    """The failure kind that a client sent, or None. Raises `ConfigError` if there is no such kind."""
    if value is None:
        return None
    try:
        return FailureKind(value)
    except ValueError:
        raise ConfigError(f"failure={value!r} {one_of(value, FailureKind)}") from None


def text_or_none(value: Any) -> str | None:
    """The error text that a client sent, or None. Raises `ConfigError` if it is not a text."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"error={value!r} must be a text")
    return value


def gateway_rollout(rollout: Rollout) -> Rollout:
    """The rollout itself. Raises `UnknownRollout` if a gateway did not record it: then clients may not change it."""
    if rollout.source != "gateway":
        raise UnknownRollout(
            f"rollout {rollout.id!r} was not recorded by a gateway (source {rollout.source!r}): "
            "it cannot be changed from here"
        )
    return rollout


def turn_count(rollout: Rollout) -> int:
    """The last turn's index plus 1. Earlier turns may be missing if a gateway was killed during concurrent calls."""
    return max((transition.t for transition in rollout.transitions), default=-1) + 1
