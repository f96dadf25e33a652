"""Searches of agents with a known optimum, by seed: how near, at how many task runs, what pruning saves, what a trial
costs.

The agents are those of `assay.testing`; 50 tasks are seen as right or wrong. Random search without pruning continues
until the true success of its best trial is within 5 % of the optimum, or for `--most` trials.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna

from assay.optimizers.parameters import AgentObjective, SearchConfig, Space, open_study, search
from assay.optimizers.parameters.search import study_storage
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
    agent, config = (
        SyntheticAgent(function, seed=seed),
        SearchConfig(seed=seed, **{"trials": arguments.trials, **settings}),
    )
    study = open_study(f"{function} {seed} {settings}", url, SPACE, config)
    return agent, search(AgentObjective(agent, agent.right), agent.tasks, SPACE, config, study)


def of_optimum(agent: SyntheticAgent, outcome: Any) -> float:
    return agent.success(outcome.best.point.parameters) / agent.best


def optuna_alone(url: str, sampler: str) -> float:
    """Milliseconds a trial of bare Optuna: five parameters, one attribute of a trial's size, the same storage with
    its heartbeat."""
    chosen = optuna.samplers.RandomSampler(seed=0) if sampler == "random" else optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(storage=study_storage(url), sampler=chosen)

    def objective(trial: optuna.Trial) -> float:
        value = sum(trial.suggest_float(name, low, high) for name, (low, high) in RANGES.items())
        trial.set_user_attr("found", {str(task): 1.0 for task in range(50)})
        return value

    clock = time.perf_counter()
    study.optimize(objective, n_trials=100)
    return 10 * (time.perf_counter() - clock)


def needed_by_random(function: str, seed: int) -> int:
    """Task runs until the best trial so far, by what was seen, is truly within 5 % of the optimum; `most` trials'
    where it never is."""
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


PRUNED: dict[str, dict[str, Any]] = {
    "nothing pruned": {"pruner": "none"},
    "at 0.1": {},
    "at 0.1, a check after every second task": {"block": 2},
    "at 0.15": {"prune_at": 0.15},
    "at 0.2": {"prune_at": 0.2},
}

report: dict[str, Any] = {}
for function in arguments.functions:
    tpe: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PRUNED}
    random = list[float]()
    for seed in range(arguments.seeds):
        for name, settings in PRUNED.items():
            agent, outcome = ran(function, seed, **settings)
            highest = max((t for t in outcome.trials if t.state == "complete"), key=lambda t: t.values["score"])
            tpe[name].append(
                (of_optimum(agent, outcome), agent.success(highest.point.parameters) / agent.best, outcome.task_runs)
            )
        random.append(needed_by_random(function, seed))
    report[function] = {
        "tpe": {
            name: {
                "of_optimum": median([best for best, _, _ in rows]),
                "mean": round(statistics.mean(best for best, _, _ in rows), 4),
                "of_the_highest_score": median([share for _, share, _ in rows]),
                "task_runs": median([runs for _, _, runs in rows]),
            }
            for name, rows in tpe.items()
        },
        "random_needs_task_runs": median(random),
    }
for sampler in ("random", "tpe"):
    with tempfile.TemporaryDirectory() as folder:
        clock = time.perf_counter()
        ran("ackley", 0, f"sqlite:///{Path(folder) / 's.db'}", sampler=sampler, pruner="none", trials=100)
        whole, alone = 10 * (time.perf_counter() - clock), optuna_alone(f"sqlite:///{Path(folder) / 'o.db'}", sampler)
        report[f"ms_a_trial_on_sqlite, {sampler}"] = {"assay": round(whole, 1), "optuna alone": round(alone, 1)}
print(json.dumps(report))
