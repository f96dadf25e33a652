"""Restores rollouts that assay itself exported, from the attributes with the prefix `assay.`."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from assay.errors import FailureKind
from assay.traces.importers.spans import LMCall, Span, ToolUse, Trace
from assay.traces.otlp import names
from assay.traces.records import Rollout, ToolCall, Transition, Verdict

__all__ = ["is_newer", "own_root", "restored"]

_TUPLES = ("adapters", "shown_tasks", "token_ids", "logprobs")


def own_root(trace: Trace) -> Span | None:
    """The root span of a rollout that assay exported; None for the traces of others."""
    return next((span for span in trace.spans if names.VERSION_KEY in span.own), None)


def is_newer(root: Span) -> bool:
    """Whether a later version of the mapping wrote it."""
    version = root.own[names.VERSION_KEY]
    return not isinstance(version, int) or version > names.VERSION


def restored(rollout: Rollout, trace: Trace, root: Span) -> Rollout:
    """The rollout with the exact fields of the exported one, as far as the export had them; with its own id.

    The run stays that of the import. Without contents in the export, messages and texts are empty.

    Args:
        rollout: what the conventions give.
    Raises:
        ValueError, TypeError, KeyError: an attribute is not as the mapping says.
    """
    exact = names.read(root.own, names.ROLLOUT)
    # a field that is left out was None
    values = {**dict.fromkeys(name for name in names.ROLLOUT if name not in names.CONTENT), **exact}
    for name, default in _defaults(Rollout).items():
        if values.get(name) is None and name in values:
            values[name] = default
    values["verdicts"] = [Verdict(**verdict) for verdict in exact.get("verdicts", ())]
    values["error"] = exact.get("error")
    values["inputs"], values["prediction"] = _object(root.inputs) or {}, _object(root.outputs)
    for name in ("expected", "metadata"):
        values.setdefault(name, {})
    calls = {span.own[names.TURN]: span for span in trace.spans if isinstance(span.does, LMCall) and span.own}
    tools = [span for span in trace.spans if isinstance(span.does, ToolUse)]
    return replace(
        rollout, **{**_typed(values), "id": str(exact["id"])[:64]}, early_tools=_tools(tools, None),
        transitions=[_restored_call(calls[t], _tools(tools, t)) for t in sorted(calls)],
    )  # fmt: skip


def _restored_call(span: Span, tools: list[ToolCall]) -> Transition:
    return Transition(tools=tools, **_typed({"request": {}, **names.read(span.own, names.CALL)}))


def _tools(spans: Sequence[Span], t: int | None) -> list[ToolCall]:
    return [
        ToolCall(
            name=does.name, arguments=_object(does.arguments) or {}, result=does.result, error=span.error,
            isolation=span.own.get(names.ISOLATION),
        )
        for span in spans
        if isinstance(does := span.does, ToolUse) and span.own.get(names.TURN) == t
    ]  # fmt: skip


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values as the records have them."""
    typed = {name: tuple(value) if name in _TUPLES and value is not None else value for name, value in values.items()}
    failure: Any = typed.get("failure")
    return {**typed, "failure": None if failure is None else FailureKind(failure)}


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Defaults that are not None, of fields whose value was left out."""
    return {item.name: item.default for item in fields(kind) if isinstance(item.default, str | int | float | tuple)}


def _object(value: Any) -> dict[str, Any] | None:
    parsed = json.loads(value) if isinstance(value, str) else value
    if parsed is not None and not isinstance(parsed, dict):
        raise TypeError(f"{parsed!r:.100} is not an object")
    return parsed
