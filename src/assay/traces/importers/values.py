"""Parses values of trace files: JSON text, numbers and token counts. Independent of the tracers.

A value whose shape no reader knows is an `UnknownShape`. It is never converted to text.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from assay.support.values import value_text

__all__ = [
    "Reading",
    "UnknownShape",
    "as_text",
    "count_of",
    "decoded",
    "exception_of",
    "number_of",
    "parsed",
    "seconds_of",
    "usage_of",
]

_USAGES = ("usage", "usage_metadata", "usageMetadata")


class UnknownShape(ValueError):
    """A value is not in a format that the importers read."""


class Reading:
    """Reads the values of a span, and collects the names of those that are not understood."""

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def read(self, name: str, reader: Callable[[Any], Any], value: Any, otherwise: Any) -> Any:
        """The value as `reader` gives it; `otherwise` if its shape is unknown."""
        try:
            return reader(value)
        except UnknownShape:
            self.unknown.append(name)
            return otherwise


_TOKENS = (
    ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "input", "promptTokenCount", "prompt_token_count"),
    (
        *("completion_tokens", "output_tokens", "completionTokens", "outputTokens", "output"),
        *("candidatesTokenCount", "candidates_token_count"),
    ),
)


def parsed(value: Any) -> Any:
    """Parse text that is a JSON object or array; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def decoded(value: Any) -> Any:
    """Decode a text whose tracer writes all values as JSON, also strings; return anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def as_text(value: Any) -> str:
    """Text unchanged, None as an empty string, other values as JSON."""
    if value is None:
        return ""
    return value_text(value)


def number_of(value: Any) -> float | None:
    """A finite number, also from text; None for other values and booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def count_of(value: Any) -> int | None:
    """A token count, or None."""
    number = number_of(value)
    return int(number) if number is not None and 0 <= number < 2**31 else None


def seconds_of(value: Any) -> float | None:
    """Unix seconds of a time in nanoseconds, or None."""
    number = number_of(value)
    return number / 1e9 if number is not None and 0 < number < 1e20 else None


def exception_of(events: Iterable[Mapping[str, Any]]) -> str:
    """Type and message of the first exception in the attributes of a span's events; empty without one."""
    names = ("exception.type", "exception.message")
    raised = next((event for event in events if any(event.get(name) for name in names)), {})
    return ": ".join(as_text(raised[name]) for name in names if raised.get(name))


def usage_of(*values: Any) -> tuple[int | None, int | None]:
    """Prompt and completion tokens from the first value that has them, under the names of any API.

    Args:
        values: Usage objects, or objects that contain one.
    """
    for value in map(parsed, values):
        inner = [value.get(name) for name in _USAGES] if isinstance(value, dict) else []
        usage = next((usage for usage in inner if isinstance(usage, dict)), value)
        if not isinstance(usage, dict):
            continue
        counts = [
            next((count_of(usage[name]) for name in names if usage.get(name) is not None), None) for names in _TOKENS
        ]
        if counts != [None, None]:
            return counts[0], counts[1]
    return None, None
