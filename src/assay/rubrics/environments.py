"""Checks of episodes in an environment: they read `steps` of the prediction, as `EnvironmentAgent` has it.

`step_reward` and `plan_feasible` are of scope `step`, all others of scope `final`.
"""

import math
from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.datasets.games import NimRules, nim_problem
from assay.errors import DataError
from assay.rubrics.criteria import Grade, NoGrade, arguments_rule, is_number
from assay.traces.records import Rollout, Transition

__all__ = [
    "episode_ended",
    "episode_reward",
    "feasible_plans",
    "last_info",
    "nim_won",
    "plan_feasible",
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


def _check_scale(scale: float = 1.0, **_: Any) -> None:
    if not (is_number(scale) and math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r} must be a finite number > 0")


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
    return Grade(value=float(ended), reason="" if ended else f"The episode had not ended after {len(steps)} actions.")


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
        return Grade(value=0.0, reason="No action was accepted.")
    info = taken[-1].get("info")
    value = info.get(field) if isinstance(info, Mapping) else None
    if value is None or not _is_finite(value):
        raise NoGrade(f"the info of the last step has no number {field!r}")
    return Grade(value=_graded(float(value), low, high), reason=f"{field} is {float(value):g}.")


def nim_won(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the agent won its game of Nim, by a replay of the recorded moves.

    A game in which the opponent broke the rules is unscored.
    """
    taken = [step for step in episode_steps(prediction) if step.get("error") is None]
    infos = [info for step in taken if isinstance(info := step.get("info"), Mapping)]
    if len(infos) < len(taken):
        raise NoGrade("the steps have no info with the opponent's moves")
    own = [int(text) if (text := str(step.get("action"))).isdigit() and len(text) < 3 else text for step in taken]
    try:
        rules = NimRules.of(task.inputs)
    except DataError as error:
        raise NoGrade(str(error)) from None
    won, problem = nim_problem(rules, own, [info.get("opponent") for info in infos])
    if problem:
        raise NoGrade(f"the record of the game breaks the rules: {problem}")
    return Grade(value=float(won), reason="" if won else f"The game was not won; the moves were {own}.")


def feasible_plans(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of the actions whose `info` has a true `feasible`; a refused action is not feasible."""
    steps = episode_steps(prediction)
    feasible = [False if step.get("error") is not None else _feasible(step) for step in steps]
    if not feasible or None in feasible:
        raise NoGrade("a step has no 'feasible' in its info")
    return Grade(
        value=feasible.count(True) / len(feasible), reason=f"{feasible.count(False)} of {len(feasible)} plans failed."
    )


def plan_feasible(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Scope `step`: grade 1 if the plan that the call wrote was feasible, 0 if it failed or was refused."""
    steps = _written_by(prediction, rollout)
    return Grade(value=float(all(_feasible(step) for step in steps)))


def _feasible(step: Mapping[str, Any]) -> bool | None:
    info = step.get("info")
    value = info.get("feasible") if isinstance(info, Mapping) else None
    return value if isinstance(value, bool) else None


@arguments_rule(_check_scale)
def step_reward(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    *,
    scale: float = 1.0,
    losses: bool = False,
) -> Grade:
    """Reward of the environment for the actions that an LM call wrote, divided by `scale`; at most 1.

    Calls that wrote no action are not graded. The grade of a negative reward is 0.

    Args:
        scale: the largest reward of a step.
        losses: grade the size of negative rewards instead, for a criterion of negative weight.
    """
    rewards = [step["reward"] for step in _written_by(prediction, rollout)]
    total = math.fsum(rewards) * (-1 if losses else 1)
    return Grade(value=min(1.0, max(0.0, total / scale)))


def _written_by(prediction: Mapping[str, Any], rollout: Rollout | None) -> list[Mapping[str, Any]]:
    """The steps whose action the graded LM call wrote.

    Raises:
        NoGrade: it wrote none.
    """
    transition = prediction.get("transition")
    if not isinstance(transition, Transition):
        raise NoGrade("a step check needs a transition")
    recorded = (rollout.prediction or {}) if rollout is not None else {}
    steps = [step for step in episode_steps(recorded) if step.get("call") == transition.t]
    if not steps:
        raise NoGrade("the call wrote no action")
    return steps
