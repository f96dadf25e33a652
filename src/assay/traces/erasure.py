"""Erasure of a person's data: rollouts, labels, and the prompts of other rollouts that show their tasks as demonstrations.

Artifacts, exports and adapters are named, not changed: `assay.exporting.forget_subject` does that, and empties the response cache.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import content_hash
from assay.traces import schema
from assay.traces.dialects import chat_messages
from assay.traces.migration import upsert
from assay.traces.records import subject_digest
from assay.traces.sealing import HASH, SplitFinder, task_key
from assay.traces.shown import TaskTexts, message_texts
from assay.traces.store import Store

__all__ = ["Erased", "erase_subject"]

_BATCH = 400  # rows of one statement


@dataclass
class Erased:
    """What an erasure removed. `calls` are requests and weights of LM calls that showed the person's data, for the response cache."""

    removed: int = 0  # rollouts
    prompts: int = 0  # of other rollouts, that showed a task of theirs
    tasks: set[str] = field(default_factory=set)  # hashes
    calls: list[tuple[dict[str, Any], str, list[str]]] = field(default_factory=list)


def erase_subject(store: Store, subject: str) -> Erased:
    """Removes a data subject's rollouts with their transitions and labels, and blanks the prompts of others that show their tasks.

    Case and spaces of the name do not matter. What is written of them later, by a run that was under way or an import, is kept out of
    exports, also as a demonstration.
    """
    store.flush()
    r, t, digest, erased = schema.rollouts, schema.transitions, subject_digest(subject), Erased()
    texts, rows = TaskTexts(), list[dict[str, Any]]()
    splits = SplitFinder(store)
    with store.engine.begin() as connection:
        names = connection.execute(sa.select(r.c.data_subject).where(r.c.data_subject.is_not(None)).distinct()).scalars()
        theirs = [name for name in names if subject_digest(name) == digest]
        known = schema.known_tasks
        erased.tasks |= set(connection.execute(sa.select(known.c.task).where(known.c.subject == digest)).scalars())
        for (text,) in connection.execute(sa.select(r.c.inputs_json).where(r.c.data_subject.in_(theirs))):
            inputs = orjson.loads(text)
            if inputs and (task := content_hash(inputs)[:HASH]):
                texts.add(task, inputs)
                erased.tasks.add(task)
                split = splits.of_inputs(inputs) or "train"
                rows.append({"task": task, "text": task_key(inputs), "split": split, "tenant": None, "consent": None, "subject": digest})
        ids = sa.select(r.c.id).where(r.c.data_subject.in_(theirs))
        own = connection.execute(sa.select(t.c.request_json, t.c.weights, t.c.adapters_json).where(t.c.rollout_id.in_(ids))).all()
        erased.calls += [_call(*row) for row in own]
        for table in (t, schema.labels):
            connection.execute(sa.delete(table).where(table.c.rollout_id.in_(ids)))
        erased.removed = int(connection.execute(sa.delete(r).where(r.c.data_subject.in_(theirs))).rowcount)
        _blank(connection, erased, texts)
        if erased.removed or erased.tasks:
            connection.execute(upsert(store.engine.dialect.name, schema.forgotten), [{"person": digest, "at": time.time()}])
    store.put_splits(rows)
    return erased


def _blank(connection: sa.Connection, erased: Erased, texts: TaskTexts) -> None:
    """Empties the prompts that show a task of theirs. A call without its request is not clean, so it is in no export."""
    t = schema.transitions
    found = [(row, shown) for row in _requests(connection) if (shown := _shows(row, erased.tasks, texts))]
    for row, shown in found:
        erased.calls.append(_call(row.request_json, row.weights, row.adapters_json))
        where = (t.c.rollout_id == row.rollout_id) & (t.c.t == row[1])
        connection.execute(sa.update(t).where(where).values(request_json="{}", shown_tasks_json=orjson.dumps(sorted(shown)).decode()))
    erased.prompts = len(found)


def _requests(connection: sa.Connection) -> Iterator[Any]:
    r, t = schema.rollouts, schema.transitions
    wanted = (t.c.rollout_id, t.c.t, t.c.request_json, t.c.weights, t.c.adapters_json, t.c.shown_tasks_json)
    query = sa.select(*wanted).select_from(r.join(t, r.c.id == t.c.rollout_id)).order_by(r.c.task_id, r.c.group_id, r.c.id)
    yield from connection.execute(query.execution_options(yield_per=_BATCH))  # of the query alone: the connection deletes and inserts next


def _shows(row: Any, tasks: set[str], texts: TaskTexts) -> set[str]:
    """All tasks that a call shows, where one of them is among `tasks` or is in the prompt."""
    named = {task[:HASH] for task in orjson.loads(row.shown_tasks_json or "[]")}
    request = orjson.loads(row.request_json or "{}")
    found = set(texts.shown(message_texts(chat_messages(request)))) if len(texts) and request else set()
    return named | found if found or named & tasks else set()


def _call(request_json: str, weights: str, adapters_json: str) -> tuple[dict[str, Any], str, list[str]]:
    return orjson.loads(request_json or "{}"), weights, orjson.loads(adapters_json or "[]")
