"""Simulated deployments with known truth: how often the plan promotes and rolls back, next to a naive z test.

    python benchmarks/deployments.py [--runs 500] [--seed 1] [--covariate | --missing]

Decisions and assignment are those of production (`assay.deployment.decisions.advance`). The naive rule pools all
rollouts of both arms, runs a z test of two proportions at 5 % after every 50 requests, promotes on a significant gain
and rolls back on a significant loss. One line a scenario. `--covariate`: the plan with its covariate,
and without it where there is an effect, on traffic with tasks and users that were seen before; evaluated after every
100 requests. `--missing`: scores that are missing more often in one arm, with a goal of any gain.
"""

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from assay.deployment.decisions import Decision, State
from assay.deployment.evidence import CANDIDATE, CHAMPION
from assay.deployment.plan import Metric, Plan, default_plan
from assay.deployment.settings import Traffic
from assay.deployment.simulation import SimulatedDeployment, simulate

SCENARIOS: dict[str, dict[str, Any]] = {
    "no effect": {},
    "no effect, base rate 0.7 to 0.9": {"drift": 0.2},
    "no effect, base rate 0.95": {"base": 0.95},
    "no effect, heavy users": {"heavy": 1.2, "users": 200},
    "no effect, a novelty that fades": {"novelty": 0.3},
    "no effect, late and missing rewards": {"delay_s": 100.0, "missing": 0.2},
    "25 % better": {"effect": 0.25},
    "25 % better, drift": {"effect": 0.25, "base": 0.6, "drift": 0.15},
    "25 % better, late and missing rewards": {"effect": 0.25, "delay_s": 100.0, "missing": 0.2},
    "25 % worse": {"effect": -0.25},
    "25 % worse, late and missing rewards": {"effect": -0.25, "delay_s": 100.0, "missing": 0.2},
}


# recorded rollouts of the champion; tasks that come again and differ
_SEEN = {"base": 0.5, "history": 2000, "tasks": 60, "task_spread": 0.35}
_HEAVY = {"heavy": 1.2, "users": 200, "history": 2000}
COVARIATE: dict[str, dict[str, Any]] = {
    "no effect, tasks come again": _SEEN,
    "no effect, tasks come again, drift, late and missing rewards":
        {**_SEEN, "drift": 0.15, "delay_s": 100.0, "missing": 0.2},
    "no effect, heavy users": _HEAVY,
    "20 % better, tasks come again": {**_SEEN, "effect": 0.2},
    "30 % better, tasks come again": {**_SEEN, "effect": 0.3},
    "25 % better, heavy users": {**_HEAVY, "effect": 0.25},
    "15 % worse, tasks come again": {**_SEEN, "effect": -0.15},
}  # fmt: skip


# shares of the failures of the champion and of the candidate that lose their score
MISSING: dict[str, dict[str, Any]] = {
    "no effect, 30 and 60 % of failures unscored": {"unscored_failures": 0.3, "candidate_unscored_failures": 0.6},
    "no effect, 60 and 30 %": {"unscored_failures": 0.6, "candidate_unscored_failures": 0.3},
    "no effect, 5 and 15 %": {"unscored_failures": 0.05, "candidate_unscored_failures": 0.15},
    "no effect, 15 and 5 %": {"unscored_failures": 0.15, "candidate_unscored_failures": 0.05},
    "no effect, 0 and 10 %": {"candidate_unscored_failures": 0.1},
    "no effect, 10 and 0 %": {"unscored_failures": 0.1},
    "no effect, 5 % of all unscored": {"missing": 0.05},
    "rate +0.1, 5 % of all unscored": {"missing": 0.05, "effect": 0.1 / 0.7},
    "no effect, a novelty that fades": {"novelty": 0.3},
}


