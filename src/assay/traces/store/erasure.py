"""Erasure of a person's data: rollouts, labels, remembered facts, and prompts of other rollouts that show their tasks.

Does not change artifacts, exports or adapters, and does not empty the response cache: `assay.api.traces.forget_subject`
reports the former and does the latter.
"""

import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import of_tenant, subject_digests
from assay.traces.shown import TaskTexts, message_texts
from assay.traces.store import Store
from assay.traces.store import tables as schema
from assay.traces.store.connection import short_waits
from assay.traces.store.recalled import recalled_facts
from assay.traces.store.sealing import SplitFinder
from assay.traces.store.upserts import upsert

__all__ = ["Erased", "erase_subject"]

_BATCH = 400  # rows of one statement


@dataclass
class Erased:
    """Result of an erasure.

    Args:
        removed: number of rollouts that were deleted: those of the person, and those without a data subject in which a
            tool recalled facts about them.
        facts: number of remembered facts that were deleted: those of the rollouts, and those about the person.
        quoting: ids of other rollouts that quote a remembered fact about the person; they are not changed.
        naming: ids of remembered facts about others whose text has the person's name; they are not changed.
        prompts: number of prompts of other rollouts that were blanked, because they showed a task of the person.
        tasks: keys of the person's tasks.
        calls: request, weights and adapters of each LM call that showed the person's data; keys of the response cache.
    """

    removed: int = 0
    facts: int = 0
    quoting: list[str] = field(default_factory=list)
    naming: list[int] = field(default_factory=list)
    prompts: int = 0
    tasks: set[str] = field(default_factory=set)
    calls: list[tuple[dict[str, Any], str, list[str]]] = field(default_factory=list)


def erase_subject(store: Store, subject: str, *, tenant: str | None = None) -> Erased:
    """Removes a subject's rollouts, transitions and labels; blanks prompts of other rollouts that show their tasks.

    Case, spaces and the Unicode form of accents in the name are ignored. Rows of this subject that are written later
    (by a run in progress, by an import) stay in the store but are never exported, also not as a demonstration.

    Args:
        tenant: erases only what is of this tenant; None erases all of the subject. Prompts of others that show the
            tenant's tasks are blanked too.
    """
    store.flush()
    r, digests, erased = schema.rollouts, subject_digests(subject), Erased()
    texts, rows = TaskTexts(), list[dict[str, Any]]()
    splits = SplitFinder(store)
    with store.engine.begin() as connection:
        if connection.dialect.name == "sqlite":  # deleted text is overwritten, not only unlinked from its page
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
        names = connection.execute(
            sa.select(r.c.data_subject).where(r.c.data_subject.is_not(None)).distinct()
        ).scalars()
        spellings = [name for name in names if subject_digests(name) & digests]
        own = [r.c.data_subject.in_(spellings), *([r.c.tenant == tenant] if tenant is not None else [])]
        # Demonstrations may show a task that never ran: such tasks are in known_tasks only.
        k = schema.known_tasks
        known = sa.select(k.c.task).where(
            k.c.subject.in_(digests), *([k.c.tenant == tenant] if tenant is not None else [])
        )
        erased.tasks |= set(connection.execute(known).scalars())
        for (text,) in connection.execute(sa.select(r.c.inputs_json).where(*own)):
            inputs = orjson.loads(text)
            if task := task_key(inputs):
                texts.add(task, inputs)
                erased.tasks.add(task)
                split = splits.of_inputs(inputs) or "train"
                row = {"task": task, "split": split, "tenant": tenant, "consent": None}
                rows.append({**row, "subject": min(digests)})  # each of them is in `forgotten`
        f = schema.facts
        about = sa.and_(f.c.person.in_(digests), *([f.c.tenant == tenant] if tenant is not None else []))
        facts = connection.execute(sa.select(f.c.id, f.c.about, f.c.text).where(about)).all()
        recalled = recalled_facts(connection, facts, without=sa.select(r.c.id).where(*own))
        erased.quoting = sorted(recalled.others)
        for some in (sa.and_(*own), *map(r.c.id.in_, _batches(sorted(recalled.own)))):
            _remove(connection, erased, some)
        erased.facts += int(connection.execute(sa.delete(f).where(about)).rowcount)
        if erased.facts and connection.dialect.name == "sqlite":
            # FTS5 only marks the words of deleted rows as such; merging its segments removes them from the file
            connection.exec_driver_sql("INSERT INTO facts_fts(facts_fts) VALUES ('optimize')")
        elsewhere = sa.select(f.c.id, f.c.text).where(*([f.c.tenant == tenant] if tenant is not None else []))
        erased.naming = sorted(number for number, text in connection.execute(elsewhere) if _names(text, subject))
        _blank(connection, erased, texts)
        if erased.removed or erased.tasks or erased.facts:
            people = [digest if tenant is None else of_tenant(digest, tenant) for digest in sorted(digests)]
            forgotten = [{"person": person, "at": time.time()} for person in people]
            connection.execute(upsert(store.engine.dialect.name, schema.forgotten), forgotten)
    store.put_splits(rows)
    _empty_log(store)
    return erased


