"""Splits in a store: its salt, the tasks whose split a job has determined, and how often a test split was opened.

A store has one salt, so that a task is in the same split in every command. Rollouts that were recorded without a split
(by the gateway, an import, `assay.record`) get theirs from the salt and the task's key. Does not load data:
`assay.datasets.splits` does.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.keys import DIGITS, IDENTIFYING, task_key
from assay.datasets.splits import split_of
from assay.datasets.tasks import SPLITS, Task, owners_of
from assay.errors import ConfigError
from assay.support.numbers import counted
from assay.support.sections import prompt_fields, prompt_readings
from assay.support.values import json_text
from assay.traces.records import subject_digest
from assay.traces.store import Store, store_address, tables as schema

DEFAULT_SALT = "assay"
SEALED = ("gate", "test")


# -- salt


def salt_of(store: Store) -> str | None:
    """The store's salt; None if it has none."""
    with store.engine.connect() as connection:
        salt = connection.execute(sa.select(schema.meta.c.value).where(schema.meta.c.key == "salt")).scalar()
    return None if salt is None else str(salt)


def resolve_salt(requested: str | None, where: str | Path | None, *, artifact: tuple[str, str] | None = None) -> str:
    """The salt of a job: the requested one, else the artifact's, else the store's, else the default. Writes nothing.

    Args:
        requested: the requested salt; None if the user set none.
        where: path or URL of the store; it is not created.
        artifact: path and salt of the job's artifact; None if it has none.
    Raises:
        ConfigError: the requested salt, the store's and the artifact's differ.
    """
    stored = _peeked(where)
    if artifact is not None:
        path, artifact_salt = artifact
        if requested is not None and requested != artifact_salt:
            raise ConfigError(
                f"`salt={requested!r}` is not the artifact's {artifact_salt!r}: tasks that {path} was compiled on "
                "would fall into the test split. Use the artifact's salt"
            )
        if stored is not None and stored != artifact_salt:
            raise ConfigError(
                f"{path} was compiled with the salt {artifact_salt!r}, and this store has {stored!r}: its sealed tasks "
                "would be training tasks here. Name another store (`store=…`); a new one takes the artifact's salt"
            )
        return artifact_salt
    if stored is not None and requested not in (None, stored):
        _refuse(str(requested), stored)
    return requested or stored or DEFAULT_SALT


def _peeked(where: str | Path | None) -> str | None:
    """The salt of a store; None if the store does not exist. Does not create it."""
    if not store_address(where).exists:
        return None
    with Store(where) as opened:
        return salt_of(opened)


def claim_salt(store: Store, salt: str) -> None:
    """Sets the store's salt if it has none.

    Raises:
        ConfigError: the store has another salt.
    """
    stored = salt_of(store)
    if stored is None:
        store.put_meta("salt", salt)
        stored = salt_of(store)
    if stored != salt:
        _refuse(salt, str(stored))


def _refuse(requested: str, stored: str) -> None:
    raise ConfigError(
        f"`salt={requested!r}`: this store has the salt {stored!r}, and a store has one, so that a task is in the same "
        "split in every command. Leave the salt out, or name another store (`store=…`)"
    )


# -- splits of tasks


def known_splits(where: Store | str | Path | None) -> dict[str, str]:
    """The splits of a store's tasks by key; empty if the store does not exist. Does not create it."""
    if not isinstance(where, Store):
        if not store_address(where).exists:
            return {}
        with Store(where) as opened:
            return known_splits(opened)
    table = schema.known_tasks
    with where.engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.task, table.c.split))
        return {row.task: row.split for row in rows}


