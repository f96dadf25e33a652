"""Converts a trace to a rollout: LM calls to transitions, tools to tool calls of the requesting call, scores to
verdicts.

Independent of the tracers' formats: the readers produce the traces of `assay.traces.importers.otlp`.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from assay.datasets.tasks import known_outputs, task_key
from assay.errors import FailureKind
from assay.support.values import is_missing
from assay.traces.importers.chat import as_arguments, as_inputs, result_text, text_of, unwrapped
from assay.traces.importers.files import Skipped
from assay.traces.importers.otlp import LMCall, Reading, Span, ToolUse, Trace, as_text, parsed
from assay.traces.messages.dialects import answer_of
from assay.traces.messages.final_answer import final_answer, prediction_of
from assay.traces.messages.parts import is_tool_error, linked_choices
from assay.traces.otlp import spans as names
from assay.traces.records import Rollout, ToolCall, Transition, Verdict

# -- Restores rollouts that assay itself exported, from the attributes with the prefix `assay.`.


_TUPLES = ("adapters", "shown_tasks", "token_ids", "logprobs")


def own_root(trace: Trace) -> Span | None:
    """The root span of a rollout that assay exported; None for the traces of others."""
    return next((span for span in trace.spans if names.VERSION_KEY in span.own), None)


def restored(rollout: Rollout, trace: Trace, root: Span) -> Rollout:
    """The rollout with the exact fields of the exported one, as far as the export had them; with its own id.

    The run stays that of the import. Without contents in the export, messages and texts are empty.

    Args:
        rollout: what the conventions give.
    Raises:
        ValueError, TypeError, KeyError: an attribute is not as the mapping says.
    """
    exact, defaults = names.read(root.own, names.ROLLOUT), _defaults(Rollout)
    # a field that is left out was None
    values = {name: exact.get(name) for name in names.ROLLOUT if name not in names.CONTENT or name in exact}
    values |= {name: defaults[name] for name, value in values.items() if value is None and name in defaults}
    values |= {name: exact.get(name, {}) for name in ("expected", "metadata")}
    values["verdicts"] = [Verdict(**verdict) for verdict in exact.get("verdicts", ())]
    values |= {"error": exact.get("error"), "inputs": _object(root.inputs) or {}, "prediction": _object(root.outputs)}
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


# -- Rollouts.


Imported = Rollout | Skipped
_TEXT = 20_000  # maximum characters of a tool result, as in the recorder
_ANSWER_FIELDS = ("content", "tool_calls", "refusal")
_YES_NO = {"yes": 1.0, "no": 0.0}


def rollout_id(kind: str, trace_id: str) -> str:
    """Rollout id of a trace: 32 hex digits, the same for every import."""
    return hashlib.sha256(f"{kind}\n{trace_id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def to_rollout(kind: str, run_id: str, trace: Trace, *, score: str | None = None) -> Iterator[Imported]:
    """Convert a trace to a rollout.

    Args:
        score: Name of the score to use if the trace has several.
    Returns:
        The rollout, and a `Skipped` for each part that is not imported.
    """
    if (exported := own_root(trace)) is not None:
        yield _own(run_id, trace, exported)
        return
    calls, wrapped = _calls(trace)
    if not calls:
        yield Skipped(where=trace.where, reason=f"no LM call among its {len(trace.spans)} spans", trace=trace.id)
        return
    yield from wrapped
    _inherit(trace.spans)
    root = _root(trace.spans)
    inputs, prediction = _ends(trace, root, calls[0][1])
    gaps = _gaps(trace, root, calls)
    yield from gaps
    transitions = [_transition(t, span, call) for t, (span, call) in enumerate(calls)]
    new_id = rollout_id(kind, trace.id)
    starts = [span.start for span in trace.spans if span.start is not None]
    ends = [span.end for span in trace.spans if span.end is not None]
    error = trace.error if trace.error is not None else root.error
    status = trace.status or ("done" if root.error is None else "failed")
    rollout = Rollout(
        id=new_id,
        run_id=run_id,
        task_id=task_key(inputs) or new_id,
        source=kind,
        program=trace.program or root.name,
        program_version=trace.version[:64],
        model=transitions[0].model,
        status=status,
        failure=_failure(status, transitions),
        error=error,
        inputs=inputs,
        prediction=prediction,
        expected=known_outputs(trace.expected),
        metadata={"trace_id": trace.id, **({"session_id": trace.session} if trace.session else {})},
        tenant=trace.tenant,
        data_subject=trace.user,
        transitions=transitions,
        started_at=min(starts, default=0.0),
        ended_at=max([*ends, *starts], default=None),
    )
    _place_tools(rollout, trace.spans, [span for span, _ in calls])
    if rollout.prediction is None and rollout.status == "done" and not gaps:
        rollout.prediction = answer_in(rollout.transitions)
    yield from _scores(rollout, trace, score)
    if gaps:
        rollout.status, rollout.error, rollout.failure = "error", gaps[0].reason, FailureKind.RECORD
        rollout.score, rollout.rubric = None, ""
    yield rollout


def _gaps(trace: Trace, root: Span, calls: Sequence[tuple[Span, LMCall]]) -> list[Skipped]:
    """What of the run is not on record: values in an unknown shape, requests that are null, and a missing root."""
    read = {span.id for span, _ in calls}
    reasons = [
        (span, reason)
        for span in trace.spans
        if (not isinstance(span.does, LMCall) or span.id in read) and (reason := _gap(span))
    ]
    if root.parent and not trace.whole:
        reasons.append((root, f"the root span of the trace is missing: {root.name!r} is inside another one"))
    return [Skipped(where=span.where or trace.where, reason=reason, trace=trace.id) for span, reason in reasons]


def _gap(span: Span) -> str:
    """Why a span is not completely on record; empty if it is."""
    if span.unknown:
        fields = ", ".join(map(repr, dict.fromkeys(span.unknown)))
        return f"the span {span.name!r} is not understood: {fields} has an unknown shape"
    if isinstance(span.does, LMCall) and span.does.choices and not span.does.body["messages"]:
        return f"the span {span.name!r} has an answer without a request: {span.does.asked_in!r} is empty"
    return ""


def _inherit(spans: Sequence[Span]) -> None:
    """Give LM calls without tool definitions or system messages those of the nearest span around them."""
    parents = {span.id: span for span in spans}
    for span in spans:
        if not isinstance(call := span.does, LMCall):
            continue
        around = _around(span, parents)
        tools = next((outer.tools for outer in around if outer.tools), None)
        if tools and not call.body.get("tools"):
            call.body["tools"] = tools
        system = next((outer.system for outer in around if outer.system), None)
        messages = call.body["messages"]
        if system and messages and all(message["role"] not in ("system", "developer") for message in messages):
            call.body["messages"] = [*system, *messages]


def _own(run_id: str, trace: Trace, root: Span) -> Imported:
    """A rollout that assay exported, as it was."""
    version = root.own[names.VERSION_KEY]
    if not isinstance(version, int) or version > names.VERSION:
        reason = "a newer version of assay exported it: update assay"
        return Skipped(where=trace.where, reason=reason, trace=trace.id)
    try:
        return restored(Rollout(run_id=run_id), trace, root)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"its attributes are not those of an export by assay: {type(error).__name__}: {error}"
        return Skipped(where=trace.where, reason=reason, trace=trace.id)


def _failure(status: str, transitions: Sequence[Transition]) -> FailureKind | None:
    """Failure kind of a run, which tracers do not record: the model's if the last call failed, else the agent's."""
    if status not in ("failed", "error"):
        return None
    return transitions[-1].failure or FailureKind.AGENT


def _order(span: Span) -> float:
    return math.inf if span.start is None else span.start


def _root(spans: Sequence[Span]) -> Span:
    """The earliest span without a parent, else the earliest with a missing parent, else the earliest."""
    known = {span.id for span in spans}
    tops = [span for span in spans if not span.parent] or [span for span in spans if span.parent not in known] or spans
    return min(tops, key=_order)


def _calls(trace: Trace) -> tuple[list[tuple[Span, LMCall]], list[Skipped]]:
    """LM calls in order of time, and the duplicate spans.

    If an LM span contains another without a tool in between, both are the same call, and counting both would double its
    tokens. The inner span is used, or the outer one if only it has messages.
    """
    calls = {span.id: (span, span.does) for span in trace.spans if isinstance(span.does, LMCall)}
    parents = {span.id: span for span in trace.spans}
    inside: dict[str, list[str]] = {}
    for span, _ in calls.values():
        for outer in _around(span, parents):
            if outer.id in calls:
                inside.setdefault(outer.id, []).append(span.id)
    dropped: dict[str, str] = {}
    for outer_id, inner in inside.items():
        if calls[outer_id][1].says and not any(calls[span_id][1].says for span_id in inner):
            dropped.update(dict.fromkeys(inner, outer_id))
        else:
            dropped[outer_id] = inner[0]
    selected = [calls[span_id] for span_id in calls if span_id not in dropped]
    skipped = []
    for span_id, other in dropped.items():
        reason = f"the span {calls[span_id][0].name!r} is the same LM call as the span {other!r}"
        skipped.append(Skipped(where=calls[span_id][0].where, reason=reason, trace=trace.id))
    return sorted(selected, key=lambda pair: _order(pair[0])), skipped


def _around(span: Span, parents: dict[str, Span]) -> list[Span]:
    """Ancestors of a span up to a tool, because LM calls inside a tool are separate calls. Empty if parents form a
    cycle.
    """
    ancestors: list[Span] = []
    seen, ancestor = {span.id}, parents.get(span.parent)
    while ancestor is not None and not isinstance(ancestor.does, ToolUse):
        if ancestor.id in seen:
            return []
        seen.add(ancestor.id)
        ancestors.append(ancestor)
        ancestor = parents.get(ancestor.parent)
    return ancestors


def _transition(t: int, span: Span, call: LMCall) -> Transition:
    model = as_text(call.body.get("model")) or call.answered_by
    linked_choices(call.body["messages"], call.choices)
    counts = {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens}
    usage = {name: count for name, count in counts.items() if count is not None}
    body = {"id": call.response_id, "model": call.answered_by or model, "choices": call.choices, "usage": usage}
    answered = {key: value for key, value in body.items() if value or key == "choices"}
    if not (call.choices or call.response_id or usage):
        answered = {}
    gap = _gap(span)
    duration_ms = (span.end - span.start) * 1000 if span.start is not None and span.end is not None else 0.0
    return Transition(
        t=t,
        model=model,
        request={"dialect": "chat", "body": {**({"model": model} if model else {}), **call.body}, "span": span.id},
        response={"body": answered} if answered else None,
        output=_output_text(call.choices),
        error=span.error or gap or None,
        failure=FailureKind.RECORD if gap else None if span.error is None else FailureKind.MODEL,
        started_at=span.start or 0.0,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        cost_usd=call.cost_usd,
        latency_ms=round(max(duration_ms, 0.0), 3),
    )


def _output_text(choices: Sequence[dict[str, Any]]) -> str:
    """Text of the first choice, including refusals and references to media."""
    return answer_of("chat", {"choices": [choices[0]]}).output if choices else ""


def _ends(trace: Trace, root: Span, first: LMCall) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Inputs and prediction: those of the trace, else those of the root span.

    Inputs that were not recorded are replaced by the messages of the first LM call, because sealed tasks are identified
    by their inputs. The answer of LM calls is read by `answer_in`.
    """
    reading = Reading()
    inputs = reading.read("the trace's input", as_inputs, trace.inputs, {})
    outputs = reading.read("the trace's output", unwrapped, trace.outputs, None)
    if not isinstance(root.does, LMCall):
        inputs = inputs or reading.read(root.inputs_in, as_inputs, root.inputs, {})
        outputs = outputs or reading.read(root.outputs_in, unwrapped, root.outputs, None)
    root.unknown += reading.unknown
    return inputs or as_inputs(first.body["messages"]), outputs


