"""Personal values that tasks declare: the data subject, and `entities` in the metadata.

A row may show other tasks than its own: in demonstrations, in remembered facts, in answers that repeat them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.traces.export.turns import Turn
from assay.traces.privacy.anonymizer import TYPES, KnownValue
from assay.traces.records import Rollout, subject_digests
from assay.traces.shown import message_texts
from assay.traces.store import Store
from assay.traces.store import tables as schema

__all__ = ["DeclaredValues"]

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
    known = [KnownValue("person", subject)] if subject else []
    entities = metadata.get("entities")
    if isinstance(entities, Mapping):
        for kind, values in entities.items():
            known += [
                KnownValue(_type(kind), str(value))
                for value in (values if isinstance(values, list) else [values])
                if value
            ]
    elif isinstance(entities, list):
        known += [
            KnownValue(_type(e.get("type", "person")), str(e["value"]))
            for e in entities
            if isinstance(e, Mapping) and e.get("value")
        ]
    return tuple(entity for entity in known if entity.value.strip().lower() not in _ROLES)


def _type(name: Any) -> str:
    """The anonymizer's type for a declared type; unknown types become `id`."""
    plain = str(name).lower()
    return plain if plain in TYPES else "person" if plain in ("name", "per", "customer", "user") else "id"
