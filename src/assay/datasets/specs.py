"""Parts of dataset specs: their options, and the generators of the shipped programs."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from assay.errors import DataError
from assay.support.names import nearest

Row = tuple[str, dict[str, Any]]  # (place for error messages, fields)
GENERATORS = {
    "arithmetic": "math_qa.tasks",
    "bfcl": "tool_user.bfcl",
    "conversations": "converse.tasks",
    "documents": "answer_from_documents.tasks",
    "experiment": "experiment.tasks",
    "mutants": "code_repair.tasks",
    "nim": "nim.tasks",
    "tools": "tool_user.tasks",
}
"""Kind of a spec -> module of a shipped program whose function `rows` takes the rest of the spec."""


def generator_of(kind: str) -> Callable[[str], Iterator[Row]]:
    """The function that generates the rows of a kind in `GENERATORS`."""
    generator: Callable[[str], Iterator[Row]] = import_module(f"assay.shipped.programs.{GENERATORS[kind]}").rows
    return generator


def options_of(text: str, allowed: Iterable[str], spec: str) -> dict[str, str]:
    """Options of a spec, `NAME=VALUE&NAME=VALUE`.

    Raises:
        DataError: another form, or an unknown name.
    """
    try:
        options = dict(parse_qsl(text.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(text)))
    except ValueError:
        raise DataError(f"{spec}: {text!r} is not NAME=VALUE&NAME=VALUE") from None
    if unknown := sorted(options.keys() - (allowed := set(allowed))):
        close = nearest(unknown[0], allowed)
        hint = f" Did you mean {close!r}?" if close else ""
        raise DataError(f"{spec}: unknown option {unknown[0]!r}.{hint} The options are {', '.join(sorted(allowed))}")
    return options


def number_of(options: dict[str, str], name: str, default: int, *, at_least: int = 0) -> int:
    """An option that is an integer.

    Raises:
        DataError: no integer, or too small.
    """
    try:
        value = int(options.get(name, default))
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise DataError(f"the data's option {name} is {options[name]!r}: it must be an integer >= {at_least}")
    return value


def share_of(options: dict[str, str], name: str, default: float, *, most: float = 1.0) -> float:
    """An option that is a number from 0 to `most`.

    Raises:
        DataError: no number, or out of range.
    """
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise DataError(f"the data's option {name} is {options[name]!r}: it must be a number from 0 to {most:g}")
    return value


def span_of(options: dict[str, str], name: str, default: str, spec: str) -> tuple[int, int]:
    """An option that is a range of integers from 1 to 12, `LOW-HIGH` or one number.

    Raises:
        DataError: another form, or out of range.
    """
    low, _, high = options.get(name, default).partition("-")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1] <= 12:
        raise DataError(f"{spec}: {name}={options[name]!r} must be LOW-HIGH with 1 <= LOW <= HIGH <= 12")
    return span