def answer_in(transitions: Sequence[Transition]) -> dict[str, Any] | None:
    """Prediction from the final answer of the LM calls; None without an answer or if it was not recorded."""
    return prediction_of(final_answer(transitions).value, "output")


def _place_tools(rollout: Rollout, spans: Sequence[Span], calls: Sequence[Span]) -> None:
    """Assign each tool to the LM call that requested it by call id, else to the latest call before it.

    If the trace has no tool spans, the tools are read from its messages.
    """
    requested = [{call["id"]: call["function"] for call in _tool_calls(t)} for t in rollout.transitions]
    answers = _answers(rollout.transitions)
    used = sorted(
        ((span, span.does) for span in spans if isinstance(span.does, ToolUse)), key=lambda result: _order(result[0])
    )
    if not used:
        for at, transition in enumerate(rollout.transitions):
            for call in _tool_calls(transition):
                result = answers(call["id"], at) if call["id"] else None
                transition.tools.append(_record(call["function"]["name"], call["function"]["arguments"], result, None))
        return
    for span, does in used:
        before = [at for at, call in enumerate(calls) if _order(call) <= _order(span)]
        asking = [at for at, known in enumerate(requested) if does.call_id and does.call_id in known]
        at_call = next((at for at in reversed(asking) if at in before), next(iter(asking[:1] or before[-1:]), None))
        request, result, tools = dict[str, Any](), does.result, rollout.early_tools
        if at_call is not None:
            request, tools = requested[at_call].get(does.call_id, {}), rollout.transitions[at_call].tools
            result = answers(does.call_id, at_call) if result is None and request else result
        arguments = does.arguments if does.arguments not in (None, "") else request.get("arguments")
        tools.append(_record(does.name or request.get("name", ""), arguments, result, span.error))


