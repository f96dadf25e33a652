"""Checks of episodes in an environment: they read `steps` of the prediction, as `EnvironmentAgent` has it.

`step_reward` is of scope `step`, all others of scope `final`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Gt

from assay.datasets import Task
from assay.rubrics.criteria import Grade, NoGrade, arguments_rule, is_number
from assay.rubrics.steps import step_of
from assay.traces.records import Rollout

__all__ = [
    "episode_ended",
    "episode_reward",
    "last_info",
    "step_reward",
    "valid_actions",
]


def episode_steps(prediction: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of an episode.

    Raises:
        NoGrade: there are none.
    """
    steps = prediction.get("steps")
    if not isinstance(steps, list | tuple) or not all(
        isinstance(step, Mapping) and _is_finite(step.get("reward")) for step in steps
    ):
        raise NoGrade("the prediction has no 'steps' with an action and a finite reward each")
    return list(steps)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _check_range(low: float = 0.0, high: float = 1.0, **_: Any) -> None:
    if not (is_number(low) and is_number(high) and math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low={low!r} must be a number below high={high!r}")


def _graded(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


@arguments_rule(_check_range)
def episode_reward(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, low: float = 0.0, high: float = 1.0
) -> Grade:
    """Sum of the rewards: 0 at `low` and below, 1 at `high` and above, linear in between.

    Args:
        low, high: rewards of a poor and of a perfect episode.
    """
    total = math.fsum(step["reward"] for step in episode_steps(prediction))
    return Grade(value=_graded(total, low, high), reason=f"The rewards sum to {total:g}.")


def episode_ended(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the episode ended, 0 if the agent was stopped (`max_steps`, a repeated refused action)."""
    steps = episode_steps(prediction)
    ended = bool(steps) and steps[-1].get("done") is True
    return Grade.of(ended, f"The episode had not ended after {len(steps)} actions.")


def valid_actions(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of the actions that the environment did not refuse."""
    steps = episode_steps(prediction)
    if not steps:
        raise NoGrade("the agent took no action")
    refused = [step for step in steps if step.get("error") is not None]
    reason = f"{refused[0].get('action')!r} was refused: {str(refused[0]['error'])[:200]}." if refused else ""
    return Grade(value=1 - len(refused) / len(steps), reason=reason)


@arguments_rule(_check_range)
def last_info(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    *,
    field: str,
    low: float = 0.0,
    high: float = 1.0,
) -> Grade:
    """A number in the `info` of the last action that was not refused: 0 at `low`, 1 at `high`.

    Args:
        field: its name. True counts as 1, False as 0.
        low, high: values of a poor and of a perfect result.
    """
    taken = [step for step in episode_steps(prediction) if step.get("error") is None]
    if not taken:
        return Grade.of(False, "No action was accepted.")
    info = taken[-1].get("info")
    value = info.get(field) if isinstance(info, Mapping) else None
    if value is None or not _is_finite(value):
        raise NoGrade(f"the info of the last step has no number {field!r}")
    return Grade(value=_graded(float(value), low, high), reason=f"{field} is {float(value):g}.")


def step_reward(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    *,
    scale: Annotated[float, Gt(0)] = 1.0,
    losses: bool = False,
) -> Grade:
    """Reward of the environment for the actions that an LM call wrote, divided by `scale`; at most 1.

    Calls that wrote no action are not graded. The grade of a negative reward is 0.

    Args:
        scale: the largest reward of a step.
        losses: grade the size of negative rewards instead, for a criterion of negative weight.
    """
    rewards = [step["reward"] for step in written_by(prediction, rollout)]
    total = math.fsum(rewards) * (-1 if losses else 1)
    return Grade(value=min(1.0, max(0.0, total / scale)))


def written_by(prediction: Mapping[str, Any], rollout: Rollout | None) -> list[Mapping[str, Any]]:
    """The steps whose action the graded LM call wrote.

    Raises:
        NoGrade: it wrote none.
    """
    transition = step_of(prediction)
    recorded = (rollout.prediction or {}) if rollout is not None else {}
    steps = [step for step in episode_steps(recorded) if step.get("call") == transition.t]
    if not steps:
        raise NoGrade("the call wrote no action")
    return steps
