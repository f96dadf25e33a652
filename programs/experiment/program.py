"""The shipped program `experiment`: plans trials whose outcomes are noisy, and settles on the best plan."""

import re
from typing import ClassVar

from assay.datasets import Task
from assay.programs.environments import (
    Environment,
    EnvironmentStep,
    InvalidAction,
    ShippedEnvironmentAgent,
    environment_seed,
)

from .tasks import ENERGY, Experiment

_PLAN = re.compile(r"\s*heat (\d{1,4}), hours (\d{1,3})\s*")


class Oven(Environment):
    """An oven with a sample (see `assay.shipped.programs.experiment.tasks`). An action is a plan, `heat 50, hours 6`.

    A feasible plan is answered by its yield with noise. One that is not fails and uses up a trial. The last trial
    counts: its reward is its yield without noise, as a share of the best possible one; all others have reward 0.
    `info` has `share`, that of the plan, and `feasible`.
    """

    def __init__(self) -> None:
        self._trial = self._trials = 0

    def reset(self, task: Task) -> EnvironmentStep:
        self._experiment = Experiment.of(task.inputs, environment_seed(task))
        self._trial, self._trials = 0, self._experiment.trials
        return EnvironmentStep(observation=f"A sample of {self._experiment.material}. {self._left()}")

    def step(self, action: str) -> EnvironmentStep:
        if self._trial >= self._trials:
            raise InvalidAction("no trials are left")
        plan = _PLAN.fullmatch(action)
        if plan is None:
            raise InvalidAction("write a plan as: heat 50, hours 5")
        heat, hours, experiment = int(plan[1]), int(plan[2]), self._experiment
        self._trial += 1
        share, problem = experiment.share(heat, hours), experiment.problem(heat, hours)
        measured = experiment.measured(heat, hours, self._trial)
        outcome = f"Failed: {problem}." if problem else f"The yield of {experiment.material} was {measured:.0f} %."
        done = self._trial == self._trials
        return EnvironmentStep(
            observation=outcome if done else f"{outcome} {self._left()}",
            reward=share if done else 0.0,
            done=done,
            info={"share": share, "feasible": not problem},
        )

    def _left(self) -> str:
        left = self._trials - self._trial
        return "The next trial counts." if left == 1 else f"{left} trials left."


class Experimenter(ShippedEnvironmentAgent):
    """Plans trials in an oven. Inputs are those of `experiment:` data; the prompt has the outcomes so far."""

    input_names: ClassVar = ("material", "trials", "noise", "seed")
    environment: ClassVar = Oven
    instructions: ClassVar = (
        "Find the heat (20 to 100) and the hours (1 to 8) with the highest yield. Heat times hours is at most "
        f"{ENERGY}. The last trial counts. Write a plan: heat 50, hours 5"
    )
    action_limits: ClassVar = {"pattern": r"^heat [1-9]00?, hours [1-8]$"}
