"""Rows from JSONL, CSV, Parquet and specs such as `hf:`, `bfcl:`, `tools:`. Large files are streamed."""

import csv
import inspect
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assay.datasets.bfcl import bfcl_rows
from assay.datasets.conversations import conversation_rows
from assay.datasets.documents import documents_of
from assay.datasets.experiments import experiment_rows
from assay.datasets.games import nim_rows
from assay.datasets.memory import PREFIX, rows_in_memory
from assay.datasets.parquet import parquet_rows
from assay.datasets.specs import Row, number_of, options_of, registered
from assay.datasets.tools import tool_rows
from assay.errors import DataError, MissingExtra
from assay.support.places import no_such_file
from assay.support.values import json_value

__all__ = ["check_data_exists", "iter_rows"]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_MAX_LINE = 16 * 1024 * 1024  # bytes


def iter_rows(spec: str) -> Iterator[Row]:
    """Rows of a dataset, each with its place (`file:line`) for error messages.

    Args:
        spec: `path.jsonl`, `.csv` (separated by comma, semicolon, tab or bar), `.parquet`;
            `hf:org/name[:config][:split]`; `reasoning_gym:name?size=&seed=&…`;
            `arithmetic:terms=2-3&digits=2-3&ops=+-*&size=&seed=`; `mutants:MODULE_OR_FILE?size=&seed=`
            (`assay.api.mutants`); `bfcl:CATEGORY?size=&seed=&path=` (`assay.datasets.bfcl`);
            `tools:STAGE?size=&seed=` (`assay.datasets.tools`); `documents:facts?size=&seed=&passages=&removed=`
            (`assay.datasets.documents`); `nim:size=&seed=&sticks=&most=&skill=` (`assay.datasets.games`);
            `experiment:size=&seed=&trials=&noise=` (`assay.datasets.experiments`);
            `conversations:?facts=9-11&changes=0.5&meeting=&size=&seed=` (`assay.datasets.conversations`).
    Raises:
        DataError: unknown kind, missing file, or a row that cannot be read (the message names file and line).
        MissingExtra: the source needs a package that is not installed.
    """
    kind, _, rest = spec.partition(":")
    if spec.startswith(PREFIX):
        return rows_in_memory(spec)
    if kind == "arithmetic":
        return _arithmetic(rest)
    if kind == "reasoning_gym":
        return _reasoning_gym(rest)
    if kind == "hf":
        return _hub(rest)
    if kind == "tools":
        return _tools(rest)
    if kind == "conversations":
        return _conversations(rest)
    if kind == "bfcl":
        return _bfcl(rest)
    if kind == "documents":
        return documents_of(rest)
    if kind == "nim":
        return nim_rows(rest)
    if kind == "experiment":
        return experiment_rows(rest)
    if (reader := registered(kind)) is not None:
        return reader(rest)
    path = Path(spec)
    by_ending: tuple[Callable[[Path], Iterator[Row]], ...] = (_jsonl, _jsonl, _csv, _csv, parquet_rows)
    readers = dict(zip(_ENDINGS, by_ending, strict=True))
    if path.suffix.lower() not in readers:
        raise DataError(
            f"cannot tell what {spec!r} is: expected a file ending in {', '.join(_ENDINGS)}, "
            "or hf:…, reasoning_gym:…, bfcl:…, arithmetic:…, mutants:…, tools:…, documents:…, nim:…, experiment:…, "
            "conversations:…, curriculum:…"
        )
    if not path.is_file():
        raise DataError(no_such_file(path))
    return readers[path.suffix.lower()](path)


def check_data_exists(spec: str) -> None:
    """Refuses a path of a data file that is not there. Does not read the file, nor check other specs.

    Raises:
        DataError: there is no such file.
    """
    if spec.lower().endswith(_ENDINGS) and ":" not in spec and not Path(spec).is_file():
        raise DataError(no_such_file(spec))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE):
            number += 1
            if len(line) == _MAX_LINE and not line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: the line is longer than {_MAX_LINE // 2**20} MiB")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad = line[error.start]
                raise DataError(f"{path}:{number}: not UTF-8 (byte 0x{bad:02x} at column {error.start + 1})") from None


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
            if _SURROGATE.search(line):  # encoding the row finds an unpaired surrogate; a pair passes
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: unpaired surrogate ({error.object[error.start]!r}), which is not valid text"
            ) from None
        except (json.JSONDecodeError, RecursionError, ValueError) as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range for a number")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_LINE)
    reader = csv.DictReader((line for _, line in _lines(path)), delimiter=_delimiter(path), strict=True)
    try:
        if repeated := sorted(name for name, count in Counter(reader.fieldnames or []).items() if count > 1):
            raise DataError(f"{path}:1: the header has the column {repeated[0]!r} twice; column names must differ")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                raise DataError(f"{where}: more fields than the header's {len(reader.fieldnames or [])}")
            if None in row.values():
                raise DataError(f"{where}: fewer fields than the header's {len(reader.fieldnames or [])}")
            yield where, dict(row)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}") from None


