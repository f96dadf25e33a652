"""Erasure of a person's data: rollouts, labels, remembered facts, and what other rows of the store repeat of them.

Does not touch files, and does not empty the response cache: `assay.jobs.erasure` does.
"""

import html
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.keys import IDENTIFYING
from assay.datasets.tasks import task_key
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import of_tenant, subject_digests
from assay.traces.shown import TaskTexts, message_texts
from assay.traces.store import Store, tables as schema
from assay.traces.store.connection import short_waits
from assay.traces.store.leases import seconds
from assay.traces.store.sealing import SplitFinder, input_forms
from assay.traces.store.upserts import upsert

# -- Finds texts that repeat what an erased person wrote. Reads and writes no store.
#
# Texts are compared by their letters and digits alone: case, spaces, punctuation, escapes of JSON and HTML and the
# Unicode form do not matter. A text repeats another one if `LETTERS` of them in a row are the same (`FEW_LETTERS` of a
# script without spaces between words), or if it holds all of a shorter text of `IDENTIFYING` letters (half of them in
# such a script), address or number (an `@`, or `DIGITS` digits). Other short texts, such as `yes` or a first name,
# identify nobody and are not searched.


ERASED = "[erased]"
"""Stands in place of an erased text."""
LETTERS, FEW_LETTERS, DIGITS = 20, 8, 9
_IDEOGRAPHS = 0x2E80  # code points from here on are of scripts in which a letter says about as much as a word
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[bfnrt])")
_NO_LETTER = re.compile(r"[\W_]+")
_EXAMPLES = frozenset(("demos", "pool", "traces", "train"))  # lists in a program's state whose items are removed whole


class ErasedTexts:
    """The texts of a person.

    Attributes:
        short: number of texts that are too short to be searched.
    """

    def __init__(self) -> None:
        self.short = 0
        self._texts: list[set[str]] = []  # the runs of letters of each text
        self._runs: set[str] = set()
        self._parts: dict[int, set[str]] = {}  # halves of runs, by their length

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def shared(self) -> int:
        """Number of texts that others wrote too, so that they are not searched."""
        return sum(not runs & self._runs for runs in self._texts)

    def add(self, value: Any) -> None:
        """Adds all texts within a value as JSON has it."""
        if isinstance(value, Mapping):
            for part in value.values():
                self.add(part)
        elif isinstance(value, list | tuple):
            for part in value:
                self.add(part)
        elif (text := _text(value)).strip():
            letters = _letters(text)
            runs = set(_runs_of(letters)) or ({letters} if _identifies(text, letters) else set())
            if not runs:
                self.short += 1
                return
            self._texts.append(runs)
            self._runs |= runs
            for run in runs:
                half = len(run) // 2
                self._parts.setdefault(len(run), set()).update(run[at : at + half] for at in range(len(run) - half + 1))

    def runs_in(self, text: str) -> set[str]:
        """The runs of letters that a text shares with them."""
        return set(self._found(_letters(text)))

    def keep(self, text: str) -> None:
        """Stops searching for what is in this text too: somebody else wrote it."""
        self._runs -= self.runs_in(text)

    def are_in(self, text: str) -> bool:
        """Whether a text repeats one of them. Looks at every tenth letter only, and closer where one fits."""
        return bool(self._runs) and next(self._found(_letters(text)), None) is not None

    def without(self, value: Any, key: str = "") -> Any:
        """A value as JSON has it, with every text that repeats one of them replaced by `ERASED`.

        Examples in a program's state are removed whole.
        """
        if isinstance(value, dict):
            return {self.without(name): self.without(part, str(name)) for name, part in value.items()}
        if isinstance(value, list):
            kept = [part for part in value if not (key in _EXAMPLES and self._are_within(part))]
            return [self.without(part, key) for part in kept]
        return ERASED if self.are_in(_text(value)) else value

    def without_lines(self, text: str) -> str:
        """A text without the lines that repeat one of them; empty but for a mark if they run over several lines."""
        plain = "".join(f"{ERASED}\n" if self.are_in(line) else line for line in text.splitlines(keepends=True))
        return f"{ERASED}\n" if self.are_in(plain) else plain

    def _are_within(self, value: Any) -> bool:
        return self.without(value) != value

    def _found(self, letters: str) -> Iterator[str]:
        for size, parts in self._parts.items():
            half = size // 2
            for at in range(0, len(letters) - half + 1, half):
                if letters[at : at + half] in parts:
                    for start in range(max(0, at - half), at + 1):
                        if (run := letters[start : start + size]) in self._runs:
                            yield run


def _text(value: Any) -> str:
    """A text, or a whole number, as text; empty for other values."""
    return value if isinstance(value, str) else str(value) if type(value) is int else ""


