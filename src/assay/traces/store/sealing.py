"""Splits in a store: its salt, the tasks whose split a job has determined, and how often a test split was opened.

A store has one salt, so that a task is in the same split in every command. Rollouts that were recorded without a split
(by the gateway, an import, `assay.record`) get theirs from the salt and the task's content. Does not load data:
`assay.datasets.splits` does.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.splits import split_of
from assay.datasets.tasks import SPLITS, Task, content_hash, owners_of
from assay.errors import ConfigError
from assay.support.numbers import counted
from assay.traces.records import subject_digest
from assay.traces.store import Store, store_url
from assay.traces.store import tables as schema

__all__ = [
    "DEFAULT_SALT",
    "HASH",
    "SEALED",
    "SplitFinder",
    "claim_salt",
    "open_test",
    "openings_line",
    "resolve_salt",
    "salt_of",
    "store_splits",
    "store_tasks",
    "task_key",
]

DEFAULT_SALT = "assay"
SEALED = ("gate", "test")
HASH = 16  # hex digits of a task's content hash that artifacts and the store keep
_LINE = re.compile(r"(?m)^([A-Za-z_]\w*): ")
_QUOTED = 12  # minimum characters of a prompt's line to be compared with sealed tasks: short lines match by chance
_SECTION = re.compile(r"\[\[ ## (\w+) ## \]\]")


def task_key(inputs: Mapping[str, Any]) -> str:
    """SHA-256 of the inputs' text without case, spaces and field names; "" if empty. Identifies a sealed task."""
    text = " ".join(" ".join(str(value) for value in inputs.values()).casefold().split())
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() if text else ""


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
                f"salt={requested!r} is not the artifact's {artifact_salt!r}: tasks that {path} was compiled on would "
                "fall into the test split. Use the artifact's salt"
            )
        if stored is not None and stored != artifact_salt:
            raise ConfigError(
                f"{path} was compiled with the salt {artifact_salt!r}, and this store has {stored!r}: its sealed tasks "
                "would be training tasks here. Name another store (store=…); a new one takes the artifact's salt"
            )
        return artifact_salt
    if stored is not None and requested not in (None, stored):
        _refuse(str(requested), stored)
    return requested or stored or DEFAULT_SALT


def _peeked(where: str | Path | None) -> str | None:
    """The salt of a store; None if the store does not exist. Does not create it."""
    url = store_url(where)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
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
        f"salt={requested!r}: this store has the salt {stored!r}, and a store has one, so that a task is in the same "
        "split in every command. Leave the salt out, or name another store (store=…)"
    )


# -- splits of tasks


def store_splits(store: Store, splits: Mapping[str, Iterable[tuple[str, str]]]) -> None:
    """Stores the splits of tasks, given as (content hash, `task_key` or ""). A task in gate or test stays there."""
    rows = {
        content[:HASH]: {"task": content[:HASH], "text": text, "split": name, **_owner_columns({})}
        for name in SPLITS  # sealed splits come last: they win if a task is listed twice
        for content, text in splits.get(name, ())
    }
    store.put_splits(list(rows.values()))


def store_tasks(store: Store, splits: Mapping[str, Iterable[Task]]) -> None:
    """Stores the splits of loaded tasks and the owners that their metadata name.

    The owners are needed for demonstrations, which may show a task that never ran.
    """
    rows = {
        (content := task.content_hash[:HASH]): {
            "task": content,
            "text": task_key(task.inputs),
            "split": name,
            **_owner_columns(task.metadata),
        }
        for name in SPLITS
        for task in splits.get(name, ())
    }
    store.put_splits(list(rows.values()))


def _owner_columns(metadata: Mapping[str, Any]) -> dict[str, str | None]:
    owners = owners_of(metadata)
    subject = owners.pop("data_subject", None)
    digest = None if subject is None else subject_digest(subject)
    return {"tenant": None, "consent": None, **owners, "subject": digest}


