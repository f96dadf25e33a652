"""Values of trace files: texts that hold JSON, numbers, counts of tokens. Knows no tracer."""

import json
import math
from typing import Any

__all__ = ["as_text", "count_of", "number_of", "parsed", "usage_of"]

_TOKENS = (
    ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "input", "promptTokenCount"),
    ("completion_tokens", "output_tokens", "completionTokens", "outputTokens", "output", "candidatesTokenCount"),
)


def parsed(value: Any) -> Any:
    """A text that is a JSON object or array as what it says; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def as_text(value: Any) -> str:
    """A text as it is, None as the empty text, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number_of(value: Any) -> float | None:
    """A finite number, or None; numbers written as text count, truth values do not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def count_of(value: Any) -> int | None:
    """A number of tokens that a column holds, or None."""
    number = number_of(value)
    return int(number) if number is not None and 0 <= number < 2**31 else None


def usage_of(*told: Any) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the completion, by the names of any API, from the first that tells them: a usage, or what holds one."""
    for one in map(parsed, told):
        inner = one.get("usage") if isinstance(one, dict) else None
        usage = inner if isinstance(inner, dict) else one
        if not isinstance(usage, dict):
            continue
        found = [next((count_of(usage[name]) for name in names if usage.get(name) is not None), None) for names in _TOKENS]
        if found != [None, None]:
            return found[0], found[1]
    return None, None