def _identifies(text: str, letters: str) -> bool:
    """Whether a short text is long enough to be somebody's, or an address or a number: of a telephone, a passport."""
    if sum(2 if ord(letter) >= _IDEOGRAPHS else 1 for letter in letters) >= IDENTIFYING:
        return True
    return len(letters) >= FEW_LETTERS and ("@" in text or sum(letter.isdigit() for letter in letters) >= DIGITS)


def _letters(text: str) -> str:
    if "\\" in text:
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else " ", text)
    if "&" in text:
        text = html.unescape(text)
    return _NO_LETTER.sub("", unicodedata.normalize("NFKC", text).casefold())


def _runs_of(letters: str) -> Iterator[str]:
    yield from (letters[at : at + LETTERS] for at in range(len(letters) - LETTERS + 1))
    for at in range(len(letters) - FEW_LETTERS + 1):
        run = letters[at : at + FEW_LETTERS]
        if all(ord(letter) >= _IDEOGRAPHS for letter in run):
            yield run


# -- Rollouts that show remembered facts of a person. Reads the store, changes nothing.


_AT_ONCE = 400  # rows that are read at once
_FEWEST_CHARS = 12  # of a fact; a shorter text, such as `likes tea`, is in prompts that are not about the person


@dataclass
class RecalledFacts:
    """Ids of rollouts.

    Args:
        own: without a data subject, and a tool returned facts of the person: those of an agent that talked with them.
        others: all others with a call or a tool result that quotes one of the facts.
    """

    own: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


def fact_line(number: int, about: str, text: str) -> str:
    """A fact as the tool `recall` returns it, one per line. The number makes the line the fact's own."""
    return f"{number}{f' ({about})' if about else ''}: {text}"


def recalled_facts(connection: sa.Connection, facts: Sequence[Any], *, without: sa.Select[Any]) -> RecalledFacts:
    """The rollouts that show facts of a person.

    Args:
        facts: rows of the table `facts`.
        without: selects the ids of rollouts that are left out.
    """
    result = RecalledFacts()
    if not facts:
        return result
    lines = {fact_line(fact.id, fact.about, fact.text) for fact in facts}
    texts = [orjson.dumps(fact.text).decode()[1:-1] for fact in facts if len(fact.text) >= _FEWEST_CHARS]
    for row in _calls(connection, without):
        quotes = any(text in row.tools_json or text in row.request_json for text in texts)
        if not row.data_subject and any(lines & set(result.splitlines()) for result in _results(row.tools_json)):
            result.own.add(row.rollout_id)
        elif quotes:
            result.others.add(row.rollout_id)
    result.others -= result.own
    return result


def _results(tools_json: str) -> list[str]:
    return [text for tool in orjson.loads(tools_json) if isinstance(text := tool.get("result"), str)]


def _calls(connection: sa.Connection, without: sa.Select[Any]) -> Iterator[Any]:
    """The texts of each LM call, and of each rollout with tools before its first call."""
    r, t = schema.rollouts, schema.transitions
    not_left_out = r.c.id.not_in(without)
    call = sa.select(t.c.rollout_id, r.c.data_subject, t.c.request_json, t.c.tools_json)
    early = sa.select(
        r.c.id.label("rollout_id"), r.c.data_subject, sa.literal("").label("request_json"),
        r.c.early_tools_json.label("tools_json"),
    )  # fmt: skip
    for query in (
        call.select_from(r.join(t, r.c.id == t.c.rollout_id)).where(not_left_out),
        early.where(not_left_out, r.c.early_tools_json != "[]"),
    ):
        yield from connection.execute(query.execution_options(yield_per=_AT_ONCE))


# -- Erasure.


_BATCH = 400  # rows of one statement
_FEW_TASKS = 3  # a text that this many tasks without a data subject contain is not the person's alone


@dataclass
class Erased:
    """Result of an erasure.

    Args:
        removed: number of rollouts that were deleted: those of the person, and those without a data subject in which a
            tool recalled facts about them.
        running: number of these that had not ended: a process that runs writes their next calls, or the whole rollout.
        unowned: number of calls that were deleted of rollouts that an earlier erasure took while they ran.
        facts: number of remembered facts that were deleted: those of the rollouts, and those about the person.
        quoting: ids of other rollouts that quote a remembered fact about the person.
        naming: ids of remembered facts about others whose text has the person's name; they are not changed.
        emptied: number of other rows by table in which a text of the person was replaced, with their answers,
            predictions, verdicts and labels.
        documents: indexed documents that hold a text of the person; they are not changed.
        texts: of the person.
        compacted: whether the database file was rewritten without its free pages; None if nothing was erased.
        prompts: number of prompts of other rollouts that were blanked, because they showed a task of the person.
        tasks: keys of the person's tasks.
        unread: number of these tasks whose inputs nothing has: they were never run, or are erased.
        calls: request, weights and adapters of each LM call that showed the person's data; keys of the response cache.
    """

    removed: int = 0
    running: int = 0
    unowned: int = 0
    facts: int = 0
    quoting: list[str] = field(default_factory=list)
    naming: list[int] = field(default_factory=list)
    prompts: int = 0
    tasks: set[str] = field(default_factory=set)
    unread: int = 0
    calls: list[tuple[dict[str, Any], str, list[str]]] = field(default_factory=list)
    emptied: Counter[str] = field(default_factory=Counter)
    documents: list[str] = field(default_factory=list)
    texts: ErasedTexts = field(default_factory=ErasedTexts)
    compacted: bool | None = None


