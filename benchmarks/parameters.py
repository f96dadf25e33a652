"""Searches of agents with a known optimum, by seed: how near, at how many task runs, what pruning saves, what a trial costs.

The agents are those of `assay.testing`; 50 tasks are seen as right or wrong. Random search without pruning goes on until the true
success of its best trial is within 5 % of the optimum, or for `--most` trials.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.optimizers.parameters import AgentArena, RLTrainer, SearchConfig, Space, open_study, search
from assay.programs import RANGES
from assay.testing import SyntheticAgent

parser = argparse.ArgumentParser()
parser.add_argument("--functions", nargs="+", default=["ackley", "rosenbrock", "hartmann"])
parser.add_argument("--seeds", type=int, default=10)
parser.add_argument("--trials", type=int, default=60)
parser.add_argument("--most", type=int, default=400)
arguments = parser.parse_args()
SPACE = Space(programs=["agent"], acting={"agent": list(RANGES)})


def ran(function: str, seed: int, url: str | None = None, **settings: Any) -> tuple[SyntheticAgent, Any]:
    agent, config = SyntheticAgent(function, seed=seed), SearchConfig(seed=seed, **{"trials": arguments.trials, **settings})
    study = open_study(f"{function} {seed} {settings}", url, SPACE, config)
    return agent, search(AgentArena(agent, agent.right), agent.tasks, SPACE, config, study)


def of_optimum(agent: SyntheticAgent, outcome: Any) -> float:
    return agent.success(outcome.best.point.parameters) / agent.best


def needed_by_random(function: str, seed: int) -> int:
    """Task runs until the best trial so far, by what was seen, is truly within 5 % of the optimum; `most` trials' where it never is."""
    agent, outcome = ran(function, seed, sampler="random", pruner="none", trials=arguments.most)
    seen, done = -1.0, 0
    for trial in outcome.trials:
        done += len(trial.scores)
        if trial.values["score"] > seen:
            seen = trial.values["score"]
            if agent.success(trial.point.parameters) >= 0.95 * agent.best:
                return done
    return done


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


found: dict[str, Any] = {}
for function in arguments.functions:
    pruned, harder, whole, policy, still, random = [], [], [], [], [], []
    for seed in range(arguments.seeds):
        agent, outcome = ran(function, seed)
        pruned.append((of_optimum(agent, outcome), outcome.task_runs))
        agent, outcome = ran(function, seed, prune_at=0.2)
        harder.append((of_optimum(agent, outcome), outcome.task_runs))
        agent, outcome = ran(function, seed, pruner="none")
        whole.append((of_optimum(agent, outcome), outcome.task_runs))
        random.append(needed_by_random(function, seed))
        for update, shares in ((True, policy), (False, still)):
            agent = SyntheticAgent(function, tasks=70, seed=seed)
            trainer = RLTrainer(agent, agent.right, agent, seed=seed)
            trainer.train(episodes=arguments.trials, update_policy=update)
            shares.append(agent.success(trainer.get_best_parameters()) / agent.best)
    found[function] = {
        "tpe_pruned": {"of_optimum": median([o for o, _ in pruned]), "task_runs": median([r for _, r in pruned])},
        "tpe_pruned_at_0.2": {"of_optimum": median([o for o, _ in harder]), "task_runs": median([r for _, r in harder])},
        "tpe": {"of_optimum": median([o for o, _ in whole]), "task_runs": median([r for _, r in whole])},
        "random_needs_task_runs": median(random),
        "saved_by_pruning": round(1 - sum(r for _, r in pruned) / sum(r for _, r in whole), 3),
        "saved_at_0.2": round(1 - sum(r for _, r in harder) / sum(r for _, r in whole), 3),
        "policy": {"of_optimum": median(policy), "without_updates": median(still), "episodes": arguments.trials},
    }
with tempfile.TemporaryDirectory() as folder:
    clock = time.perf_counter()
    ran("ackley", 0, f"sqlite:///{Path(folder) / 's.db'}", sampler="random", pruner="none", trials=100)
    found["ms_a_trial_on_sqlite"] = round(10 * (time.perf_counter() - clock), 2)
print(json.dumps(found))
