"""An agent without DSPy, tuned by a search and by a policy: `python examples/custom_agent.py`.

The agent needs only `execute(task)` and `set_parameters(mapping)`; an evaluator grades one output.
"""

import argparse
import json
import random
from collections.abc import Mapping
from typing import Any

from assay.optimizers import RLTrainer
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, in_figures, open_study, search
from assay.programs import RANGES, AgentParameters


class LookupAgent:
    """Answers from a noisy index. It reads as much of it as `context_length` allows, guesses the more the hotter it
    is, and looks again up to `max_steps` times, each of which takes time."""

    def __init__(self) -> None:
        self.index = {f"item {number}": number * 7 for number in range(300)}
        self.parameters = AgentParameters().model_dump()

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters.update(parameters)

    def execute(self, task: Mapping[str, Any]) -> dict[str, Any]:
        rng = random.Random(task["question"])
        seen = rng.random() < 1 - 0.6 * 2 ** (-self.parameters["context_length"] / 900)
        looks = next((look for look in range(1, self.parameters["max_steps"] + 1) if rng.random() < 0.35), None)
        guesses = rng.random() < 0.4 * (self.parameters["temperature"] - 0.1)
        success = seen and looks is not None and not guesses
        return {
            "answer": self.index[task["question"]] if success else -1,
            "looks": looks or self.parameters["max_steps"],
        }


def evaluator(task: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, float]:
    return {"accuracy": float(output["answer"] == task["answer"]), "efficiency": 1 - min(1.0, output["looks"] / 20)}


parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=40)
parser.add_argument("--episodes", type=int, default=30)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

tasks = [{"id": str(number), "question": f"item {number}", "answer": number * 7} for number in range(120)]
train, sealed = tasks[:80], tasks[80:]
space = Space(programs=["agent"], acting={"agent": list(RANGES)})
config = SearchConfig(trials=arguments.trials)
study = open_study("lookup", None, space, config)
objective = AgentObjective(LookupAgent(), evaluator)
default = Point("agent", AgentParameters().model_dump())
best = search(objective, train, space, config, study, defaults=[default]).best.point

trainer = RLTrainer(LookupAgent(), evaluator, train)
trainer.train(episodes=arguments.episodes)


def score(point: Point) -> float:
    """The share of the sealed tasks that are answered rightly."""
    runs = objective.run(point, sealed)
    return sum(run.score or 0.0 for run in runs) / len(runs)


outcome = {
    "before": {"score": score(default), "parameters": dict(default.parameters)},
    "after": {"score": score(best), "parameters": dict(best.parameters)},
    "policy": {
        "score": score(Point("agent", trainer.get_best_parameters())),
        "parameters": trainer.get_best_parameters(),
    },
}
if arguments.json:
    print(json.dumps(outcome))
else:
    for side, entry in outcome.items():
        settings = ", ".join(f"{name} {in_figures(value)}" for name, value in entry["parameters"].items())
        print(f"{side}: {100 * entry['score']:.0f} % of the sealed tasks with {settings}")
