"""Why a prediction cannot be scored: the run failed, or its answer is empty. The task that it is scored for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.datasets.tasks import Task, make_task
from assay.models.calls import failure_of_program, is_agent_failure, unanswered
from assay.rubrics.criteria import Criterion, Failed
from assay.rubrics.scoring import fields_of
from assay.support.sections import fields_in
from assay.traces.messages.dialects import chat_messages
from assay.traces.messages.final_answer import asked_outputs
from assay.traces.records import RUN_FIELDS, Rollout, Transition


def failure_of(task: Task, prediction: Any, rollout: Rollout | None) -> Failed | None:
    """Returns the failure of a run, or None if the prediction can be scored.

    An empty answer after a failed last LM call is a failure of the model, otherwise of the agent. So is the text of a
    refusal, or what a content filter left of an answer, where a run returned it as its prediction.
    """
    failure = _failure(task, prediction)
    if rollout is None or not rollout.transitions:
        return failure
    last = rollout.transitions[-1]
    if failure is None:
        return _refused(prediction, last)
    if not failure.empty:
        return failure
    if (kind := unanswered(rollout.transitions)) is not None:
        return Failed(f"{failure.reason}: the last call of the model failed", by_agent=False, kind=kind)
    from assay.traces.messages.endings import ending_of  # here, because it loads DSPy

    ending = ending_of(last)
    return replace(failure, reason=f"{failure.reason}: {ending}") if ending else failure


def _refused(prediction: Any, last: Transition) -> Failed | None:
    """The failure of a run whose prediction is the answer of a call that the model refused or a filter ended."""
    values = [value for value in fields_of(prediction).values() if isinstance(value, str)]
    parts = fields_in(last.output, asked_outputs(chat_messages(last.request))).values()
    if not last.output or not (last.output in values or (parts and all(part in values for part in parts))):
        return None
    from assay.traces.messages.endings import refusal_of  # here, because it loads DSPy

    refusal = refusal_of(last)
    return Failed(refusal) if refusal else None


def _failure(task: Task, prediction: Any) -> Failed | None:
    if prediction is None:
        return Failed("the agent gave no answer", empty=True)
    if isinstance(prediction, Failed):
        return prediction
    if isinstance(prediction, BaseException):
        kind = failure_of_program(prediction)
        return Failed(f"{type(prediction).__name__}: {prediction}", by_agent=is_agent_failure(kind), kind=kind)
    marked = getattr(prediction, "_failed", None)
    if isinstance(marked, Failed):
        return marked
    fields = fields_of(prediction)
    if not fields:
        return Failed("the prediction has no fields", empty=True)
    if _is_empty(fields) and not _is_empty(dict(task.expected)):  # some tasks expect an empty answer
        return Failed("every field of the answer is empty", empty=True)
    return None


def _is_empty(fields: dict[str, Any]) -> bool:
    values = [value for name, value in fields.items() if name not in RUN_FIELDS]
    return bool(values) and all(value is None or (isinstance(value, str) and not value.strip()) for value in values)


def task_of(row: Any, predictions: Sequence[Any], criteria: Sequence[Criterion]) -> Task:
    """The task of a `Task`, a `dspy.Example` or a mapping of its fields.

    Which fields of a flat mapping are inputs is not known. Those that a criterion names (`expected_names`) are expected
    outputs, besides those with a usual name. Those that a prediction has too are inputs and expected outputs: they may
    be outputs under other names, or inputs that the agent repeats.
    """
    if isinstance(row, Task):
        return row
    if hasattr(row, "toDict"):  # a `dspy.Example`; dspy is not imported here
        inputs, row = getattr(row, "_input_keys", None), dict(row.items())
        if inputs:
            return make_task(row, inputs=inputs)
    task = make_task(row, outputs={name for c in criteria for name in c.expected_names})
    if isinstance(row.get("inputs"), Mapping):
        return task
    predicted = {name for prediction in predictions for name in fields_of(prediction)}
    both = {name: value for name, value in task.inputs.items() if name in predicted and value is not None}
    return replace(task, expected={**both, **task.expected})
