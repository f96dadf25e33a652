"""One task: what goes in, what should come out, and what else the rubric reads."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from assay.errors import DataError

__all__ = ["OWNERS", "SPLITS", "EmptyInputs", "Task", "consent_text", "make_task", "missing_inputs", "owners_of"]

OWNERS = ("tenant", "data_subject", "consent")  # whose data a task is: columns of this name go into the metadata
_STRUCTURE = {"id", "task_type", "split", "inputs", "expected", "metadata", *OWNERS}
SPLITS = ("train", "val", "gate", "test")
_ID = 200  # characters of an id
_USUAL_OUTPUTS = {"answer", "label", "output", "expected", "target", "category", "gold"}


class EmptyInputs(DataError):
    """A row has no input with a value. `where` says which."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: every input is empty. Fill in an input, or remove the row")
        self.where = where


@dataclass(frozen=True, kw_only=True)
class Task:
    """Inputs of the program and what its prediction is held against."""

    id: str
    task_type: str = "default"
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None  # named by the file; else None and the hash decides

    def __getitem__(self, name: object) -> NoReturn:
        """Says where a task's values are to one who writes `task[name]`."""
        part = next((part for part in ("expected", "inputs", "metadata") if name in getattr(self, part)), "expected")
        raise TypeError(f"a task has no items; its values are in task.inputs, task.expected and task.metadata: task.{part}[{name!r}]")

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the inputs, as of the first read. Two tasks that ask the same are the same task, whatever they are called."""
        return content_hash(self.inputs)


_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str).encode


def content_hash(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(_encode(inputs).encode("utf-8", "surrogatepass")).hexdigest()


def consent_text(value: Any) -> str:
    """A consent as it is recorded: `yes` or `no` of a boolean, anything else as text. Which words mean that it was given:
    `assay.traces.selection.consents`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def owners_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Whose data something is, of a row or of metadata: `tenant`, `data_subject` and `consent`, those that are there."""
    told = {name: fields[name] for name in OWNERS if fields.get(name) is not None}
    return {name: consent_text(value) if name == "consent" else str(value) for name, value in told.items()}


def make_task(row: Mapping[str, Any], *, where: str = "row", inputs: Collection[str] | None = None) -> Task:
    """A task from one row, structured (`inputs`, `expected`) or flat.

    Args:
        row: a structured row has `inputs` as an object; in a flat row every other column is an input or an expected
            output: an input where `inputs` names it, else by the usual names of outputs (`answer`, `label`, …). In both
            `tenant`, `data_subject` and `consent` say whose data it is, and go into the metadata.
        where: `file:line`, for errors.
        inputs: the program's input fields, where the caller knows them.
    Raises:
        DataError: no input in the row, an input the program needs is missing, or a value is not of JSON's types.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with the task's fields, found {type(row).__name__}")
    if isinstance(row.get("inputs"), Mapping):
        given, expected = dict(row["inputs"]), row.get("expected", {})
        if not isinstance(expected, Mapping):
            expected = {"answer": expected}
        metadata = row.get("metadata") or {k: v for k, v in row.items() if k not in _STRUCTURE}
    else:
        flat = {key: value for key, value in row.items() if key not in _STRUCTURE - {"expected"} or (inputs is not None and key in inputs)}
        names = set(inputs) if inputs is not None else {key for key in flat if key not in _USUAL_OUTPUTS}
        given = {key: value for key, value in flat.items() if key in names}
        expected = {key: value for key, value in flat.items() if key not in names}
        metadata = row.get("metadata") or {}
    metadata = {**{name: row[name] for name in OWNERS if row.get(name) is not None}, **metadata} if isinstance(metadata, Mapping) else metadata
    expected = {name: value for name, value in expected.items() if value is not None}  # null: nobody said what is right
    if inputs is not None and (missing := sorted(set(inputs) - given.keys())):
        raise missing_inputs(where, missing, {**given, **expected} if isinstance(row.get("inputs"), Mapping) else row)
    if not given or all(value is None or value == "" for value in given.values()):
        raise EmptyInputs(where)
    for name, value in {**given, **expected}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{where}: {name}={value!r} is not a finite number")
    if len(str(row.get("id") or "")) > _ID:
        raise DataError(f"{where}: an id of {len(str(row['id']))} characters; at most {_ID} are taken")
    split = {"validation": "val", "dev": "val"}.get(str(row.get("split")), row.get("split"))
    if split and split not in SPLITS:
        raise DataError(f"{where}: the split {split!r} does not exist; there are {', '.join(SPLITS)}")
    return Task(
        id=str(row["id"]) if row.get("id") not in (None, "") else content_hash(given)[:16],
        task_type=str(row.get("task_type") or "default"),
        inputs=given,
        expected=dict(expected),
        metadata=metadata if isinstance(metadata, Mapping) else {"value": metadata},
        split=str(split) if split else None,
    )


def missing_inputs(where: str, missing: Sequence[str], columns: Iterable[object]) -> DataError:
    """An error that says which columns there are instead of a program's inputs."""
    return DataError(
        f"{where}: the program's input {list(missing)} is missing; the columns are {sorted(map(str, columns))}. "
        "Rename columns: rename={'COLUMN': 'NAME'}",
        flag="--rename COLUMN=NAME",
    )
