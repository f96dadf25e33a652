"""Sizes of a named optimizer under a cap on calls: val tasks of its comparison, and calls of one proposal.

Does not call a model.
"""

import math
from collections.abc import Mapping
from typing import Any

from assay.evaluation.evaluation import Evaluation
from assay.evaluation.session import RecordedProgram, Session
from assay.models.meter import Usage
from assay.optimizers.prompts.estimate import calls_per_run
from assay.optimizers.prompts.named import short_name
from assay.optimizers.prompts.teleprompters import least_runs, val_share

__all__ = ["named_val", "of_all", "too_few_calls"]

_FEWEST_VAL = 4  # tasks on which a named optimizer's proposal is compared
_PROPOSING = 0.9  # of the calls left, for runs; the rest is for proposals
_GROWTH = 1.5  # of prompts, by demonstrations and instructions


def of_all(evaluation: Evaluation) -> Usage:
    """Expected usage of another evaluation on the same tasks. Proposed instructions make the prompts longer."""
    calls, tokens, cost = (
        math.fsum(values.values()) for values in (evaluation.calls, evaluation.tokens, evaluation.cost_usd)
    )
    return Usage(calls=math.ceil(calls), prompt_tokens=math.ceil(_GROWTH * tokens), cost_usd=_GROWTH * cost)


def named_val(name: str, size: int, session: Session, student: RecordedProgram) -> int:
    """Number of val tasks on which a named optimizer's proposal is compared.

    At most 50; fewer under a small cap, so that calls remain for the proposal.
    """
    calls_left = session.meter.search_calls_left()
    if math.isinf(calls_left):
        return min(50, size)
    each = session.measured.calls + session.measured.judge_calls if session.measured else calls_per_run(student.program)
    return min(50, size, max(_FEWEST_VAL, int(calls_left / max(1.0, each) / val_share(name))))


def too_few_calls(
    optimizer: str, settings: Mapping[str, Any], student: RecordedProgram, val: int, session: Session
) -> str | None:
    """A warning if the caps leave a named optimizer too few runs for one proposal; None if they are enough."""
    calls_left, name = session.meter.search_calls_left(), short_name(optimizer)
    if math.isinf(calls_left) or not least_runs(name, 1, {}):
        return None
    each = session.measured.calls + session.measured.judge_calls if session.measured else calls_per_run(student.program)
    tasks = named_val(name, val, session, student)
    minimum_runs = max(least_runs(name, tasks, settings), int(settings.get("max_metric_calls") or 0))
    runs = math.ceil(minimum_runs / _PROPOSING) + 2 * tasks
    needed = math.ceil(runs * max(1.0, each))
    if needed <= calls_left:
        return None
    return (
        f"the caps leave {int(calls_left)} search calls, too few for one proposal of {name}: it needs about {needed} "
        f"({runs} runs of the program on {tasks} val tasks and its own). "
        f"Raise --max-search-calls to {needed} or more, and --max-calls to twice that, or use auto or bootstrap"
    )
