"""What the policy of `RLTrainer` learns, against its rules alone: share of the true optimum of what each chose,
paired by function and seed.

The agents are those of `assay.testing`; of 70 tasks, seen as right or wrong, 49 are learned from. Random search of as
many settings, of which the one with the highest score is taken, is given next to it.
"""

import argparse
import json
import math
import time

import numpy as np

from assay.evaluation.statistics import mean_difference
from assay.optimizers import RLTrainer
from assay.optimizers.parameters import AgentObjective, Point
from assay.programs import RANGES
from assay.testing import SyntheticAgent

parser = argparse.ArgumentParser()
parser.add_argument("--functions", nargs="+", default=["ackley", "rosenbrock", "hartmann"])
parser.add_argument("--seeds", type=int, default=6)
parser.add_argument("--episodes", type=int, nargs="+", default=[10, 20, 60])
arguments = parser.parse_args()


def trained(function: str, seed: int, episodes: int, update: bool) -> float:
    agent = SyntheticAgent(function, tasks=70, seed=seed)
    trainer = RLTrainer(agent, agent.right, agent, seed=seed)
    trainer.train(episodes=episodes, update_policy=update)
    return agent.success(trainer.get_best_parameters()) / agent.best


def random_search(function: str, seed: int, episodes: int) -> float:
    agent, rng = SyntheticAgent(function, tasks=70, seed=seed), np.random.default_rng(seed)
    trainer = RLTrainer(agent, agent.right, agent, seed=seed)
    objective, best, highest = AgentObjective(agent, agent.right), trainer.get_best_parameters(), -1.0
    for number in range(episodes):
        drawn = {name: trainer.space.at(name, float(rng.random())) for name in RANGES} if number else best
        score = sum(run.score or 0.0 for run in objective.run(Point("agent", drawn), trainer.tasks))
        best, highest = (drawn, score) if score > highest else (best, highest)
    return agent.success(best) / agent.best


reports = []
for episodes in arguments.episodes:
    clock, rows = time.perf_counter(), []
    for function in arguments.functions:
        for seed in range(arguments.seeds):
            learned, rules = (trained(function, seed, episodes, update) for update in (True, False))
            rows.append((function, learned, rules, random_search(function, seed, episodes)))
    differences = {"rules": [row[1] - row[2] for row in rows], "random": [row[1] - row[3] for row in rows]}
    gains = {
        name: dict(zip(("mean", "low", "high"), mean_difference(values), strict=True))
        for name, values in differences.items()
    }
    means = {
        function: [
            round(math.fsum(row[at] for row in rows if row[0] == function) / arguments.seeds, 3) for at in (1, 2, 3)
        ]
        for function in arguments.functions
    }
    reports.append(
        {
            "episodes": episodes,
            "learned_rules_random": means,
            "gain_over": gains,
            "seconds": round(time.perf_counter() - clock),
        }
    )
    print(json.dumps(reports[-1]), flush=True)
