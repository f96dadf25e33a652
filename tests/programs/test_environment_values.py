"""Values of steps, agents and seeds of environments that are accepted or refused."""

import math

import numpy as np
import pytest

from assay.datasets import Task
from assay.errors import ConfigError, ProgramError
from assay.programs import Environment, EnvironmentAgent, EnvironmentStep, environment_seed


class Corridor(Environment):
    def reset(self, task: Task) -> EnvironmentStep:
        return EnvironmentStep(observation="")


def test_numbers_of_numpy_are_taken() -> None:
    step = EnvironmentStep(observation="", reward=np.float32(0.5), done=np.bool_(True))  # type: ignore[arg-type]
    assert (step.reward, step.done) == (0.5, True)
    assert type(step.reward) is float
    assert type(step.done) is bool


def test_seeds_come_from_the_task() -> None:
    one = Task(id="1", inputs={"seed": 5, "a": 1})
    assert environment_seed(one) == 5
    unseeded = [Task(id="x", inputs={"a": value}) for value in (1, 1, 2)]
    seeds = [environment_seed(task) for task in unseeded]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_steps_and_agents_refuse_wrong_values() -> None:
    for wrong in (
        {"observation": 3},
        {"reward": math.inf},
        {"reward": True},
        {"reward": "1"},
        {"reward": 10**400},
        {"reward": np.float32("nan")},
        {"done": 1},
        {"actions": ("",)},
        {"actions": "left"},
        {"actions": tuple(f"action {at}" for at in range(10_000))},
        {"info": None},
        {"info": ["door"]},
    ):
        with pytest.raises(ConfigError):
            EnvironmentStep(**{"observation": "", **wrong})
    with pytest.raises(ProgramError, match="makes an environment"):
        EnvironmentAgent(Corridor(), "Walk.")
    with pytest.raises(ProgramError, match="instructions"):
        EnvironmentAgent(Corridor, " ")
    with pytest.raises(ConfigError, match="timeout_s"):
        EnvironmentAgent(Corridor, "Walk.", timeout_s=0)
    with pytest.raises(AttributeError):
        EnvironmentStep(observation="").reward = 1.0  # type: ignore[misc]
