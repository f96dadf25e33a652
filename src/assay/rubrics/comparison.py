"""Whether an answer equals an expected value. Every check that compares them does it here."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from datetime import datetime, time
from decimal import Decimal
from typing import Any

from assay.rubrics.criteria import Criterion
from assay.support.sections import structure_in
from assay.support.values import json_value, value_text

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)
_MOMENT = re.compile(r"\d{4}(-?)\d\d\1\d\d[Tt ]\d\d:?\d\d.{0,24}", re.ASCII)
_TIME = re.compile(r"\d\d:\d\d.{0,24}", re.ASCII)


def same(found: Any, expected: Any, *, case: bool = False) -> bool:
    """Whether two values are equal as JSON values (`assay.support.values.json_value`), whatever types they had.

    - Numbers are equal by their value: 3, 3.0 and `Decimal("3")`, and a text that is one number: "3". True and false
      are not numbers; they equal the texts "true" and "false".
    - Texts are equal if they differ in runs of white space or, without `case`, in case only. A date equals its ISO
      text, an enum member its value. Times, with or without a date, are equal if they are the same moment, in any ISO
      form: `2024-02-29T12:30:00Z` and `2024-02-29 13:30+01:00`, `12:30Z` and `13:30:00+01:00`.
    - Objects are equal if each of their fields is, in any order; a field that is null equals a missing one. Lists are
      equal item by item; both also equal a text with their JSON, or with the elements of DSPy's XML format.
    """
    return _same(json_value(found, placeholders=True), json_value(expected, placeholders=True), case)


def equality_of(criteria: Iterable[Criterion]) -> Callable[[Any, Any], bool]:
    """`same` as the checks use it that compare expected values: those with an argument `case`. Without such a check,
    or if one of them is case-sensitive, texts that differ in case only are different."""
    cases = {
        bool(criterion.arguments.get("case", False))
        for criterion in criteria
        if criterion.check is not None and "case" in inspect.signature(criterion.check).parameters
    }
    return functools.partial(same, case=cases != {False})


def _same(a: Any, b: Any, case: bool) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same(a.get(name), b.get(name), case) for name in a.keys() | b.keys())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b, [case] * len(a)))
    if isinstance(a, dict | list) or isinstance(b, dict | list):
        structure, other = (a, b) if isinstance(a, dict | list) else (b, a)
        read = structure_in(other) if isinstance(other, str) else None
        return type(read) is type(structure) and _same(read, structure, case)
    if a is None or b is None:
        return a is b
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) in (bool, str) and type(b) in (bool, str) and _norm(a, False) == _norm(b, False)
    if isinstance(a, str) and isinstance(b, str):
        return _norm(a, case) == _norm(b, case) or ((moment := _moment(a)) is not None and moment == _moment(b))
    numbers = _number(a), _number(b)
    return None not in numbers and numbers[0] == numbers[1]


def _norm(value: Any, case: bool) -> str:
    """A scalar for comparison: `True` of Python and `true` of JSON are one text where one side is a boolean."""
    text = " ".join(value_text(value).split())
    return text if case else text.casefold()


def _number(value: int | float | str) -> Any:
    """The number that a value is; None if it is a text of anything else."""
    if not isinstance(value, str):
        return Decimal(repr(value)) if isinstance(value, float) else value
    return Decimal(text) if _NUMBER.fullmatch(text := value.strip()) else None


def _moment(text: str) -> datetime | time | None:
    """The time, with or without a date, that a text is in ISO 8601; None for any other text."""
    text = text.strip()
    try:
        if _MOMENT.fullmatch(text):
            return datetime.fromisoformat(text)
        return time.fromisoformat(text) if _TIME.fullmatch(text) else None
    except ValueError:
        return None