class SplitFinder:
    """Finds the split of any rollout's task by the store's salt and the task's content.

    A split that a job has determined, for example from a data file, takes precedence over the salt. If the record and
    the store disagree, the stricter split counts: a task that either of them seals is sealed.
    """

    def __init__(self, store: Store) -> None:
        self.salt = salt_of(store) or DEFAULT_SALT
        table = schema.known_tasks
        with store.engine.connect() as connection:
            rows = connection.execute(sa.select(table.c.task, table.c.text, table.c.split)).all()
        self._known = {task: split for task, _, split in rows}
        self.sealed_texts = {text for _, text, split in rows if text and split in SEALED}
        self._cache: dict[str, str] = {}  # content hash -> split

    def of_hash(self, content: str) -> str:
        """The split of a content hash, of which 16 hex digits suffice for tasks in the store; else ""."""
        known = self._known.get(content[:HASH])
        return known or (split_of(content, self.salt)[0] if len(content) == 64 else "")

    def of_inputs(self, inputs: Mapping[str, Any], recorded: str = "") -> str:
        """The split of a task; `recorded` if there are no inputs to determine it from."""
        recorded = recorded.strip().lower()
        if recorded in SEALED:
            return recorded
        key = content_hash(inputs)
        if key not in self._cache:
            if len(self._cache) > 100_000:
                self._cache.clear()
            self._cache[key] = self._of(inputs)
        return self._cache[key] or recorded

    def knows_as_sealed(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a job has loaded the task into a sealed split. The salt alone does not make it known."""
        forms = [dict(inputs), *_sections(inputs)] if inputs else []
        return self._quoted(inputs) or any(
            self._known.get(content_hash(form)[:HASH]) in SEALED or task_key(form) in self.sealed_texts
            for form in forms
        )

    def _of(self, inputs: Mapping[str, Any]) -> str:
        forms = [dict(inputs), *_sections(inputs)] if inputs else []
        splits = [self.of_hash(content_hash(form)) for form in forms]
        if any(task_key(form) in self.sealed_texts for form in forms) or self._quoted(inputs):
            splits.append("test")
        return next((name for name in reversed(SPLITS) if name in splits), "")

    def _quoted(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a line or paragraph of a prompt is a sealed task's text, alone or after a label such as `Q:`."""
        if not self.sealed_texts:
            return False
        for value in inputs.values():
            lines = {
                piece
                for text in ([value] if isinstance(value, str) else [])
                for cut in ("\n", "\n\n")
                for piece in text.split(cut)
            }
            texts = lines | {line.partition(":")[2] for line in lines}
            if any(len(text.strip()) >= _QUOTED and task_key({"text": text}) in self.sealed_texts for text in texts):
                return True
        return False


def _sections(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fields of prompts in DSPy's chat format or in `name: text` lines; the gateway records a prompt as one input."""
    sections = []
    for value in inputs.values():
        if isinstance(value, str) and (parts := _LINE.split(value)[1:]):
            sections.append({name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)})
        if isinstance(value, str) and "[[ ## " in value:
            parts = _SECTION.split(value.partition("\n\nRespond with")[0])
            fields = {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
            fields.pop("completed", None)
            sections += [fields] if fields else []
    return sections


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
    return f"The test split of these tasks has been opened {counted(often, 'times')} in this store{again}."


def open_test(store: Store, job: str, *, data: str, tasks: Iterable[str]) -> Openings:
    """Counts an opening of test tasks. To be called before the tasks are used.

    Args:
        job: id of the job.
        data: the data's spec or path.
        tasks: content hashes of the test tasks.
    Raises:
        StoreError: the opening could not be stored; the tasks must then stay sealed.
    """
    table, hashes = schema.test_openings, sorted(tasks)
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()[:HASH]
    members = {content[:HASH] for content in hashes}
    query = sa.select(
        table.c.job,
        table.c.times,
        table.c.members_json,
        sa.or_(table.c.tasks == digest, table.c.data == data).label("same"),
    )
    with store.engine.connect() as connection:
        rows = connection.execute(query).all()
    before = {
        row.job: int(row.times) for row in rows if row.same or not members.isdisjoint(json.loads(row.members_json))
    }
    mine = before.get(job, 0) + 1
    row = {
        "job": job,
        "data": data,
        "tasks": digest,
        "n": len(hashes),
        "members_json": json.dumps(sorted(members)),
        "times": mine,
    }
    store.put_opening({**row, "at": time.time()})
    return Openings(job=mine, store=sum(before.values()) + 1)
