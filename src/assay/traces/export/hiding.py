"""Anonymization of export rows, with two checks of what is written.

A second pass over the rows finds declared values that are left and replacements that are incomplete. It asks the same
detector, so that it says nothing about values that the detector does not know: planted values measure these
(`assay.traces.privacy.canaries`).
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.errors import DISTRIBUTION
from assay.traces.export.selection import Turn
from assay.traces.export.settings import FAILED, OFF, PATTERNS, VERIFIED
from assay.traces.privacy.anonymizer import Anonymizer
from assay.traces.privacy.canaries import REQUIRED_RECALL, TYPES as PLANTED_TYPES, Canaries, Recall
from assay.traces.privacy.names import TYPES, KnownValue
from assay.traces.records import Rollout, subject_digests
from assay.traces.shown import message_texts
from assay.traces.store import Store, tables as schema
from assay.traces.store.rows import as_json

# -- Personal values that tasks declare: the data subject, and `entities` in the metadata.
#
# A row may show other tasks than its own: in demonstrations, in remembered facts, in answers that repeat them.


_ROLES = (
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "function",
    "text",
    "message",
)  # words of every conversation, and nobody's name
_WORD = re.compile(r"\w+")
_MOST_WORDS = 5  # of a name of which only the digest is stored
_MARKS = ".,;:!?()[]{}<>\"'`*_"  # around a name in a text


class DeclaredValues:
    """The values that the tasks of a store declare.

    Args:
        store: its rollouts, and the tasks that are known without one: of these it has only digests of the subjects.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, tuple[KnownValue, ...]] = {}  # by tasks that no rollout has

    def of(self, rollouts: Sequence[Rollout], turns: Iterable[Turn]) -> tuple[KnownValue, ...]:
        """Values of these rollouts' tasks, and of the tasks that prompts of these turns show."""
        values = [value for rollout in rollouts for value in _values(rollout.data_subject, rollout.metadata)]
        for turn in turns:
            for task in orjson.loads(turn.shown_tasks_json or "[]"):
                values += self._by_task.get(task) or self._without_rollout(task, turn)
        return tuple(dict.fromkeys(values))

    def named_in(self, texts: Iterable[str]) -> Iterator[KnownValue]:
        """Values of any task that a text has in full. Those of a single word are left out: it may mean another."""
        for words in (_words(text) for text in texts if self._by_word):
            for at, word in enumerate(words):
                for value, parts in self._by_word.get(word, ()):
                    if words[at : at + len(parts)] == parts:
                        yield value

    @cached_property
    def _by_word(self) -> dict[str, list[tuple[KnownValue, list[str]]]]:
        """Values of at least two words, with these, by the first one."""
        r, found = schema.rollouts, dict[KnownValue, None]()
        for row in self._declaring(sa.select(r.c.data_subject, r.c.metadata_json).distinct()):
            found |= dict.fromkeys(_values(row.data_subject, orjson.loads(row.metadata_json)))
        by_word = defaultdict(list)
        for value in found:
            if len(parts := _words(value.value)) > 1:
                by_word[parts[0]].append((value, parts))
        return dict(by_word)

    @cached_property
    def _by_task(self) -> dict[str, tuple[KnownValue, ...]]:
        r, by_task = schema.rollouts, dict[str, tuple[KnownValue, ...]]()
        for row in self._declaring(sa.select(r.c.inputs_json, r.c.data_subject, r.c.metadata_json).distinct()):
            task = task_key(orjson.loads(row.inputs_json))
            values = _values(row.data_subject, orjson.loads(row.metadata_json))
            by_task[task] = tuple(dict.fromkeys((*by_task.get(task, ()), *values)))
        return by_task

    def _declaring(self, query: sa.Select[Any]) -> Iterator[Any]:
        r = schema.rollouts
        query = query.where(r.c.data_subject.is_not(None) | r.c.metadata_json.contains('"entities"'))
        with self._store.engine.connect() as connection:
            yield from connection.execute(query.execution_options(yield_per=500))

    @cached_property
    def _subjects(self) -> dict[str, str]:
        """Digests of the data subjects of known tasks."""
        k = schema.known_tasks
        query = sa.select(k.c.task, k.c.subject).where(k.c.subject.is_not(None))
        with self._store.engine.connect() as connection:
            return {row.task: row.subject for row in connection.execute(query)}

    def _without_rollout(self, task: str, turn: Turn) -> tuple[KnownValue, ...]:
        """The subject of a task that never ran: the words of a prompt that shows it which have the stored digest."""
        if task not in self._found:
            digest = self._subjects.get(task)
            names = [] if digest is None else _names(message_texts(turn.messages), digest)
            self._found[task] = tuple(KnownValue("person", name) for name in names)
        return self._found[task]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _names(texts: Iterable[str], digest: str) -> list[str]:
    """The first words in a row with a digest, if there are any."""
    for text in texts:
        words = text.split()
        for at in range(len(words)):
            for size in range(1, _MOST_WORDS + 1):
                name = " ".join(words[at : at + size]).strip(_MARKS)
                if digest in subject_digests(name):
                    return [name]
    return []