def _names(text: str, subject: str) -> bool:
    """Whether a text has a name as whole words, in any case, spacing and Unicode form of accents."""
    plain, name = (" ".join(unicodedata.normalize("NFC", part).casefold().split()) for part in (text, subject))
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", plain) is not None


def _empty_log(store: Store) -> None:
    """Removes the old pages from the write-ahead log of SQLite. While another process reads them they stay, until it
    or a later erasure empties the log."""
    if store.engine.dialect.name != "sqlite":
        return
    store.flush()
    with store.engine.connect() as connection, short_waits(connection):
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Parts of ids: a statement has at most 65,535 parameters in PostgreSQL, and 32,766 in SQLite."""
    return (ids[at : at + _BATCH] for at in range(0, len(ids), _BATCH))


def _remove(connection: sa.Connection, erased: Erased, some: sa.ColumnElement[bool]) -> None:
    """Deletes rollouts that a condition selects, with their calls, labels and facts."""
    r, t, f = schema.rollouts, schema.transitions, schema.facts
    ids = sa.select(r.c.id).where(some)
    calls = sa.select(t.c.request_json, t.c.weights, t.c.adapters_json).where(t.c.rollout_id.in_(ids))
    erased.calls += [_call(*row) for row in connection.execute(calls)]
    erased.facts += int(connection.execute(sa.delete(f).where(f.c.rollout_id.in_(ids))).rowcount)
    for table in (t, schema.labels):
        connection.execute(sa.delete(table).where(table.c.rollout_id.in_(ids)))
    erased.removed += int(connection.execute(sa.delete(r).where(some)).rowcount)


def _blank(connection: sa.Connection, erased: Erased, texts: TaskTexts) -> None:
    """Empties the requests of calls that show an erased task. Exports leave out calls that have no request."""
    t = schema.transitions
    affected = [(row, tasks) for row in _requests(connection) if (tasks := _shows(row, erased.tasks, texts))]
    for row, tasks in affected:
        erased.calls.append(_call(row.request_json, row.weights, row.adapters_json))
        where = (t.c.rollout_id == row.rollout_id) & (t.c.t == row[1])
        connection.execute(
            sa.update(t).where(where).values(request_json="{}", shown_tasks_json=orjson.dumps(sorted(tasks)).decode())
        )
    erased.prompts = len(affected)


def _requests(connection: sa.Connection) -> Iterator[Any]:
    r, t = schema.rollouts, schema.transitions
    columns = (t.c.rollout_id, t.c.t, t.c.request_json, t.c.weights, t.c.adapters_json, t.c.shown_tasks_json)
    query = (
        sa.select(*columns).select_from(r.join(t, r.c.id == t.c.rollout_id)).order_by(r.c.task_id, r.c.group_id, r.c.id)
    )
    # Set on the query, not on the connection: the connection's later statements delete and insert.
    yield from connection.execute(query.execution_options(yield_per=_BATCH))


def _shows(row: Any, tasks: set[str], texts: TaskTexts) -> set[str]:
    """Keys of all tasks that a call shows; empty if none of `tasks` is named in its row or quoted in its prompt."""
    named = set(orjson.loads(row.shown_tasks_json or "[]"))
    request = orjson.loads(row.request_json or "{}")
    quoted = set(texts.tasks_in(message_texts(chat_messages(request)))) if len(texts) and request else set()
    return named | quoted if quoted or named & tasks else set()


def _call(request_json: str, weights: str, adapters_json: str) -> tuple[dict[str, Any], str, list[str]]:
    return orjson.loads(request_json or "{}"), weights, orjson.loads(adapters_json or "[]")
