"""Anonymization of export rows, with two checks of what is written.

A second pass over the rows finds declared values that are left and replacements that are incomplete. It asks the same
detector, so that it says nothing about values that the detector does not know: planted values measure these
(`assay.traces.privacy.canaries`).
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from assay.errors import DISTRIBUTION
from assay.traces.export.declared import DeclaredValues
from assay.traces.export.gates import FAILED, OFF, PATTERNS, VERIFIED
from assay.traces.export.turns import Turn
from assay.traces.privacy.anonymizer import TYPES, Anonymizer, KnownValue
from assay.traces.privacy.canaries import REQUIRED_RECALL, Canaries, Recall
from assay.traces.privacy.canaries import TYPES as PLANTED_TYPES
from assay.traces.records import Rollout
from assay.traces.store.rows import as_json

__all__ = ["Hider"]

_ESCAPED = re.compile(r"\\[nrt]")  # JSON escapes of white space; their letter would hide the start of a word
_CHECKED = 1000  # the first rows all get a second pass; after them, one row in a hundred


class Hider:
    """Anonymizes the rows of one export.

    Args:
        engine: An engine of `Anonymizer`; `names` requires the name model to be installed; `off` disables
            anonymization.
        key: Key file: exports with the same key use the same surrogates. None: a random key for this export.
        encoded: Columns that contain JSON text; they are rewritten as JSON text.
        unchanged: Columns without free text.
        declared: Values that the tasks of the store declare.
    """

    def __init__(
        self,
        engine: str,
        key: Path | None,
        encoded: Sequence[str] = (),
        *,
        unchanged: Collection[str] = (),
        declared: DeclaredValues | None = None,
    ) -> None:
        self.encoded, self.unchanged, self.declared = frozenset(encoded), frozenset(unchanged), declared
        self._named: dict[KnownValue, None] = {}  # that tasks name and that occur in the text of the manifest
        self.key_path, self.rows, self.checked, self.residual, self.untokened = key, 0, 0, 0, 0
        self.canaries = Canaries()
        self.anonymizer = None if engine == "off" else Anonymizer(_secret(key), engine=engine)

    @property
    def recall(self) -> Mapping[str, Mapping[str, Recall]]:
        """Recall on planted values by language of the rows and type."""
        return {} if self.anonymizer is None else self.canaries.recall(self.anonymizer.find)

    @property
    def state(self) -> str:
        """`VERIFIED` if every tested type reaches the required recall in every language of the rows, `PATTERNS`, or
        `FAILED` if the second pass found something or there were no rows; `OFF` without anonymization.
        """
        if self.anonymizer is None:
            return OFF
        if not self.checked or self.residual:
            return FAILED
        results = [result for types in self.recall.values() for result in types.values()]
        complete = results and not self.canaries.not_tested and all(result.verified for result in results)
        return VERIFIED if complete else PATTERNS

    @property
    def missing(self) -> str:
        """Why the state is not `VERIFIED`; empty if it is."""
        state = self.state
        if state in (FAILED, OFF):
            return (
                f"the second pass still found {self.residual} personal values"
                if self.residual
                else "nothing was anonymized"
            )
        if state == VERIFIED:
            return ""
        assert self.anonymizer is not None
        low = [
            f"{language}: "
            + ", ".join(
                f"{kind} {result.found}/{result.planted}" for kind, result in types.items() if not result.verified
            )
            for language, types in self.recall.items()
            if not all(result.verified for result in types.values())
        ]
        untested = ", ".join(f"{language} ({count} rows)" for language, count in self.canaries.not_tested.items())
        parts = [
            "" if self.anonymizer.finds_names else f"names were not detected; install '{DISTRIBUTION}[privacy]'",
            f"planted values found, lower bound of the recall below {REQUIRED_RECALL:g}: {'; '.join(low)}"
            if low
            else "",
            f"languages not tested: {untested}" if untested else "",
            "" if low or untested else "no text of the rows is in a recognised language",
        ]
        return ". ".join(part for part in parts if part)

    def known(self, rollouts: Sequence[Rollout], turns: Iterable[Turn] = ()) -> tuple[KnownValue, ...]:
        """Personal values that a group's tasks declare, and those of the tasks that its turns show. A row may contain
        text of any of its rollouts.
        """
        if self.anonymizer is None or self.declared is None:
            return ()
        entities = self.declared.of(rollouts, turns)
        if entities:
            names = " ".join(f"{r.task_type} {r.task_id} {r.program} {r.run_id}" for r in rollouts).casefold()
            self._named.update(
                {
                    e: None
                    for e in entities
                    if any(word in names for word in e.value.casefold().split() if len(word) > 2)
                }
            )
        return entities

    def row(self, row: dict[str, Any], known: tuple[KnownValue, ...]) -> dict[str, Any]:
        """The row with surrogates, also in the names of tasks and groups.

        If the output changed, token ids and log-probabilities are removed, because they encode the original text.
        """
        if self.anonymizer is None:
            return row
        self.rows += 1
        columns = {name: value for name, value in row.items() if name not in self.unchanged}
        parsed = self._parsed(columns)
        texts = list(_texts(list(parsed.values())))
        self.canaries.see(texts)
        if self.declared is not None:
            known = tuple(dict.fromkeys((*known, *self.declared.named_in(texts))))
        hidden = self._hidden(columns, parsed, known)
        changed = {**row, **hidden}
        spelled = any(hidden.get(name) != row.get(name) for name in ("output", "reasoning", "refusal", "tools"))
        if spelled and row.get("token_ids", "null") != "null":
            changed["token_ids"] = changed["logprobs"] = "null"
            self.untokened += 1
        self._check(hidden, known)
        return changed

    def _check(self, hidden: dict[str, Any], known: tuple[KnownValue, ...]) -> None:
        """Second pass over a row: declared values must be absent from every row; the anonymizer runs again on a
        sample.
        """
        assert self.anonymizer is not None
        leaked = False
        if known:
            text = _ESCAPED.sub(" ", " ".join(map(str, hidden.values()))).casefold()
            leaked = any(
                len(entity.value) > 2 and re.search(rf"(?<!\w){re.escape(entity.value.casefold())}(?!\w)", text)
                for entity in known
            )
        if self.rows <= _CHECKED or self.rows % 100 == 0:
            self.checked += 1
            counts = self.anonymizer.counts.copy()
            leaked = leaked or self._hidden(hidden, self._parsed(hidden), known) != hidden
            self.anonymizer.counts = counts
        self.residual += leaked

    def _parsed(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Columns that are not empty, JSON text decoded."""
        return {
            name: orjson.loads(value) if name in self.encoded else value
            for name, value in columns.items()
            if not self._empty(name, value)
        }

    def _hidden(self, columns: dict[str, Any], parsed: dict[str, Any], known: tuple[KnownValue, ...]) -> dict[str, Any]:
        """Anonymized columns; JSON columns stay JSON text. Column names are passed on as labels of the values."""
        assert self.anonymizer is not None
        hidden = self.anonymizer.value(parsed, known)
        empty = {name: value for name, value in columns.items() if self._empty(name, value)}
        return {
            **empty,
            **{
                name: self._written(name, columns[name], parsed[name], new)
                for name, new in zip(parsed, hidden.values(), strict=True)
            },
        }

    def _empty(self, name: str, value: Any) -> bool:
        return value is None or (name in self.encoded and value in ("[]", "{}", "null"))

    def _written(self, name: str, value: Any, parsed: Any, new: Any) -> Any:
        if name not in self.encoded:
            return new
        return value if new == parsed else as_json(new)

    def plain(self, value: Any) -> Any:
        """Anonymize any other value that is written with the rows."""
        return value if self.anonymizer is None else self.anonymizer.value(value, tuple(self._named))

    def names(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts by anonymized name, for the manifest."""
        return {str(self.plain(name)): count for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: engine, counts by type, the state with its evidence, the result of the second pass.

        `recall` has the planted values by language of the rows and type.
        """
        state = self.state
        if self.anonymizer is None:
            return {"engine": "off", "state": state, "verified": False, "note": self.missing}
        missing = self.missing
        return {
            "engine": self.anonymizer.engine_name,
            "finds_names": self.anonymizer.finds_names,
            "found": dict(self.anonymizer.counts),
            "state": state,
            "verified": state == VERIFIED,
            "recall": {
                language: {kind: result.to_dict() for kind, result in types.items()}
                for language, types in self.recall.items()
            },
            "required_recall": REQUIRED_RECALL,
            "seed": self.canaries.seed,
            "languages": dict(self.canaries.rows),
            "languages_not_tested": self.canaries.not_tested,
            "types_not_tested": [kind for kind in TYPES if kind not in PLANTED_TYPES],
            "checked_rows": self.checked,
            "residual": self.residual,
            "reversible": self.key_path is not None,
            "rows_without_token_ids": self.untokened,
            **({"note": f"{state}: {missing}"} if missing else {}),
        }

    def save_table(self, path: Path) -> None:
        if self.anonymizer is not None and self.key_path is not None:
            self.anonymizer.save_table(path, self.key_path)


def _texts(value: Any) -> Iterator[str]:
    """All texts in JSON-like data."""
    stack, seen = [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, dict) else item)


def _secret(path: Path | None) -> bytes | None:
    """Key of the surrogates, derived from the key file. Creates the file if missing (see `Anonymizer.save_table`)."""
    if path is None:
        return None
    from assay.traces.privacy.key_files import key_of

    return hashlib.sha256(b"surrogates:" + key_of(path)).digest()
