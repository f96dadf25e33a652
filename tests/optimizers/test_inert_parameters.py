"""The policy trainer keeps the initial value of a parameter that makes no difference."""

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from assay.optimizers.parameters import RLTrainer
from assay.programs import RANGES, AgentParameters

DEFAULTS = AgentParameters().model_dump()


class Stepping:
    """An agent that is right with a probability that depends on `max_steps`, or on nothing."""

    def __init__(self, acts: bool, draw: Callable[[Any, Mapping[str, Any]], str]) -> None:
        self.acts, self.draw, self.parameters = acts, draw, dict[str, Any]()

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = dict(parameters)

    def execute(self, task: Any) -> bool:
        low, high = RANGES["max_steps"]
        share = (self.parameters["max_steps"] - low) / (high - low) if self.acts else 0.5
        drawn = random.Random(hashlib.sha256(self.draw(task, self.parameters).encode()).hexdigest()).random()
        return drawn < 0.3 + 0.6 * share


def moves(acts: bool, draw: Callable[[Any, Mapping[str, Any]], str]) -> list[dict[str, float]]:
    """How far each parameter was moved, as a share of its range, for six seeds."""
    found = []
    for seed in range(6):
        agent, tasks = Stepping(acts, draw), [f"task {at}" for at in range(60)]
        trainer = RLTrainer(agent, lambda task, right: {"accuracy": float(right)}, tasks, seed=seed)
        trainer.train(episodes=10)
        best = trainer.get_best_parameters()
        found.append({name: abs(best[name] - DEFAULTS[name]) / (high - low) for name, (low, high) in RANGES.items()})
    return found


DRAWS = pytest.mark.parametrize(
    "draw",
    [lambda task, parameters: task, lambda task, parameters: f"{task}{json.dumps(parameters, sort_keys=True)}"],
    ids=["the same for all parameters", "new for each setting"],
)


@pytest.mark.slow
@DRAWS
def test_parameters_without_an_effect_keep_their_initial_value(draw: Any) -> None:
    found = moves(True, draw)
    assert sum(move > 0 for moved in found for name, move in moved.items() if name != "max_steps") <= 2  # of 24
    assert all(moved["max_steps"] > 0.25 for moved in found)


@pytest.mark.slow
@DRAWS
def test_where_nothing_acts_all_parameters_keep_their_initial_value(draw: Any) -> None:
    assert sum(move > 0 for moved in moves(False, draw) for move in moved.values()) <= 2  # of 30
