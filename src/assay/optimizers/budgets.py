"""What a named optimizer can do under a cap on calls: val tasks of its comparison, and calls of one proposal. Asks no model."""

import math
from collections.abc import Mapping
from typing import Any

from assay.models.meter import Usage
from assay.optimizers.estimate import calls_per_run
from assay.optimizers.evaluation import Evaluation
from assay.optimizers.named import short_name
from assay.optimizers.session import Session, Student
from assay.optimizers.teleprompters import least_runs, val_share

__all__ = ["named_val", "of_all", "too_few_calls"]

_FEWEST_VAL = 4  # tasks on which a named optimizer's proposal is compared
_PROPOSING = 0.9  # of the calls left, for runs; the rest is for proposals
_GROWTH = 1.5  # of prompts, by demonstrations and instructions


def of_all(evaluation: Evaluation) -> Usage:
    """What another evaluation like this one will take; prompts grow by what is proposed."""
    calls, tokens, cost = (math.fsum(values.values()) for values in (evaluation.calls, evaluation.tokens, evaluation.cost_usd))
    return Usage(calls=math.ceil(calls), prompt_tokens=math.ceil(_GROWTH * tokens), cost_usd=_GROWTH * cost)


def named_val(name: str, size: int, session: Session, student: Student) -> int:
    """Val tasks on which a named optimizer's proposal is compared: at most 50, and fewer under a small cap, so that calls to propose are left."""
    left = session.meter.search_calls_left()
    if math.isinf(left):
        return min(50, size)
    each = session.measured.calls + session.measured.judge_calls if session.measured else calls_per_run(student.program)
    return min(50, size, max(_FEWEST_VAL, int(left / max(1.0, each) / val_share(name))))


def too_few_calls(optimizer: str, settings: Mapping[str, Any], student: Student, val: int, session: Session) -> str | None:
    """Says where the caps leave a named optimizer too few runs for one proposal, and how many calls it needs; None where they are enough."""
    left, name = session.meter.search_calls_left(), short_name(optimizer)
    if math.isinf(left) or not least_runs(name, 1, {}):
        return None
    each = session.measured.calls + session.measured.judge_calls if session.measured else calls_per_run(student.program)
    tasks = named_val(name, val, session, student)
    own = max(least_runs(name, tasks, settings), int(settings.get("max_metric_calls") or 0))
    runs = math.ceil(own / _PROPOSING) + 2 * tasks
    needed = math.ceil(runs * max(1.0, each))
    if needed <= left:
        return None
    return (
        f"the caps leave {int(left)} search calls, too few for one proposal of {name}: it needs about {needed} ({runs} runs of the program on "
        f"{tasks} val tasks and its own). Raise --max-search-calls to {needed} or more, and --max-calls to twice that, or use auto or bootstrap"
    )
