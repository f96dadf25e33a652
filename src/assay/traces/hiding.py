"""Personal data out of rows: the anonymizer, what a task knows of itself, and a second reading of what was written."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from assay.traces.privacy import TYPES, Anonymizer, Known
from assay.traces.records import Rollout
from assay.traces.rows import as_json

__all__ = ["Hider"]

_ESCAPED = re.compile(r"\\[nrt]")  # white space as JSON writes it, which would be a letter before a word
_ROLES = ("user", "assistant", "system", "developer", "tool", "function", "text", "message")  # words of every conversation, and nobody's name
_CHECKED = 1000  # rows that are all read a second time; of the others one in a hundred
_KEPT = frozenset(  # columns that nobody's words stand in
    (
        "rollout", "t", "model", "weights", "adapters", "program_version", "status", "token_ids", "logprobs", "reward", "return", "advantage",
        "score", "human_rating", "prompt_tokens", "completion_tokens", "constrained", "cached", "weight", "quality", "label", "margin",
    )
)  # fmt: skip


class Hider:
    """Args:
    engine: as in `Anonymizer`, `names` (that of names, which must be installed), or `off`.
    key: file of the key; surrogates are then the same in every export that uses it. None: a key of this export alone.
    encoded: columns that are JSON text, and stay so.
    """

    def __init__(self, engine: str, key: Path | None, encoded: Sequence[str] = ()) -> None:
        self.encoded = frozenset(encoded)
        self._named: dict[Known, None] = {}  # that tasks know of and that stand in what the manifest says
        self.key_path, self.rows, self.checked, self.residual, self.untokened = key, 0, 0, 0, 0
        self.anonymizer = None if engine == "off" else Anonymizer(_secret(key), engine=engine)

    @property
    def finds_names(self) -> bool:
        return self.anonymizer is not None and self.anonymizer.finds_names

    @property
    def verified(self) -> bool:
        return self.anonymizer is not None and self.checked > 0 and not self.residual

    def known(self, rollouts: Sequence[Rollout]) -> tuple[Known, ...]:
        """What the tasks of a group say of themselves: a row may draw on any of its rollouts."""
        found = tuple(dict.fromkeys(entity for rollout in rollouts for entity in _known(rollout)))
        if self.anonymizer is not None:
            names = " ".join(f"{r.task_type} {r.task_id} {r.program} {r.run_id}" for r in rollouts).casefold() if found else ""
            self._named.update({e: None for e in found if any(word in names for word in e.value.casefold().split() if len(word) > 2)})
        return found

    def row(self, row: dict[str, Any], known: tuple[Known, ...]) -> dict[str, Any]:
        """The row with surrogates, names of tasks and groups included. Token ids spell the text that was hidden, so where an
        output changed they go, and their log-probabilities with them."""
        if self.anonymizer is None:
            return row
        self.rows += 1
        told = {name: value for name, value in row.items() if name not in _KEPT}
        hidden = self._values(told, known)
        changed = {**row, **hidden}
        spelled = any(hidden.get(name) != row.get(name) for name in ("output", "reasoning", "refusal", "tools"))
        if spelled and row.get("token_ids", "null") != "null":
            changed["token_ids"] = changed["logprobs"] = "null"
            self.untokened += 1
        self._check(hidden, known)
        return changed

    def _check(self, hidden: dict[str, Any], known: tuple[Known, ...]) -> None:
        """Reads again what is to be written: what is known must be gone from every row, in whatever form it was found."""
        assert self.anonymizer is not None
        found = False
        if known:
            text = _ESCAPED.sub(" ", " ".join(map(str, hidden.values()))).casefold()
            found = any(len(entity.value) > 2 and re.search(rf"(?<!\w){re.escape(entity.value.casefold())}(?!\w)", text) for entity in known)
        if self.rows <= _CHECKED or self.rows % 100 == 0:
            self.checked += 1
            counts = self.anonymizer.counts.copy()
            found = found or self._values(hidden, known) != hidden
            self.anonymizer.counts = counts
        self.residual += found

    def _values(self, told: dict[str, Any], known: tuple[Known, ...]) -> dict[str, Any]:
        """Columns with their names as labels; those that are JSON stay JSON."""
        assert self.anonymizer is not None
        read = {name: orjson.loads(value) if name in self.encoded else value for name, value in told.items() if not self._empty(name, value)}
        hidden = self.anonymizer.value(read, known)
        kept = {name: value for name, value in told.items() if self._empty(name, value)}
        return {**kept, **{name: self._written(name, told[name], read[name], new) for name, new in zip(read, hidden.values(), strict=True)}}

    def _empty(self, name: str, value: Any) -> bool:
        return value is None or (name in self.encoded and value in ("[]", "{}", "null"))

    def _written(self, name: str, value: Any, read: Any, new: Any) -> Any:
        if name not in self.encoded:
            return new
        return value if new == read else as_json(new)

    def plain(self, value: Any) -> Any:
        """Anything else that is written beside the rows."""
        return value if self.anonymizer is None else self.anonymizer.value(value, tuple(self._named))

    def names(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts by name, for the manifest."""
        return {str(self.plain(name)): count for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: which engine, what was found, whether names can be found at all, and what the second reading said."""
        if self.anonymizer is None:
            return {"engine": "off", "verified": False, "note": "nothing was anonymised"}
        note = "" if self.anonymizer.finds_names else "no model of names is at hand: names that the tasks do not know of were not looked for"
        return {
            "engine": self.anonymizer.engine_name, "finds_names": self.anonymizer.finds_names, "found": dict(self.anonymizer.counts),
            "verified": self.verified, "checked_rows": self.checked, "residual": self.residual, "reversible": self.key_path is not None,
            "rows_without_token_ids": self.untokened,
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
    return tuple(entity for entity in found if entity.value.strip().lower() not in _ROLES)


def _type(name: Any) -> str:
    """One of the anonymizer's types; whatever else a task calls its entities is an id."""
    plain = str(name).lower()
    return plain if plain in TYPES else "person" if plain in ("name", "per", "customer", "user") else "id"
