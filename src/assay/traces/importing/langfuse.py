"""Langfuse's exports: the API's pages and traces, the UI's downloads and tables, the blob storage's rows; camelCase or snake_case.

Observations, scores and traces may stand in one file in any order, as the files of a blob export put one after the other.
Source: langfuse.com/docs/api-and-data-platform (Observations API v2, Export Field Reference, Export from UI).
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from assay.traces.importing.chat import answers_of, body_of
from assay.traces.importing.files import Part, Row, Skipped, Sorted
from assay.traces.importing.spans import LMCall, Mark, Span, ToolUse, Trace
from assay.traces.importing.tools import tools_of
from assay.traces.importing.values import as_text, count_of, number_of, parsed, usage_of

__all__ = ["take", "trace_of"]

_HELD = ("data", "observations", "traces", "scores")  # rows inside of a row
_NUMBERS = ("NUMERIC", "BOOLEAN", "")  # types of scores whose `value` is a grade; a category's is its index


def _get(told: Any, *names: str) -> Any:
    """The first of some fields that is there, in JavaScript's spelling or the database's."""
    for name in names if isinstance(told, dict) else ():
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        if (value := told.get(name, told.get(snake))) is not None:
            return value
    return None


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Puts observations, scores and traces where their trace is."""
    yield from _take(row.where, row.value, into, "")


def _take(where: str, told: Any, into: Sorted, inside: str) -> Iterator[Skipped]:
    """`inside`: the trace that the row stands in, where it does not name one itself."""
    if not isinstance(told, dict):
        yield Skipped(where=where, reason=f"expected an object, found {type(told).__name__}")
        return
    kind, trace = _kind_of(told), as_text(_get(told, "traceId")) or inside
    if kind == "trace":
        trace = as_text(told.get("id")) or trace
    held = [(name, told[name]) for name in _HELD if isinstance(told.get(name), list)]
    if isinstance(told.get("trace"), dict):  # the UI's older download: a trace beside its observations
        trace = as_text(told["trace"].get("id"))
        held.append(("trace", [told["trace"]]))
    for name, rows in held:
        for item in rows:
            if not (name == "scores" and isinstance(item, str)):  # a list of traces names its scores by their ids
                yield from _take(where, item, into, trace if kind == "trace" or name != "data" else inside)
    if not kind:
        if not held:
            yield Skipped(where=where, reason=f"neither observation, score nor trace: its fields are {', '.join(map(repr, list(told)[:5]))}")
    elif not trace:
        yield Skipped(where=where, reason=f"the {kind} {as_text(told.get('id'))!r:.100} belongs to no trace")
    else:
        kept = {key: value for key, value in told.items() if key not in _HELD and key != "trace"}
        if found := into.add(trace, kind, as_text(told.get("id")), where, kept):
            yield found


def _kind_of(told: Mapping[str, Any]) -> str:
    if _get(told, "startTime") is not None and told.get("type"):
        return "observation"
    if _get(told, "dataType") is not None or ("source" in told and "name" in told and ("value" in told or _get(told, "stringValue") is not None)):
        return "score"
    return "trace" if "id" in told and ("timestamp" in told or "observations" in told) else ""


def trace_of(trace_id: str, parts: Iterable[Part]) -> Trace:
    """A trace from its rows."""
    found = Trace(id=trace_id, where="")
    scores: list[Part] = []
    told: list[Mapping[str, Any]] = []
    for part in parts:
        found.where = found.where or part.where
        if part.kind == "score":
            scores.append(part)
        elif part.kind == "observation":
            found.spans.append(_span(part, len(found.spans)))
            told.append(part.value)
        else:
            told.insert(0, part.value)
            found.inputs, found.outputs = part.value.get("input"), part.value.get("output")
            found.program = as_text(part.value.get("name"))
    tops = {span.id for span in found.spans if not span.parent}
    for part in scores:
        _mark(found, part, tops)
    found.program = found.program or _said(told, "traceName")
    found.version = _said(told, "release") or _said(told, "version")
    found.user, found.session = _said(told, "userId") or None, _said(told, "sessionId") or None
    metadata = [parsed(one.get("metadata")) for one in told]
    found.tenant = next((name for one in metadata if (name := as_text(_get(one, "tenant", "tenantId")))), None)
    return found


def _said(told: Iterable[Mapping[str, Any]], name: str) -> str:
    return next((text for one in told if (text := as_text(_get(one, name)))), "")