def _tool_calls(transition: Transition) -> list[dict[str, Any]]:
    choices = transition.response["body"]["choices"] if transition.response else []
    return choices[0]["message"].get("tool_calls") or [] if choices else []


def _answers(transitions: Sequence[Transition]) -> Any:
    """Lookup of tool results by call id: the last result in the first request after the call."""
    results: dict[str, dict[int, str]] = {}
    for at, transition in enumerate(transitions):
        for message in transition.request["body"]["messages"]:
            if message["role"] == "tool" and message.get("tool_call_id"):
                results.setdefault(message["tool_call_id"], {})[at] = text_of(message["content"])

    def answer(call_id: str, after: int) -> str | None:
        return next((text for at, text in results.get(call_id, {}).items() if at > after), None)

    return answer


def _record(name: str, arguments: Any, result: Any, error: str | None) -> ToolCall:
    text = None if error is not None or result is None else result_text(result)[:_TEXT]
    if text is not None and is_tool_error(text):
        text, error = None, text
    return ToolCall(name=name, arguments=as_arguments(parsed(arguments)), result=text, error=error)


def _scores(rollout: Rollout, trace: Trace, selected: str | None) -> Iterator[Skipped]:
    """Set verdicts from all scores, `score` from the selected one, and `human_rating` from the mean of human
    ratings.
    """
    grades: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for mark in trace.marks:
        grade, problem = _grade(mark.value)
        if problem:
            said = f"the score {mark.name!r} is {mark.value!r:.200}: {problem}"
            yield Skipped(where=mark.where or trace.where, reason=said, trace=trace.id)
        reason, label = mark.reason, mark.label
        if grade is None:
            reason = f"imported as {mark.value!r:.200} {reason}".rstrip()
        if label is None and isinstance(mark.value, str):
            label = mark.value
        scope = "step" if mark.step else "final"
        rollout.verdicts.append(Verdict(criterion=mark.name, grade=grade, scope=scope, reason=reason, label=label))
        if grade is not None and not mark.step:
            grades[mark.human].setdefault(mark.name, []).append(grade)
    for human, named in grades.items():
        name = selected if selected in named else None
        if name is None and len(named) == 1 and (human or selected is None):
            name = next(iter(named))
        if name is not None and human:
            rollout.human_rating = math.fsum(named[name]) / len(named[name])
        elif name is not None:
            rollout.score, rollout.rubric = named[name][-1], f"imported:{name}"
        elif named and selected is None:
            several = f"several {'rating' if human else 'score'}s ({', '.join(named)})"
            yield Skipped(where=trace.where, reason=f"{several} and none selected: stored as verdicts", trace=trace.id)


def _grade(value: Any) -> tuple[float | None, str]:
    """Grade in [0, 1], or None and the problem. `yes` and `no` are 1 and 0; other texts are labels without a grade."""
    if isinstance(value, str):
        return _YES_NO.get(value.strip().lower()), ""
    if not isinstance(value, int | float):
        return None, "" if is_missing(value) else "not a number"
    if not math.isfinite(value):
        return None, "not a finite number"
    return (float(value), "") if 0.0 <= value <= 1.0 else (None, "outside [0, 1]")
