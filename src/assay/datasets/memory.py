"""Datasets given as Python objects: lists of `dspy.Example` or mappings, data frames, tables.

Each is registered under a name derived from its content, `memory:…`. The name is accepted wherever a dataset spec is,
until the process ends.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from assay.datasets.files import check_columns
from assay.datasets.tasks import SPLIT_ALIASES, SPLITS, Task
from assay.errors import DataError
from assay.support.values import is_missing, json_text, json_value

PREFIX = "memory:"
_TASK_ATTRIBUTES = ("id", "task_type", "split", "metadata")
_datasets: dict[str, list[dict[str, Any]]] = {}


def data_spec(data: Any, *, name: str = "data") -> str:
    """Spec of a dataset: a string unchanged, a path as text, Python objects registered under a `memory:` name.

    Args:
        data: a spec, a `Path`, a pandas or polars data frame, a pyarrow table, or an iterable of `dspy.Example` or
            mappings or tasks. The inputs of an example (`with_inputs`) become the inputs of the task. Its other fields
            become the expected outputs, except for `id`, `task_type`, `split` and `metadata`. Or a mapping from splits
            to such data: `{"train": …, "val": …, "gate": …, "test": …}`.
        name: name of the argument, for messages.
    Raises:
        DataError: `data` is empty, of another type, or has a row of another type (the message gives its index).
    """
    if isinstance(data, str):
        return data
    if isinstance(data, Path):
        return str(data)
    rows = _rows_of_splits(data) if names_splits(data) else _rows_of(data, name)
    if not rows:
        raise DataError(f"{name} is empty: pass at least one row, a dspy.Example or a mapping of fields")
    text = json_text(rows, sort_keys=True)
    spec = f"{PREFIX}{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    _datasets[spec] = rows
    return spec


def names_splits(data: Any) -> bool:
    """Whether data is given as a mapping from splits to rows, and not as one row."""
    return isinstance(data, Mapping) and bool(data) and data.keys() <= {*SPLITS, *SPLIT_ALIASES}


def _rows_of(data: Any, name: str) -> list[dict[str, Any]]:
    return [_row(row, f"{name}[{at}]") for at, row in enumerate(_rows(data, name))]


def _rows_of_splits(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for name, part in parts.items():
        if not (members := _rows_of(part, name)):
            raise DataError(f"{name} is empty: give it at least one row, or leave it out")
        rows += [{**row, "split": SPLIT_ALIASES.get(name, name)} for row in members]
    return rows


def with_rest(parts: Mapping[str, Any], rest: Any) -> list[dict[str, Any]]:
    """Rows of named splits, and other rows shared among the splits that are not named.

    Rows of `rest` that a named split has are left out. Which split another row gets depends on the rows alone, not on
    their order; a split that a row names stands.
    """
    named, others = _rows_of_splits(parts), _rows_of(rest, "data")
    known = {_text_of(row) for row in named}
    free = sorted({text: row for row in others if (text := _text_of(row)) not in known}.items(), key=_by_hash)
    # train gets twice as many as another split, as in `assay.datasets.splits.SHARES`
    shares = [split for split in ("train", *SPLITS) if split not in parts]
    return named + [
        {**row, "split": row.get("split") or split}
        for (_, row), split in zip(free, itertools.cycle(shares or SPLITS[-1:]), strict=False)
    ]


def _text_of(row: Mapping[str, Any]) -> str:
    return json_text({key: value for key, value in row.items() if key != "split"}, sort_keys=True)


def _by_hash(entry: tuple[str, Any]) -> str:
    return hashlib.sha256(entry[0].encode("utf-8", "surrogatepass")).hexdigest()


def rows_in_memory(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows registered under a `memory:` name, each with its place for error messages."""
    if spec not in _datasets:
        raise DataError(f"{spec} names rows of another Python process: pass the same rows again, or a file")
    return ((f"data[{at}]", dict(row)) for at, row in enumerate(_datasets[spec]))


def _rows(data: Any, name: str) -> Iterable[Any]:
    if hasattr(data, "to_pylist"):  # pyarrow
        check_columns(data.schema.names, name)
        return _with_integers(data.to_pylist())
    if hasattr(data, "to_dicts"):  # polars
        return _with_integers(data.to_dicts())
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # pandas
        columns = [str(column) for column in data.columns]
        check_columns(columns, name)
        values = (data.iloc[:, at].tolist() for at in range(len(columns)))
        return _with_integers([dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)])
    if isinstance(data, Mapping) and any(split in data for split in SPLITS):
        unknown = [str(key) for key in data if not names_splits({key: ()})]
        raise DataError(f"{name} has the splits {', '.join(unknown)} among others; there are {', '.join(SPLITS)}")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(
            f"{name} is a {type(data).__name__}; pass a spec, a path, a data frame, or a list of dspy.Example or "
            "mappings"
        )
    return data


def _with_integers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns whole numbers back into integers in columns with missing values, for which pandas made them floats."""
    for name in rows[0] if rows else ():
        present = [row[name] for row in rows if not is_missing(row[name])]
        if len(present) < len(rows) and all(isinstance(value, float) and value.is_integer() for value in present):
            for row in rows:
                row[name] = None if is_missing(row[name]) else int(row[name])
    return rows


def _row(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, Task):
        return {name: plain(getattr(row, name)) for name in ("id", "task_type", "inputs", "expected", "metadata")} | (
            {} if row.split is None else {"split": row.split}
        )
    if hasattr(row, "inputs") and hasattr(row, "labels") and hasattr(row, "toDict"):
        return _example_row(row, where)
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}; a row is a dspy.Example or a mapping of fields")
    check_columns([str(key) for key in row], where)
    return {str(key): plain(value) for key, value in row.items()}


def _example_row(example: Any, where: str) -> dict[str, Any]:
    fields = {str(key): plain(value) for key, value in example.items()}
    names = getattr(example, "_input_keys", None)
    if names is None:
        return fields
    if missing := sorted(set(names) - fields.keys()):
        raise DataError(f"{where}: with_inputs names {missing}, but the example has {sorted(fields)}")
    attributes = {key: fields[key] for key in _TASK_ATTRIBUTES if key in fields and key not in names}
    expected = {key: value for key, value in fields.items() if key not in names and key not in attributes}
    return {**attributes, "inputs": {key: fields[key] for key in sorted(names)}, "expected": expected}


def plain(value: Any) -> Any:
    """Convert NumPy, pandas and datetime values to JSON types; missing values become None."""
    if is_missing(value):
        return None
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return json_value(value)  # sorted: the order of a set differs between processes, and a task's key must not
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return plain(value.tolist())
    return value