def _seconds(value: Any) -> float | None:
    """ISO 8601, UTC where it names no zone, or a unix time in seconds or milliseconds."""
    number = number_of(value)
    if number is not None:
        number = number / 1000 if number > 1e11 else number
        return number if 0 < number < 1e11 else None
    try:
        found = datetime.fromisoformat(as_text(value))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _span(part: Part, number: int) -> Span:
    told = part.value
    inputs, outputs, kind = told.get("input"), told.get("output"), as_text(told.get("type")).upper()
    error = as_text(_get(told, "statusMessage")) or "error" if as_text(told.get("level")).upper() == "ERROR" else None
    does: LMCall | ToolUse | None = None
    if kind == "GENERATION":
        does = _call(told)
    elif kind == "TOOL":
        does = ToolUse(name=as_text(told.get("name")), arguments=inputs, result=None if outputs == "" else outputs)
    return Span(
        id=as_text(told.get("id")) or f"#{number}", parent=as_text(_get(told, "parentObservationId")), name=as_text(told.get("name")),
        where=part.where, start=_seconds(_get(told, "startTime")), end=_seconds(_get(told, "endTime")), error=error, does=does, inputs=inputs,
        outputs=outputs,
    )  # fmt: skip


def _call(told: Mapping[str, Any]) -> LMCall:
    outputs, parameters = told.get("output"), parsed(_get(told, "modelParameters"))
    body = {**body_of(told.get("input")), **_settings(parameters)}
    if tools := body.get("tools") or tools_of(_get(told, "toolDefinitions")):
        body["tools"] = tools
    model = as_text(_get(told, "providedModelName", "model"))
    choices = answers_of(outputs)
    if (calls := _get(told, "toolCalls")) and not choices:  # the calls stand in a column of their own
        choices = answers_of([{"role": "assistant", "tool_calls": [parsed(call) for call in calls]}] if isinstance(calls, list) else None)
    prompt, completion = _usage(told, parsed(outputs))
    return LMCall(
        body={**body, **({"model": model} if model else {})},
        choices=choices,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost_usd=_cost(told),
    )


def _settings(parameters: Any) -> dict[str, Any]:
    found = body_of({**parameters, "messages": []}) if isinstance(parameters, dict) else {}
    return {key: value for key, value in found.items() if key != "messages"}


def _usage(told: Mapping[str, Any], outputs: Any) -> tuple[int | None, int | None]:
    """Langfuse's own sums, else its details: what begins with `input` or `output` belongs together, cached tokens included."""
    details = parsed(_get(told, "usageDetails", "usage"))
    if not isinstance(details, dict):
        details = {}
    parts = {side: [count_of(value) for key, value in details.items() if key.startswith(side)] for side in ("input", "output")}
    summed = {side: sum(known) if (known := [n for n in found if n is not None]) else None for side, found in parts.items()}
    other = usage_of(details, {"prompt_tokens": _get(told, "promptTokens"), "completion_tokens": _get(told, "completionTokens")}, outputs)
    own = (count_of(_get(told, "inputUsage")), count_of(_get(told, "outputUsage")))
    found = [next((n for n in three if n is not None), None) for three in zip(own, (summed["input"], summed["output"]), other, strict=True)]
    return found[0], found[1]


def _cost(told: Mapping[str, Any]) -> float | None:
    """Dollars; a total of nought without details is what Langfuse writes of a model whose price it does not know."""
    details = parsed(_get(told, "costDetails"))
    details = details if isinstance(details, dict) else {}
    total = number_of(details.get("total"))
    if total is None:
        total = number_of(_get(told, "totalCost", "calculatedTotalCost"))
        total = None if total == 0 and not details else total
    return total if total is not None and total >= 0 else None


def _mark(trace: Trace, part: Part, tops: set[str]) -> None:
    told = part.value
    kind, label = as_text(_get(told, "dataType")).upper(), _get(told, "stringValue")
    if kind == "CORRECTION":
        trace.expected["output"] = parsed(label)
        return
    value = told.get("value")
    if kind not in _NUMBERS:
        value = as_text(label if label is not None else value)
    elif kind == "BOOLEAN" and value in (0, 1):
        value = bool(value)
    observation = as_text(_get(told, "observationId"))
    trace.marks.append(
        Mark(
            name=as_text(told.get("name")), value=value, human=as_text(told.get("source")).upper() == "ANNOTATION", where=part.where,
            step=bool(observation) and observation not in tops, reason=as_text(told.get("comment")),
            label=None if label is None else as_text(label),
        )
    )  # fmt: skip
