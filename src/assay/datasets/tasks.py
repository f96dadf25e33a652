"""One task: the inputs of a program, the expected outputs, and metadata that a rubric may read."""

import copy
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from assay.datasets.fields import Fields
from assay.datasets.keys import task_key
from assay.errors import DataError, NoJsonForm
from assay.support.names import nearest
from assay.support.values import is_missing, json_value

__all__ = [
    "NULL",
    "OTHER_COLUMNS",
    "OWNERS",
    "SPLITS",
    "SPLIT_ALIASES",
    "UNKNOWN",
    "USUAL_OUTPUTS",
    "EmptyInputs",
    "Task",
    "TaskIndex",
    "consent_text",
    "known_outputs",
    "make_task",
    "missing_inputs",
    "own_containers",
    "owners_of",
    "task_key",
    "written_outputs",
]

OWNERS = ("tenant", "data_subject", "consent")  # columns that identify the owner of the data; stored in the metadata
_STRUCTURE = {"id", "task_type", "split", "inputs", "expected", "metadata", *OWNERS}
SPLITS = ("train", "val", "gate", "test")
SPLIT_ALIASES = {"validation": "val", "dev": "val"}
_ID = 200  # characters of an id, at most
USUAL_OUTPUTS = {"answer", "label", "output", "expected", "target", "category", "gold"}


NULL: Mapping[str, bool] = {"$null": True}  # in a row: an expected output that must be null
UNKNOWN = "unknown_output"  # in the metadata of a task whose answer, label, … is not known, but another column is
OTHER_COLUMNS = "other_columns"  # in the metadata of a task: columns in `expected` that are not outputs of the program
_NULL_TEXT = '{"$null":true}'


class EmptyInputs(DataError):
    """Every input of a row is empty. `where` is the place of the row."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: every input is empty. Fill in an input, or remove the row")
        self.where = where


@dataclass(frozen=True, kw_only=True)
class Task:
    """One example: inputs for a program, and the expected outputs that a rubric compares its prediction with.

    An input that is not known is None. An expected output that is not known is absent; one that is None must be null.
    The default id is the key of the inputs.
    """

    id: str = ""
    task_type: str = "default"
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None  # named by the file, or assigned by the key of the inputs once the data is split
    where: str = field(default="", compare=False, repr=False)  # its row, for messages
    # key of the row's inputs before they were converted to the types that a program declares
    row_key: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", self.key)

    def __getitem__(self, name: object) -> NoReturn:
        """Raise `TypeError` with the attribute to use, for code that treats a task as a mapping."""
        part = next((part for part in ("expected", "inputs", "metadata") if name in getattr(self, part)), "expected")
        raise TypeError(
            "a task cannot be indexed; its values are in task.inputs, task.expected and task.metadata: "
            f"task.{part}[{name!r}]"
        )

    @cached_property
    def key(self) -> str:
        """Key of the inputs, computed once. Tasks with one key are the same task, whatever their ids."""
        return task_key(self.inputs)


class TaskIndex:
    """Tasks, found by the inputs that a program was given. Rows of one task are distinguished by their other values."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, Task]] = {}

    def add(self, task: Task) -> None:
        self._by_key.setdefault(task.key, {})[task.id] = task

    def find(self, inputs: Mapping[str, Any], expected: Mapping[str, Any] | None = None) -> Task | None:
        """The task of these inputs; of several, the first with equal expected outputs, then with equal inputs."""
        tasks = list(self._by_key.get(task_key(inputs), {}).values())
        if len(tasks) < 2:
            return tasks[0] if tasks else None
        return max(tasks, key=lambda task: (dict(task.expected) == expected, dict(task.inputs) == inputs))

    def clear(self) -> None:
        self._by_key.clear()


def own_containers(value: Any) -> Any:
    """The value with lists, dictionaries, models and data classes of its own, at any depth; other objects are shared.

    A program gets its inputs so: one that appends to a list among them would change the task for all later runs.
    """
    if type(value) is dict:
        return {key: own_containers(item) for key, item in value.items()}
    if hasattr(type(value), "model_fields") or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return copy.deepcopy(value)
    return [own_containers(item) for item in value] if type(value) is list else value


def consent_text(value: Any) -> str:
    """Consent in the form that is stored: `yes` or `no` for a boolean, else text.

    `assay.traces.export.selection.consents` decides which texts count as consent.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def owners_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Owner of the data: those of `tenant`, `data_subject` and `consent` that a row or metadata has."""
    owners = {name: fields[name] for name in OWNERS if fields.get(name) is not None}
    return {name: consent_text(value) if name == "consent" else str(value) for name, value in owners.items()}


def known_outputs(expected: Mapping[str, Any]) -> dict[str, Any]:
    """The expected outputs of a row that are known, None for one that must be null.

    A missing value means that the output is not known: a criterion on it is unscored. An output that must be null is
    written as `NULL`, `{"$null": true}`; in a CSV file as this text.
    """
    return {name: None if _is_null(value) else value for name, value in expected.items() if not is_missing(value)}


def _is_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value == NULL
    return isinstance(value, str) and "".join(value.split()) == _NULL_TEXT


def written_outputs(expected: Mapping[str, Any]) -> dict[str, Any]:
    """Expected outputs as a row of a data file has them: the inverse of `known_outputs`."""
    return {name: dict(NULL) if value is None else value for name, value in expected.items()}