def missing_scores(runs: int, seed: int, only: str) -> None:
    """One line a scenario, with the default assumption of a plan about missing scores and a goal of any gain."""
    for name, truth in MISSING.items():
        if only not in name:
            continue
        report = simulate(default_plan(gain=0.0), Traffic(**truth), runs=runs, seed=seed, interval=100).to_dict()
        keys = ("runs", "promoted", "rolled_back", "rules", "requests_median")
        print(json.dumps({"scenario": name, **{key: report[key] for key in keys}}), flush=True)


def naive(deployment: SimulatedDeployment, name: str, now: float) -> Decision:
    """A z test of two proportions on everything so far, at every evaluation."""
    plan, state = deployment.state(name)
    step = plan.steps[state.step]
    if step.shadow:
        return _write(deployment, "next", state, now)
    arms = deployment.evidence(name, plan.metrics[0], now)
    cells = {arm: [of_arm[arm] for of_arm in arms.values()] for arm in (CANDIDATE, CHAMPION)}
    n1, n0 = (sum(cell.count for cell in cells[arm]) for arm in (CANDIDATE, CHAMPION))
    p1, p0 = (
        sum(cell.mean * cell.count for cell in cells[arm] if cell.count) / max(1, n)
        for arm, n in ((CANDIDATE, n1), (CHAMPION, n0))
    )
    pooled = (p1 * n1 + p0 * n0) / max(1, n1 + n0)
    error = math.sqrt(pooled * (1 - pooled) * (1 / max(1, n1) + 1 / max(1, n0)))
    z = (p1 - p0) / error if error and min(n1, n0) >= 20 else 0.0
    if abs(z) > 1.96:
        return _write(deployment, "promote" if z > 0 else "rollback", state, now)
    done = sum(deployment.requests(name, state.step, now).values())
    if not step.decides and done >= step.requests:
        return _write(deployment, "next" if state.step + 1 < len(plan.steps) else "promote", state, now)
    if step.decides and done >= (step.max_requests or math.inf):
        return _write(deployment, "pause", state, now)
    return Decision(action="continue", rule="z", reason="", step=state.step)


def _write(deployment: SimulatedDeployment, action: str, state: State, now: float) -> Decision:
    decision = Decision(action=action, rule="z", reason="", step=state.step)
    status = {"promote": "promoted", "rollback": "rolled_back", "pause": "paused"}.get(action, "running")
    after = replace(
        state, step=state.step + (action == "next"), status=status, started_at=now, version=state.version + 1
    )
    deployment.write("", decision, state, after)
    return decision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="Scenarios whose name contains this text.", default="")
    parser.add_argument("--covariate", action="store_true", help="With and without the covariate.")
    parser.add_argument("--missing", action="store_true", help="Scores that are missing more often in one arm.")
    arguments = parser.parse_args()
    if arguments.missing:
        missing_scores(arguments.runs, arguments.seed, arguments.only)
        return
    for name, truth in (COVARIATE if arguments.covariate else SCENARIOS).items():
        if arguments.only not in name:
            continue
        horizon = 3 * truth.get("delay_s", 0.0)
        plan = replace(default_plan(), metrics=(Metric(success_gain=0.1, horizon_s=horizon),))
        live = replace(plan, steps=plan.steps[1:])
        line: dict[str, Any] = {"scenario": name, "runs": arguments.runs}
        rules: tuple[tuple[str, Plan, Any], ...] = (
            ("assay", plan, None), ("without shadow", live, None), ("naive", live, naive),
        )  # fmt: skip
        if arguments.covariate:
            rules = (("covariate", plan, None), ("without", replace(plan, covariate=False), None))
            rules = rules if truth.get("effect") else rules[:1]
        for rule, steps, advancing in rules:
            more: dict[str, Any] = {} if advancing is None else {"advance": advancing}
            if arguments.covariate:
                more["interval"] = 100
            report = simulate(steps, Traffic(**truth), runs=arguments.runs, seed=arguments.seed, **more)
            line[rule] = {key: value for key, value in report.to_dict().items() if key not in ("runs", "rules")}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
