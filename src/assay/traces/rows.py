"""Records as rows of a database, and back."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson

from assay.errors import FailureKind
from assay.traces.records import Rollout, ToolCall, Transition, Verdict

__all__ = ["ROLLOUT_JSON", "TRANSITION_JSON", "as_json", "clean", "rollout_of", "row_of", "transition_of"]

ROLLOUT_JSON = {"parameters", "adapters", "inputs", "expected", "metadata", "prediction", "verdicts", "early_tools"}
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # of a text, and not the letters of one that speaks of it
_RECORDS = ("tools", "verdicts", "early_tools")
TRANSITION_JSON = {"adapters", "request", "response", "tools", "shown_tasks", "token_ids", "logprobs", "step_rewards"}

_ROLLOUT_NAMES, _TRANSITION_NAMES = sorted(ROLLOUT_JSON), sorted(TRANSITION_JSON)


def as_json(value: Any) -> str:
    """JSON that both databases take: NaN and infinities become null, NUL and lone surrogates are replaced."""
    try:
        text = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):  # lone surrogates, numbers beyond 64 bits, deep nesting
        text = clean(json.dumps(_finite(value), ensure_ascii=False, default=str))
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def clean(text: str) -> str:
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def row_of(record: Rollout | Transition, encoded: set[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name in encoded:
            if name in _RECORDS and value:
                value = [asdict(part) for part in value]
            row[f"{name}_json"] = None if value is None else "{}" if value == {} else "[]" if value in ([], ()) else as_json(value)
        elif isinstance(value, str):
            row[name] = clean(value)
        elif isinstance(value, float) and not math.isfinite(value):
            row[name] = None
        else:
            row[name] = value
    return row


def _load(row: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: None if (text := row[f"{name}_json"]) is None else orjson.loads(text) for name in names}


def _failure(value: str | None) -> FailureKind | None:
    return None if value is None else FailureKind(value)


def rollout_of(row: Any) -> Rollout:
    plain = {key: value for key, value in row.items() if not key.endswith("_json")}
    loaded = _load(row, _ROLLOUT_NAMES)
    loaded["verdicts"] = [Verdict(**verdict) for verdict in loaded["verdicts"]]
    loaded["early_tools"] = [ToolCall(**tool) for tool in loaded["early_tools"]]
    loaded["adapters"] = tuple(loaded["adapters"])
    plain["failure"] = _failure(plain["failure"])
    return Rollout(**plain, **loaded)


def transition_of(row: Any) -> Transition:
    plain = {key: value for key, value in row.items() if not key.endswith("_json") and key != "rollout_id"}
    loaded = _load(row, _TRANSITION_NAMES)
    loaded["tools"] = [ToolCall(**tool) for tool in loaded["tools"]]
    plain["failure"] = _failure(plain["failure"])
    for name in ("adapters", "shown_tasks", "token_ids", "logprobs"):
        loaded[name] = None if loaded[name] is None else tuple(loaded[name])
    return Transition(**plain, **loaded)
