"""Personal data out of rows: the anonymizer, what a task knows of itself, and a second reading of what was written."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from assay.traces.formats import JsonText
from assay.traces.privacy import TYPES, Anonymizer, Known
from assay.traces.records import Rollout

__all__ = ["Hider"]

_CHECKED = 1000  # rows that are all read a second time; of the others one in a hundred
_KEPT = frozenset(  # columns that nobody's words stand in
    (
        "rollout", "group", "task", "task_type", "t", "model", "weights", "adapters", "program", "program_version", "status", "token_ids", "logprobs",
        "step_rewards", "reward", "return", "advantage", "weight", "score", "human_rating", "prompt_tokens", "completion_tokens", "constrained",
        "cached", "quality", "label", "margin",
    )
)  # fmt: skip


class Hider:
    """Args:
    engine: as in `Anonymizer`, or `off`.
    key: file of the key; surrogates are then the same in every export that uses it. None: a key of this export alone.
    """

    def __init__(self, engine: str, key: Path | None) -> None:
        self.key_path, self.rows, self.checked, self.residual = key, 0, 0, 0
        self.anonymizer = None if engine == "off" else Anonymizer(_secret(key), engine=engine)

    @property
    def verified(self) -> bool:
        return self.anonymizer is not None and self.checked > 0 and not self.residual

    def row(self, row: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
        """The row with surrogates. Ids, hashes and names of models and programs stay."""
        if self.anonymizer is None:
            return row
        self.rows += 1
        known = _known(rollout)
        hidden = {name: value if name in _KEPT else self._value(value, known) for name, value in row.items()}
        if self.rows <= _CHECKED or self.rows % 100 == 0:
            self.checked += 1
            self.residual += any(self._value(value, known, counted=False) != value for name, value in hidden.items() if name not in _KEPT)
        return hidden

    def _value(self, value: Any, known: tuple[Known, ...], *, counted: bool = True) -> Any:
        assert self.anonymizer is not None
        if value is None or isinstance(value, bool | int | float):
            return value
        counts = None if counted else self.anonymizer.counts.copy()
        hidden = self._json(value, known) if type(value) is JsonText else self.anonymizer.value(value, known)
        if counts is not None:
            self.anonymizer.counts = counts
        return hidden

    def _json(self, value: JsonText, known: tuple[Known, ...]) -> JsonText:
        assert self.anonymizer is not None
        if value.text in ("[]", "{}", "null"):
            return value
        data = orjson.loads(value.text)
        hidden = self.anonymizer.value(data, known)
        return value if hidden == data else JsonText(orjson.dumps(hidden).decode())

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: which engine, what was found, whether names can be found at all, and what the second reading said."""
        if self.anonymizer is None:
            return {"engine": "off", "verified": False, "note": "nothing was anonymised"}
        note = "" if self.anonymizer.finds_names else "no model of names is at hand: names that the tasks do not know of were not looked for"
        return {
            "engine": self.anonymizer.engine_name, "finds_names": self.anonymizer.finds_names, "found": dict(self.anonymizer.counts),
            "verified": self.verified, "checked_rows": self.checked, "residual": self.residual, "reversible": self.key_path is not None,
            **({"note": note} if note else {}),
        }  # fmt: skip

    def save_table(self, path: Path) -> None:
        if self.anonymizer is not None and self.key_path is not None:
            self.anonymizer.save_table(path, self.key_path)


def _secret(path: Path | None) -> bytes | None:
    """The key of the surrogates from the key file, which is made where it is missing (see `Anonymizer.save_table`)."""
    if path is None:
        return None
    from assay.traces.privacy import key_of

    return hashlib.sha256(b"surrogates:" + key_of(path)).digest()


def _known(rollout: Rollout) -> tuple[Known, ...]:
    """What the task says of itself: the data subject, and `entities` in its metadata, as `{type: value or values}` or a list of
    `{"type", "value"}`."""
    found = [Known("person", rollout.data_subject)] if rollout.data_subject else []
    entities = rollout.metadata.get("entities")
    if isinstance(entities, Mapping):
        for kind, values in entities.items():
            found += [Known(_type(kind), str(value)) for value in (values if isinstance(values, list) else [values]) if value]
    elif isinstance(entities, list):
        found += [Known(_type(e.get("type", "person")), str(e["value"])) for e in entities if isinstance(e, Mapping) and e.get("value")]
    return tuple(found)


def _type(name: Any) -> str:
    """One of the anonymizer's types; whatever else a task calls its entities is an id."""
    plain = str(name).lower()
    return plain if plain in TYPES else "person" if plain in ("name", "per", "customer", "user") else "id"
