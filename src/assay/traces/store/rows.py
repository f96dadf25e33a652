"""Conversion between records and database rows. Does not access a database."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from assay.errors import FailureKind
from assay.support.scrubbing import all_secrets, fields, message, without
from assay.support.values import json_value, unicode_text
from assay.traces.records import Rollout, ToolCall, Transition, Verdict

_ROLLOUT_NAMES = ("adapters", "early_tools", "expected", "inputs", "metadata", "parameters", "prediction", "verdicts")
_TRANSITION_NAMES = ("adapters", "logprobs", "request", "response", "shown_tasks", "step_rewards", "token_ids", "tools")
_ROLLOUT_COLUMNS = {name: f"{name}_json" for name in _ROLLOUT_NAMES}
_TRANSITION_COLUMNS = {name: f"{name}_json" for name in _TRANSITION_NAMES}
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # an escaped NUL, not an escaped backslash followed by u0000
_RECORDS = ("tools", "verdicts", "early_tools")
# Columns whose credential fields are removed. The other columns hold fields of the task and its answer.
_WITH_FIELDS = ("request", "response", "metadata", "parameters", "tools", "early_tools")


_as_json = functools.partial(json_value, placeholders=True)


def as_json(value: Any) -> str:
    """JSON that both databases accept: the form of `json_value`, with U+FFFD in place of NUL.

    A value that has no JSON form is written as its type, so that no answer of a program ends the writer thread.
    """
    try:
        text = orjson.dumps(value, default=_as_json, option=_OPTIONS).decode()
    except (TypeError, ValueError):  # lone surrogates, numbers beyond 64 bits, deep nesting
        text = json.dumps(_as_json(value), ensure_ascii=False)
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


def clean(text: str) -> str:
    """The text with U+FFFD in place of NUL and of lone surrogates, which databases do not take."""
    return unicode_text(text.replace("\0", "\ufffd") if "\0" in text else text)


def _written(name: str, value: Any, secrets: Sequence[str]) -> str:
    """A field as the JSON text of its column, without known secrets.

    In the columns of `_WITH_FIELDS` also without values whose field's name marks them as credentials.
    """
    parts = [vars(part) for part in value] if name in _RECORDS else value
    cleaned = fields(parts, texts=name in _RECORDS, mask_known=False) if name in _WITH_FIELDS else parts
    text = as_json(cleaned)
    return without(text, secrets) if secrets else text


def rollout_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a rollout with these fields, without its transitions."""
    row = _row(values, _ROLLOUT_COLUMNS)
    del row["transitions"]
    return row


def transition_row(values: Mapping[str, Any], *, request_json: str | None = None) -> dict[str, Any]:
    """The row of a transition with these fields, without its rollout's id.

    Args:
        request_json: the JSON of its request, without credential fields, if it was made before; None: made here.
    """
    if request_json is None:
        return _row(values, _TRANSITION_COLUMNS)
    return {
        **_row({**values, "request": None}, _TRANSITION_COLUMNS),
        "request_json": without(request_json, all_secrets()),
    }


def _row(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    secrets = all_secrets()
    for name, value in values.items():
        column = columns.get(name)
        if value is None:
            row[column or name] = None
        elif column is not None:
            if value:
                row[column] = _written(name, value, secrets)
            else:  # most are empty: skip the JSON encoder
                row[column] = "{}" if isinstance(value, dict) else "[]"
        elif isinstance(value, str):
            text = message(value) if name == "error" else without(value, secrets) if secrets else value
            row[name] = text if text.isascii() and "\0" not in text else clean(text)
        else:
            row[name] = None if _fits_no_column(value) else value
    return row


def _fits_no_column(value: Any) -> bool:
    """Whether a number is not finite or has more than 64 bits: the database would refuse the whole row."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _load(row: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: None if (text := row[f"{name}_json"]) is None else orjson.loads(text) for name in names}


def _failure(value: str | None) -> FailureKind | None:
    return None if value is None else FailureKind(value)


def rollout_of(row: Any) -> Rollout:
    plain = {key: value for key, value in row.items() if not key.endswith("_json") and key != "answered_at"}
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