def _values(subject: str | None, metadata: Mapping[str, Any]) -> tuple[KnownValue, ...]:
    """Personal values that a task declares.

    `entities` is `{type: value or values}` or a list of `{"type", "value"}`.
    """
    pairs: list[tuple[Any, Any]] = [("person", subject)]
    entities = metadata.get("entities")
    if isinstance(entities, Mapping):
        for kind, values in entities.items():
            pairs += [(kind, value) for value in (values if isinstance(values, list) else [values])]
    elif isinstance(entities, list):
        pairs += [(e.get("type", "person"), e.get("value")) for e in entities if isinstance(e, Mapping)]
    known = (KnownValue(_type(kind), str(value)) for kind, value in pairs if value)
    return tuple(entity for entity in known if entity.value.strip().lower() not in _ROLES)


def _type(name: Any) -> str:
    """The anonymizer's type for a declared type; unknown types become `id`."""
    plain = str(name).lower()
    return plain if plain in TYPES else "person" if plain in ("name", "per", "customer", "user") else "id"


# -- Hiding.


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
        key: str | Path | None,
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
        if state == VERIFIED:
            return ""
        if self.residual:
            return f"the second pass still found {self.residual} personal values"
        if self.anonymizer is None or state == FAILED:
            return "nothing was anonymized"
        low = dict[str, list[str]]()
        for language, types in self.recall.items():
            for kind, result in types.items():
                if not result.verified:
                    low.setdefault(language, []).append(f"{kind} {result.found}/{result.planted}")
        untested = ", ".join(f"{language} ({count} rows)" for language, count in self.canaries.not_tested.items())
        parts = []
        if not self.anonymizer.finds_names:
            parts.append(f"names were not detected; install '{DISTRIBUTION}[privacy]'")
        if low:
            shares = "; ".join(f"{language}: {', '.join(found)}" for language, found in low.items())
            parts.append(f"too few planted values were found for a recall of {REQUIRED_RECALL:g}: {shares}")
        if untested:
            parts.append(f"languages not tested: {untested}")
        if not low and not untested:
            parts.append("no text of the rows is in a recognised language")
        return ". ".join(parts)

    def known(self, rollouts: Sequence[Rollout], turns: Iterable[Turn] = ()) -> tuple[KnownValue, ...]:
        """Personal values that a group's tasks declare, and those of the tasks that its turns show. A row may contain
        text of any of its rollouts.
        """
        if self.anonymizer is None or self.declared is None:
            return ()
        entities = self.declared.of(rollouts, turns)
        names = " ".join(f"{r.task_type} {r.task_id} {r.program} {r.run_id}" for r in rollouts).casefold()
        for entity in entities:
            if any(word in names for word in entity.value.casefold().split() if len(word) > 2):
                self._named[entity] = None
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
        written = {name: value for name, value in columns.items() if self._empty(name, value)}
        for name, new in zip(parsed, self.anonymizer.value(parsed, known).values(), strict=True):
            if name in self.encoded:
                new = columns[name] if new == parsed[name] else as_json(new)
            written[name] = new
        return written

    def _empty(self, name: str, value: Any) -> bool:
        return value is None or (name in self.encoded and value in ("[]", "{}", "null"))

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


def _secret(path: str | Path | None) -> bytes | None:
    """Key of the surrogates, derived from the key file. Creates the file if missing (see `Anonymizer.save_table`)."""
    if path is None:
        return None
    from assay.traces.privacy.anonymizer import key_of

    return hashlib.sha256(b"surrogates:" + key_of(path)).digest()
