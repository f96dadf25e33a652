"""Why a prediction cannot be scored: the run failed, or its answer is empty."""

from typing import Any

from assay.datasets.tasks import Task
from assay.models.failures import failure_of_program, is_agent_failure, unanswered
from assay.rubrics.criteria import Failed
from assay.rubrics.scoring import fields_of
from assay.traces.records import RUN_FIELDS, Rollout

__all__ = ["failure_of"]


def failure_of(task: Task, prediction: Any, rollout: Rollout | None) -> Failed | None:
    """Returns the failure of a run, or None if the prediction can be scored.

    An empty answer after a failed last LM call is a failure of the model, otherwise of the agent.
    """
    failure = _failure(task, prediction)
    kind = unanswered(rollout.transitions) if rollout is not None and failure is not None and failure.empty else None
    if failure is None or kind is None:
        return failure
    return Failed(f"{failure.reason}: the last call of the model failed", by_agent=False, kind=kind)


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