def _delimiter(path: Path) -> str:
    """Column separator of a file, found in its header.

    The separator that the suffix implies is preferred; another one is used if only that splits the header.
    """
    header = next((line for _, line in _lines(path)), "")
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    for delimiter in (usual, *(other for other in ",;\t|" if other != usual)):
        if len(next(csv.reader([header], delimiter=delimiter), [])) > 1:
            return delimiter
    return usual


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


def _bfcl(rest: str) -> Iterator[Row]:
    category, _, query = rest.partition("?")
    options = options_of(query, ("size", "seed", "path"), f"bfcl:{category}")
    size = number_of(options, "size", 0, at_least=1) if "size" in options else None
    return bfcl_rows(category, size=size, seed=number_of(options, "seed", 0), path=options.get("path", ""))


def _tools(rest: str) -> Iterator[Row]:
    stage, _, query = rest.partition("?")
    options = options_of(query, ("size", "seed"), f"tools:{stage}")
    size = number_of(options, "size", 500, at_least=1)
    return tool_rows(stage, size=size, seed=number_of(options, "seed", 0))


def _conversations(rest: str) -> Iterator[Row]:
    options = options_of(rest.removeprefix("?"), ("facts", "changes", "meeting", "size", "seed"), "conversations")
    try:
        changes = float(options.get("changes", "0.5"))
    except ValueError:
        raise DataError(f"conversations: changes={options['changes']!r} must be a probability") from None
    return conversation_rows(
        facts=_span(options, "facts", "9-11", "conversations"),
        changes=changes,
        meeting=options.get("meeting", "only"),
        size=number_of(options, "size", 500, at_least=1),
        seed=number_of(options, "seed", 0),
    )


def _family_type(name: str, metadata: dict[str, Any]) -> str:
    return f"{name}/{metadata['num_terms']} terms" if "num_terms" in metadata else name


def _span(options: dict[str, str], name: str, default: str, spec: str = "arithmetic") -> tuple[int, int]:
    low, _, high = options.get(name, default).partition("-")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1] <= 12:
        raise DataError(f"{spec}: {name}={options[name]!r} must be LOW-HIGH with 1 <= LOW <= HIGH <= 12")
    return span


_WORDINGS = ("What is {}?", "Calculate {}.", "Work out {}.", "How much is {}?")


def _arithmetic(query: str) -> Iterator[Row]:
    """Distinct sums, differences and products; `signs=1` includes negative numbers."""
    options = options_of(query, ("terms", "digits", "ops", "signs", "size", "seed"), "arithmetic")
    terms, digits = _span(options, "terms", "2-3"), _span(options, "digits", "2-3")
    size, rng = number_of(options, "size", 500, at_least=1), random.Random(number_of(options, "seed", 0))
    ops, signs = options.get("ops", "+-"), options.get("signs", "0")
    if signs not in ("0", "1"):
        raise DataError(f"arithmetic: signs={signs!r} must be 0 or 1")
    if not ops or set(ops) - set("+-*"):
        raise DataError(f"arithmetic: ops={ops!r} must be among + - *")
    questions: set[str] = set()
    tries = 0
    while len(questions) < size:
        if (tries := tries + 1) > 100 * size + 1000:
            raise DataError(
                f"arithmetic: there are fewer than {size} distinct tasks with these options; allow more digits or terms"
            )
        numbers = [_operand(rng, digits, signs == "1") for _ in range(rng.randint(*terms))]
        expression = numbers[0]
        used = [rng.choice(ops) for _ in numbers[1:]]
        for op, number in zip(used, numbers[1:], strict=True):
            expression += f" {op} {number}"
        if expression in questions:
            continue
        questions.add(expression)
        kind = {"+": "sum", "-": "difference", "*": "product"}[used[0]] if len(set(used)) == 1 else "mixed"
        yield (
            f"arithmetic:{len(questions)}",
            {
                "inputs": {"question": rng.choice(_WORDINGS).format(expression)},
                # the expression holds only digits and operators generated above
                "expected": {"answer": str(eval(expression, {"__builtins__": {}}))},
                "task_type": kind,
                "metadata": {"expression": expression},
            },
        )


def _operand(rng: random.Random, digits: tuple[int, int], signs: bool) -> str:
    length = rng.randint(*digits)
    number = rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)
    return f"(-{number})" if signs and rng.random() < 0.3 else str(number)