def erase_subject(
    store: Store,
    subject: str,
    *,
    tenant: str | None = None,
    inputs_of: Callable[[Collection[str]], Iterable[tuple[str, Any]]] = lambda tasks: (),
) -> Erased:
    """Removes a subject's rollouts, transitions and labels; blanks prompts of other rollouts that show their tasks.

    Case, spaces and the Unicode form of accents in the name are ignored. Rows of this subject that are written later
    (by a run in progress, by an import) stay in the store but are never exported, also not as a demonstration.

    Args:
        tenant: erases only what is of this tenant; None erases all of the subject. Prompts of others that show the
            tenant's tasks are blanked too.
        inputs_of: inputs of tasks by their hashes, for those that no rollout has: demonstrations show tasks that were
            never run.
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
            erased.texts.add(inputs)
            if task := task_key(inputs):
                texts.add(task, inputs)
                erased.tasks.add(task)
                split = splits.of_inputs(inputs) or "train"
                row = {"task": task, "split": split, "tenant": tenant, "consent": None}
                rows.append({**row, "subject": min(digests)})  # each of them is in `forgotten`
        unread = erased.tasks - {row["task"] for row in rows}
        for task, inputs in itertools.chain(_inputs_of(connection, unread), inputs_of(unread)):
            erased.texts.add(inputs)
            unread.discard(task)
        erased.unread = len(unread)
        f = schema.facts
        about = sa.and_(f.c.person.in_(digests), *([f.c.tenant == tenant] if tenant is not None else []))
        facts = connection.execute(sa.select(f.c.id, f.c.about, f.c.text).where(about)).all()
        recalled = recalled_facts(connection, facts, without=sa.select(r.c.id).where(*own))
        erased.quoting = sorted(recalled.others)
        erased.texts.add([fact.text for fact in facts])
        for some in (sa.and_(*own), *map(r.c.id.in_, _batches(sorted(recalled.own)))):
            _remove(connection, erased, some)
        _remove_late(connection, erased)
        erased.facts += int(connection.execute(sa.delete(f).where(about)).rowcount)
        _blank(connection, erased, texts)
        if erased.texts:
            _keep_shared(connection, erased.texts)
            _empty_rows(connection, erased)
        elsewhere = sa.select(f.c.id, f.c.text).where(*([f.c.tenant == tenant] if tenant is not None else []))
        erased.naming = sorted(number for number, text in connection.execute(elsewhere) if _names(text, subject))
        if (erased.facts or erased.emptied[f.name]) and connection.dialect.name == "sqlite":
            # FTS5 only marks the words of deleted rows as such; merging its segments removes them from the file
            connection.exec_driver_sql("INSERT INTO facts_fts(facts_fts) VALUES ('optimize')")
        if erased.removed or erased.tasks or erased.facts:
            people = [digest if tenant is None else of_tenant(digest, tenant) for digest in sorted(digests)]
            forgotten = [{"person": person, "at": store.clock.now()} for person in people]
            connection.execute(upsert(store.engine.dialect.name, schema.forgotten), forgotten)
    store.put_splits(rows)
    if erased.removed or erased.unowned or erased.prompts or erased.facts or erased.emptied:
        erased.compacted = _compacted(store)
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
    running = connection.execute(sa.select(r.c.id).where(some, r.c.status == "running")).scalars().all()
    erased.running += len(running)
    if running:
        at = seconds(connection)
        rows = [{"id": name, "at": at} for name in running]
        connection.execute(upsert(connection.dialect.name, schema.erased_rollouts), rows)
    for table in (t, schema.labels, schema.conversation_keys):
        connection.execute(sa.delete(table).where(table.c.rollout_id.in_(ids)))
    erased.removed += int(connection.execute(sa.delete(r).where(some)).rowcount)


def _remove_late(connection: sa.Connection, erased: Erased) -> None:
    """Deletes calls that were written after an erasure had taken their rollout. Other calls without a rollout stay:
    those of a job that another machine has taken over."""
    t, ids = schema.transitions, sorted(connection.execute(sa.select(schema.erased_rollouts.c.id)).scalars())
    for batch in _batches(ids):
        erased.unowned += int(connection.execute(sa.delete(t).where(t.c.rollout_id.in_(batch))).rowcount)


def _inputs_of(connection: sa.Connection, tasks: set[str]) -> Iterator[tuple[str, Any]]:
    """The inputs of tasks in rollouts that do not name their data subject, also in prompts of the gateway."""
    r = schema.rollouts
    query = sa.select(r.c.inputs_json).order_by(r.c.task_id, r.c.group_id, r.c.id)
    for (text,) in connection.execute(query.execution_options(yield_per=_BATCH)) if tasks else ():
        for inputs in input_forms(orjson.loads(text)):
            if (task := task_key(inputs)) in tasks:
                yield task, inputs


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


def _keep_shared(connection: sa.Connection, texts: ErasedTexts) -> None:
    """Keeps texts that others wrote too: named data subjects, or several tasks without one."""
    r = schema.rollouts
    query = sa.select(r.c.inputs_json, r.c.data_subject).order_by(r.c.task_id, r.c.group_id, r.c.id)
    unowned: dict[str, set[str]] = defaultdict(set)
    for row in connection.execute(query.execution_options(yield_per=_BATCH)):
        if not texts.are_in(row.inputs_json):
            continue
        if row.data_subject:
            texts.keep(row.inputs_json)
        else:
            for run in texts.runs_in(row.inputs_json):
                unowned[run].add(row.inputs_json)
    for run, inputs in unowned.items():
        if len(inputs) >= _FEW_TASKS:
            texts.keep(run)


def _empty_rows(connection: sa.Connection, erased: Erased) -> None:
    """Replaces the person's texts in all other rows; a call that repeats one loses its request, as in `_blank`."""
    texts, t, f = erased.texts, schema.transitions, schema.facts
    for table, rows in _texts_of_rows(connection):
        changes: list[tuple[Any, dict[str, Any]]] = []
        for row in rows:
            values = {name: text for name, text in row.items() if isinstance(text, str) and texts.are_in(text)}
            if not values:
                continue
            key = sa.and_(*(column == row[column.name] for column in table.primary_key))
            changed: dict[str, Any] = {name: _emptied(texts, name, text) for name, text in values.items()}
            if table is t:
                erased.calls.append(_call(row["request_json"], row["weights"], row["adapters_json"]))
                changed |= {"request_json": "{}", "token_ids_json": None, "logprobs_json": None}
            changes.append((key, changed))
        for key, changed in changes:
            erased.emptied[table.name] += 1
            connection.execute(sa.delete(f).where(key) if table is f else sa.update(table).where(key).values(changed))
    p, d = schema.passages, schema.documents
    query = sa.select(d.c.root, d.c.path, p.c.text).select_from(p.join(d, d.c.id == p.c.document_id))
    found = {f"{row['root']}/{row['path']}" for row in _streamed(connection, query) if texts.are_in(row["text"])}
    erased.documents = sorted(found)


