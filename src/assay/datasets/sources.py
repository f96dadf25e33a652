"""Rows of datasets: files, and specs such as `hf:`, `reasoning_gym:`, `tools:`."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.datasets.files import FILE_TYPES, file_rows, is_data_file
from assay.datasets.memory import PREFIX, rows_in_memory
from assay.datasets.specs import GENERATORS, Row, generator_of, options_of
from assay.errors import DataError, MissingExtra
from assay.support.names import nearest
from assay.support.places import no_such_file
from assay.support.values import json_value


def iter_rows(spec: str) -> Iterator[Row]:
    """Rows of a dataset, each with its place (`file:line`) for error messages.

    Args:
        spec: path of a file of JSON lines, JSON, CSV or Parquet, see `assay.datasets.files.file_rows`;
            `hf:org/name[:config][:split]`; `reasoning_gym:name?size=&seed=&…`; or a kind of `GENERATORS`, such as
            `arithmetic:terms=2-3&size=&seed=`, whose options its generator lists.
    Raises:
        DataError: unknown kind, missing file, or a row that cannot be read (the message names file and line).
        MissingExtra: the source needs a package that is not installed.
    """
    kind, _, rest = spec.partition(":")
    if spec.startswith(PREFIX):
        return rows_in_memory(spec)
    if kind == "reasoning_gym":
        return _reasoning_gym(rest)
    if kind == "hf":
        return _hub(rest)
    if kind in GENERATORS:
        return generator_of(kind)(rest)
    path = Path(spec)
    if not path.is_dir() and not is_data_file(spec):
        kinds = [f"{name}:" for name in ("hf", "reasoning_gym", *GENERATORS, "curriculum")]
        near = nearest(f"{kind}:", kinds) if ":" in spec else None
        hint = f". Did you mean {near!r}?" if near else ""
        raise DataError(
            f"cannot tell what {spec!r} is: expected a file ending in {FILE_TYPES}, "
            f"or {', '.join(f'{name}…' for name in kinds)}{hint}"
        )
    if not path.exists():
        raise DataError(no_such_file(path))
    return file_rows(path)


def check_data_exists(spec: str) -> None:
    """Refuses a path of a data file that is not there. Does not read the file, nor check other specs.

    Raises:
        DataError: there is no such file.
    """
    if ":" not in spec and is_data_file(spec) and not Path(spec).exists():
        raise DataError(no_such_file(spec))


def _hub(rest: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra("datasets", "hf") from error
    name, *more = rest.split(":")
    if not name or len(more) > 2:
        raise DataError(f"hf:{rest}: expected hf:org/name, hf:org/name:config or hf:org/name:config:split")
    config = more[0] if more else None
    split = more[1] if len(more) > 1 else "train"
    try:
        rows = load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"hf:{rest}:row {number}", dict(row)
    except Exception as error:  # the library raises whatever its file systems and builders raise
        raise DataError(f"cannot load hf:{rest}: {error}") from error


def _reasoning_gym(rest: str) -> Iterator[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning_gym", "tasks") from error
    name, _, query = rest.partition("?")
    if name not in DATASETS:
        raise DataError(f"reasoning_gym has no task family {name!r}; for example: chain_sum, gcd, base_conversion")
    config = DATASETS[name][1]
    fields = inspect.signature(config).parameters
    options: dict[str, Any] = {"size": "500", "seed": "0", **options_of(query, fields, f"reasoning_gym:{name}")}
    for key, value in options.items():
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            raise DataError(
                f"reasoning_gym:{rest}: the option {key} is {value!r}: it must be JSON, such as 3 or [1, 2]"
            ) from None
    try:
        dataset = reasoning_gym.create_dataset(name, **options)
        for number, item in enumerate(dataset, 1):
            metadata = json_value(item["metadata"], placeholders=True)
            row = {
                "inputs": {"question": item["question"]},
                "expected": {"answer": str(item["answer"])},
                "task_type": _family_type(name, metadata),
                "metadata": metadata,
            }
            yield f"reasoning_gym:{name}:{number}", row
    except (AssertionError, TypeError) as error:
        raise DataError(f"reasoning_gym:{rest}: {error}") from error


def _family_type(name: str, metadata: dict[str, Any]) -> str:
    return f"{name}/{metadata['num_terms']} terms" if "num_terms" in metadata else name
