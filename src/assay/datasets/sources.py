"""Rows of datasets: files, and specs such as `hf:`, `bfcl:`, `tools:`."""

import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.datasets.bfcl import bfcl_rows
from assay.datasets.conversations import conversation_rows
from assay.datasets.documents import documents_of
from assay.datasets.experiments import experiment_rows
from assay.datasets.files import FILE_TYPES, file_rows, is_data_file
from assay.datasets.games import nim_rows
from assay.datasets.memory import PREFIX, rows_in_memory
from assay.datasets.specs import Row, number_of, options_of, registered
from assay.datasets.tools import tool_rows
from assay.errors import DataError, MissingExtra
from assay.support.places import no_such_file
from assay.support.values import json_value

__all__ = ["check_data_exists", "iter_rows"]


def iter_rows(spec: str) -> Iterator[Row]:
    """Rows of a dataset, each with its place (`file:line`) for error messages.

    Args:
        spec: path of a file of JSON lines, JSON, CSV or Parquet, see `assay.datasets.files.file_rows`;
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
    if not path.is_dir() and not is_data_file(spec):
        raise DataError(
            f"cannot tell what {spec!r} is: expected a file ending in {FILE_TYPES}, "
            "or hf:…, reasoning_gym:…, bfcl:…, arithmetic:…, mutants:…, tools:…, documents:…, nim:…, experiment:…, "
            "conversations:…, curriculum:…"
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