def _texts_of_rows(connection: sa.Connection) -> Iterator[tuple[sa.Table, Iterator[dict[str, Any]]]]:
    """The rows of every table that holds texts, but the passages of documents. Large tables are read by an index."""
    r, t, labels = schema.rollouts, schema.transitions, schema.labels
    order = (r.c.task_id, r.c.group_id, r.c.id)
    large = {
        r: [sa.select(r).order_by(*order)],
        t: [sa.select(t).select_from(r.join(t, r.c.id == t.c.rollout_id)).order_by(*order)],
        labels: [
            sa.select(labels).where(labels.c.question == question)
            for question in connection.execute(sa.select(labels.c.question).distinct()).scalars().all()
        ],
    }
    left_out = {schema.passages, schema.passage_vectors, schema.documents, schema.known_tasks, schema.made_from}
    for table in schema.metadata.sorted_tables:
        if table not in left_out:
            queries = large.get(table, [sa.select(table)])
            yield table, (dict(row) for query in queries for row in _streamed(connection, query))


def _streamed(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Any]:
    yield from connection.execute(query.execution_options(yield_per=_BATCH)).mappings()


def _emptied(texts: ErasedTexts, name: str, text: str) -> str:
    """A column's text without those of the person."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return ERASED
    if isinstance(value, dict | list):
        return orjson.dumps(texts.without(value)).decode()
    return ERASED


def _compacted(store: Store) -> bool | None:
    """Rewrites an SQLite file, because free space of its pages may hold what was there before an earlier update.

    Returns:
        False if another process held the file; None on a server, whose own VACUUM does it.
    """
    if store.engine.dialect.name != "sqlite":
        return None
    try:
        engine = store.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, short_waits(connection):
            connection.exec_driver_sql("VACUUM")
    except sa.exc.OperationalError:
        return False
    return True