def make_task(
    row: Mapping[str, Any],
    *,
    where: str = "row",
    inputs: Fields | Collection[str] | None = None,
    outputs: Collection[str] = (),
    folder: Path | None = None,
) -> Task:
    """Task from one row, structured (`inputs`, `expected`) or flat.

    Args:
        row: a structured row has an object `inputs`. In a flat row every other column is an input or an expected
            output: the columns that `inputs` names are inputs; without `inputs`, columns with a usual output name
            (`answer`, `label`, …) and those that `outputs` names are expected outputs. In both forms `tenant`,
            `data_subject` and `consent` go into the metadata. A missing value (`assay.support.values`) is None as an
            input, and no expected output, see `known_outputs`. A column that is an input of the
            program is nothing else, whatever its name, except for `id` and the columns of the owner.
        where: `file:line`, for error messages.
        inputs: the program's inputs, if known: their names, or its `Fields`, by whose types values are converted.
        outputs: output fields that are known, for a row whose inputs are not.
        folder: of local files that the row may name; None: it may name none. See `Fields.converted`.
    Raises:
        DataError: not a mapping; an input that the program needs is missing, is not of its type or has no JSON form;
            every input is empty (`EmptyInputs`); a number is not finite; the id is too long; or the split does not
            exist.
    """
    fields = inputs if isinstance(inputs, Fields) or inputs is None else Fields.named(inputs)
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with the task's fields, found {type(row).__name__}")
    row = {name: None if is_missing(value) else value for name, value in row.items()}
    structured = isinstance(row.get("inputs"), Mapping)
    if structured:
        values: dict[str, Any] = {name: None if is_missing(value) else value for name, value in row["inputs"].items()}
        expected = row.get("expected", {})
        if not isinstance(expected, Mapping) or _is_null(expected):
            expected = {"answer": expected}
        columns = [*values, *expected]
        more = {k: v for k, v in row.items() if k not in _STRUCTURE}
    else:
        values, expected = _of_flat(row, fields, outputs)
        columns = list(row)
        row = {name: value for name, value in row.items() if name not in values or name in ("id", *OWNERS)}
        more = {}
    metadata = row.get("metadata") or {}
    metadata = {
        **more,
        **{name: row[name] for name in OWNERS if row.get(name) is not None},
        **(metadata if isinstance(metadata, Mapping) else {"value": metadata}),
    }
    known = USUAL_OUTPUTS | set(() if fields is None else fields.outputs)
    answers, expected = expected.keys() & known, known_outputs(expected)
    if expected and answers and not expected.keys() & answers:
        metadata[UNKNOWN] = min(answers)
    if not structured and fields is not None and fields.outputs and (other := sorted(expected.keys() - known)):
        metadata[OTHER_COLUMNS] = other
    if fields is not None and (missing := fields.missing(values)):
        raise missing_inputs(where, missing, columns)
    if not (row_key := task_key(values)):
        if not isinstance(wrong := row.get("inputs"), Mapping) and wrong not in (None, ""):
            raise DataError(f"{where}: inputs={str(wrong)[:80]!r} must be an object with the task's inputs")
        raise EmptyInputs(where)
    if fields is not None:
        values, expected = fields.converted(values, where=where, folder=folder), fields.expected(expected, folder)
    try:
        json_value(values)
    except NoJsonForm as error:
        raise DataError(f"{where}: among the inputs, {error}. Inputs are stored, so they must have one") from None
    for name, value in {**values, **expected}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{where}: {name}={value!r} is not a finite number")
    if len(str(row.get("id") or "")) > _ID:
        raise DataError(f"{where}: the id has {len(str(row['id']))} characters; the limit is {_ID}")
    split = "" if row.get("split") is None else str(row["split"]).strip().casefold()
    split = SPLIT_ALIASES.get(split, split)
    if split and split not in SPLITS:
        raise DataError(f"{where}: the split {row['split']!r} does not exist; the splits are {', '.join(SPLITS)}")
    return Task(
        id="" if row.get("id") is None else str(row["id"]),
        task_type=str(row.get("task_type") or "default"),
        inputs=values,
        expected=expected,
        metadata=metadata,
        split=split or None,
        where=where,
        row_key=row_key,
    )


def _of_flat(
    row: Mapping[str, Any], fields: Fields | None, outputs: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and expected outputs of a flat row."""
    own = set() if fields is None else fields.inputs.keys()
    structure = _STRUCTURE - {"expected"} - own - ({"inputs"} if fields is not None else set())
    flat = {key: value for key, value in row.items() if key not in structure}
    names = own if fields is not None else flat.keys() - USUAL_OUTPUTS - set(outputs)
    return {k: v for k, v in flat.items() if k in names}, {k: v for k, v in flat.items() if k not in names}


def missing_inputs(where: str, missing: Sequence[str], columns: Iterable[object]) -> DataError:
    """Error for a row that lacks inputs of the program; lists the columns of the row."""
    inputs = f"input{'' if len(missing) == 1 else 's'} {', '.join(missing)}"
    return DataError(
        f"{where}: no column for the program's {inputs}; the columns are {', '.join(sorted(map(str, columns)))}. "
        "Rename columns: `rename={'COLUMN': 'NAME'}`"
    )


def other_inputs(program: str, takes: Sequence[str], given: Iterable[str]) -> str:
    """Message about inputs that are not those of a program."""
    named = sorted(given)
    near = next((near for name in named if name not in takes and (near := nearest(name, takes))), None)
    noun = "input" if len(takes) == 1 else "inputs"
    hint = f". Did you mean {near!r}?" if near else ""
    return f"{program} takes the {noun} {', '.join(takes)}, not {', '.join(named) or 'none'}{hint}"
