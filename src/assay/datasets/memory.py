"""Rows that are at hand in Python: lists of `dspy.Example` or mappings, data frames, tables.

They go by a name made of their content, `memory:…`, wherever a dataset's spec does, for as long as the process lives.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from assay.errors import DataError

__all__ = ["PREFIX", "data_spec", "rows_in_memory"]

PREFIX = "memory:"
_OF_A_TASK = ("id", "task_type", "split", "metadata")
_held: dict[str, list[dict[str, Any]]] = {}


def data_spec(data: Any) -> str:
    """The spec of a dataset: a string as it is, a path as text, rows at hand under a name of their own.

    Args:
        data: a spec, a `Path`, a pandas or polars data frame, a pyarrow table, or an iterable of `dspy.Example` or mappings. An example's
            inputs (`with_inputs`) are the task's inputs, its other fields the expected outputs, but for `id`, `task_type`, `split` and
            `metadata`.
    Raises:
        DataError: it is none of these, or empty; the message names the first row that is not.
    """
    if isinstance(data, str):
        return data
    if isinstance(data, Path):
        return str(data)
    rows = [_row(row, f"data[{at}]") for at, row in enumerate(_rows(data))]
    if not rows:
        raise DataError("data is empty: give at least one row, a dspy.Example or a mapping of fields")
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False, default=str)
    name = f"{PREFIX}{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    _held[name] = rows
    return name


def rows_in_memory(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows behind a name, with their places."""
    if spec not in _held:
        raise DataError(f"{spec} was given as rows in Python by another process: give the same rows again, or a file")
    return ((f"data[{at}]", dict(row)) for at, row in enumerate(_held[spec]))


def _rows(data: Any) -> Iterable[Any]:
    if hasattr(data, "to_pylist"):  # pyarrow
        return list(data.to_pylist())
    if hasattr(data, "to_dicts"):  # polars
        return list(data.to_dicts())
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # pandas
        return list(data.to_dict(orient="records"))
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"data is a {type(data).__name__}; give a spec, a path, a data frame, or a list of dspy.Example or mappings")
    return data


def _row(row: Any, where: str) -> dict[str, Any]:
    if hasattr(row, "inputs") and hasattr(row, "labels") and hasattr(row, "toDict"):
        return _of_example(row, where)
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}; a row is a dspy.Example or a mapping of fields")
    return {str(key): plain(value) for key, value in row.items()}


def _of_example(example: Any, where: str) -> dict[str, Any]:
    fields = {str(key): plain(value) for key, value in example.items()}
    names = getattr(example, "_input_keys", None)
    if names is None:
        return fields
    if missing := sorted(set(names) - fields.keys()):
        raise DataError(f"{where}: with_inputs names {missing}, and the example has {sorted(fields)}")
    told = {key: fields[key] for key in _OF_A_TASK if key in fields and key not in names}
    expected = {key: value for key, value in fields.items() if key not in names and key not in told}
    return {**told, "inputs": {key: fields[key] for key in sorted(names)}, "expected": expected}


def plain(value: Any) -> Any:
    """A value of JSON's types where it stands for one: a number of NumPy, a time, what pandas has for a missing value."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, datetime | date | time):
        return None if value != value else value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return plain(value.tolist())
    return None if type(value).__name__ in ("NAType", "NaTType") else value