def store_splits(store: Store, splits: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Stores the splits of tasks, given by key. A task that has one in the store keeps it.

    Returns:
        Key -> split, of the tasks for which the store has another split.
    """
    return _stored(store, {key: (name, {}) for name, keys in splits.items() for key in keys})


def store_tasks(store: Store, splits: Mapping[str, Iterable[Task]]) -> dict[str, str]:
    """As `store_splits`, of loaded tasks, with the owners that their metadata name.

    The owners are needed for demonstrations, which may show a task that never ran. A split is stored for the key of the
    task's row too, so that it stands for programs that declare other types, and for recordings of the row as it is.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    by_row: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, tasks in splits.items():
        for task in tasks:
            _, owners = rows.get(task.key, (name, {}))
            rows[task.key] = name, {**owners_of(task.metadata), **owners}
            if task.row_key:
                by_row[task.row_key] = rows[task.key]
    return {key: split for key, split in _stored(store, {**by_row, **rows}).items() if key in rows}


def _stored(store: Store, rows: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    keys = sorted(rows)  # one order in all processes, so that two of them do not wait for each other
    store.put_splits([{"task": key, "split": rows[key][0], **_owner_columns(rows[key][1])} for key in keys])
    known = known_splits(store)
    return {key: known[key] for key in keys if known[key] != rows[key][0]}


def _owner_columns(owners: Mapping[str, str]) -> dict[str, str | None]:
    owners = dict(owners)
    subject = owners.pop("data_subject", None)
    digest = None if subject is None else subject_digest(subject)
    return {"tenant": None, "consent": None, **owners, "subject": digest}


class SplitFinder:
    """Finds the split of any rollout's task by the store's salt and the task's key.

    A split that a job has determined, for example from a data file, takes precedence over the salt. If the record and
    the store disagree, the stricter split counts: a task that either of them seals is sealed.

    Attributes:
        sealed: keys of the tasks that a job has loaded into a sealed split.
    """

    def __init__(self, store: Store) -> None:
        self.salt = salt_of(store) or DEFAULT_SALT
        self._known = known_splits(store)
        self.sealed = {key for key, split in self._known.items() if split in SEALED}
        self._cache: dict[str, str] = {}  # inputs -> split

    def of_key(self, key: str) -> str:
        """The split of a task; "" if that is not a key."""
        return self._known.get(key) or (split_of(key, self.salt)[0] if len(key) == DIGITS else "")

    def of_inputs(self, inputs: Mapping[str, Any], recorded: str = "") -> str:
        """The split of a task; `recorded` if there are no inputs to determine it from."""
        recorded = recorded.strip().lower()
        if recorded in SEALED:
            return recorded
        text = json_text(inputs)
        if text not in self._cache:
            if len(self._cache) > 100_000:
                self._cache.clear()
            likely = {task_key(form) for form in (inputs, *map(prompt_fields, _prompts(inputs)))}
            sealed = [*self._known_sealed(inputs), *self._quoted(inputs)]
            self._cache[text] = _strictest([*map(self.of_key, likely), *sealed])
        return self._cache[text] or recorded

    def knows_as_sealed(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a job has loaded the task into a sealed split. The salt alone does not make it known."""
        return bool(self._quoted(inputs) or self._known_sealed(inputs))

    def _known_sealed(self, inputs: Mapping[str, Any]) -> list[str]:
        """Splits of the sealed tasks whose fields the inputs, or prompts in them, may be."""
        keys = set(map(task_key, input_forms(inputs))) if self.sealed else set()
        return [self._known[key] for key in keys & self.sealed]

    def _quoted(self, inputs: Mapping[str, Any]) -> list[str]:
        """Splits of the sealed tasks whose text is a line or paragraph of a prompt, alone or after a label such as
        `Q:`."""
        if not self.sealed:
            return []
        pieces = {
            piece for text in _texts(inputs) for part in (text, *text.split("\n\n"), *text.split("\n"))
            for piece in (part, part.partition(":")[2])
        }  # fmt: skip
        keys = {task_key({"text": text}) for text in pieces if len(text.strip()) >= IDENTIFYING}
        return [self._known[key] for key in keys & self.sealed]


def _strictest(splits: Iterable[str]) -> str:
    return max(splits, key=("", *SPLITS).index, default="")


def input_forms(inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The inputs as they are, and all that prompts in them may stand for; the gateway records a prompt as one input."""
    return [inputs, *(fields for text in _prompts(inputs) for fields in prompt_readings(text))]


def _prompts(inputs: Mapping[str, Any]) -> list[str]:
    return [value for value in inputs.values() if isinstance(value, str)]


def _texts(value: Any) -> Iterator[str]:
    """The texts in inputs, at any depth: those of a conversation are in the messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


# -- openings of the test split


@dataclass(frozen=True, kw_only=True)
class Openings:
    """How often test tasks were opened: by this job, and by all jobs of the store on this data or any of these tasks.

    Every run of a job counts, and counts again if it was killed and resumed.
    """

    job: int
    store: int

    def to_dict(self) -> dict[str, int]:
        return {"this_job": self.job, "this_store": self.store}


def openings_line(openings: Mapping[str, int] | None) -> str:
    """A sentence on `Openings.to_dict()` for reports."""
    if not openings:
        return "The test split was not opened."
    again = f" ({openings['this_job']} times by this job)" if openings["this_job"] > 1 else ""
    often = openings["this_store"]
    weaker = " What was tried since may depend on what the earlier openings showed." if often > 1 else ""
    return f"The test split of these tasks has been opened {counted(often, 'times')} in this store{again}.{weaker}"


def open_test(store: Store, job: str, *, data: str, tasks: Iterable[str]) -> Openings:
    """Counts an opening of test tasks. To be called before the tasks are used.

    Args:
        job: id of the job.
        data: the data's spec or path.
        tasks: keys of the test tasks.
    Raises:
        StoreError: the opening could not be stored; the tasks must then stay sealed.
    """
    table, members = schema.test_openings, sorted(set(tasks))
    digest = hashlib.sha256("".join(members).encode()).hexdigest()[:16]
    same = sa.or_(table.c.tasks == digest, table.c.data == data).label("same")
    with store.engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.job, table.c.times, table.c.members_json, same)).all()
    known = set(members)
    before = {row.job: int(row.times) for row in rows if row.same or known & set(json.loads(row.members_json))}
    mine = before.get(job, 0) + 1
    row = {"job": job, "data": data, "tasks": digest, "n": len(members), "members_json": json.dumps(members)}
    store.put_opening({**row, "times": mine, "at": store.clock.now()})
    return Openings(job=mine, store=sum(before.values()) + 1)
