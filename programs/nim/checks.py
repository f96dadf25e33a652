"""The check of Nim."""

from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.errors import DataError
from assay.rubrics import Grade, NoGrade
from assay.rubrics.environments import episode_steps
from assay.traces import Rollout

from .tasks import NimRules, nim_problem

__all__ = ["nim_won"]


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
    return Grade.of(won, f"The game was not won; the moves were {own}.")
