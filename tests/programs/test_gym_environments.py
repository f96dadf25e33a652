"""Environments with gymnasium's interface: a small one written here, and gymnasium's own where it is installed."""

import json
import random
from typing import Any

import dspy
import numpy as np
import pytest

from assay.datasets import Task
from assay.errors import ConfigError, EnvironmentFailed
from assay.programs import EnvironmentAgent, GymEnvironment, InvalidAction
from assay.testing import scripted_lm


class Discrete:
    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Doors:
    """One of `n` doors has the prize; the observation says the number of the tries that are left."""

    def __init__(self, n: int = 3, tries: int = 2, start: int = 0) -> None:
        self.action_space, self.tries, self.closed = Discrete(n, start), tries, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.prize = random.Random(seed).randrange(self.action_space.n) + self.action_space.start
        self.left = self.tries if options is None else options["tries"]
        return {"left": self.left}, {"prize": self.prize}

    def step(self, action: Any) -> tuple[Any, ...]:
        assert isinstance(action, int)
        self.left -= 1
        won = action == self.prize
        return {"left": self.left}, float(won), won, self.left == 0, {"prize": self.prize, "object": object()}

    def close(self) -> None:
        self.closed += 1


def task(seed: int = 0, **inputs: Any) -> Task:
    return Task(id="1", inputs={"seed": seed, **inputs})


def test_a_truncated_episode_is_done() -> None:
    environment = GymEnvironment(Doors(tries=1))
    prize = environment.reset(task()).info["prize"]
    last = environment.step(str((int(prize) + 1) % 3))
    assert last.done
    assert last.info["truncated"] is True
    assert "object" not in last.info


def test_an_action_mask_removes_actions() -> None:
    class Masked(Doors):
        def step(self, action: Any) -> tuple[Any, ...]:
            result = super().step(action)
            return (*result[:4], {"action_mask": [1, 0, 1]})

    environment = GymEnvironment(Masked())
    prize = environment.reset(task()).info["prize"]
    assert environment.step(str((int(prize) + 1) % 3)).actions == ("0", "2")


def test_other_spaces_need_a_parser() -> None:
    env = Doors()
    env.action_space = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="pass parse"):
        GymEnvironment(env)
    environment = GymEnvironment(env, parse=int)
    env.action_space = Discrete(3)
    environment.reset(task(1))
    env.prize = 0
    assert environment.step("1").observation == "{'left': 1}"
    with pytest.raises(InvalidAction, match="invalid literal"):
        environment.step("one")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no reset, step, action_space"):
        GymEnvironment(object())
    with pytest.raises(ConfigError, match="2 names were given for the 3 actions"):
        GymEnvironment(Doors(), actions=["a", "b"])
    with pytest.raises(ConfigError, match="without parse"):
        GymEnvironment(Doors(), actions=["a", "b", "c"], parse=int)
    with pytest.raises(ConfigError, match="more than 256 actions"):
        GymEnvironment(Doors(n=1000))


def test_the_older_interface_is_refused_with_the_way_out() -> None:
    class Old(Doors):
        def step(self, action: Any) -> tuple[Any, ...]:
            return {"left": 1}, 0.0, False, {}

    agent = EnvironmentAgent(lambda: GymEnvironment(Old()), "Open a door.")
    lm = scripted_lm(lambda request: json.dumps({"action": "0"}))
    with dspy.context(lm=lm), pytest.raises(EnvironmentFailed, match="older gym, which returns four values"):
        agent(seed=0)


def test_a_large_array_needs_render() -> None:
    class Pixels(Doors):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return np.zeros((84, 84)), {}

    with pytest.raises(ConfigError, match=r"array of 7,056 numbers: pass render"):
        GymEnvironment(Pixels()).reset(task())
    assert GymEnvironment(Pixels(), render=lambda seen: f"{seen.shape}").reset(task()).observation == "(84, 84)"
