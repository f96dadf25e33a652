"""`advance`: which rule decides, what is written, and how often a plan errs on traffic with known truth."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.deployment.decisions import Decision, State, advance
from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, cell_of
from assay.deployment.plan import Metric, Plan, Step, default_plan, load_plan
from assay.deployment.readings import Paired, stored_reading
from assay.deployment.settings import Traffic
from assay.deployment.simulation import simulate
from assay.errors import ConfigError
from assay.support.values import json_value

PLAN = Plan(
    steps=(
        Step(weight=10, requests=100),
        Step(weight=50, decides=True, max_requests=2000),
        Step(weight=95, requests=50),
    ),
    metrics=(Metric(success_gain=0.1), Metric(name="error_rate", failure_above=0.3)),
)


class Fixed:
    """Records with given numbers: mean and units of each arm, by metric."""

    def __init__(self, plan: Plan, values: Mapping[str, tuple[float, float]], units: int = 200, **more: Any) -> None:
        self.plan, self.values, self.count, self.more = plan, values, units, more
        self.now, self.written = State(step=more.get("step", 0)), list[Decision]()

    def state(self, name: str) -> tuple[Plan, State]:
        return self.plan, self.now

    def evidence(self, name: str, metric: Metric, now: float) -> Arms:
        missing = self.more.get("missing", (0, 0))
        cells = {}
        for arm, mean, lost in zip((CANDIDATE, CHAMPION), self.values[metric.name], missing, strict=True):
            ones = round(mean * self.count)
            cells[arm] = cell_of(
                [(f"{arm}{at}", 1, float(at < ones)) for at in range(self.count)], salt="s", missing=lost
            )
        return {(self.now.step, "t"): cells}

    def shadow(self, name: str, metric: Metric) -> Paired:
        return Paired(differences=self.more.get("pairs", ()), champion=0.7)

    def units(self, name: str, step: int) -> Mapping[str, int]:
        return self.more.get("ratio", {})

    def requests(self, name: str, step: int, now: float) -> Mapping[str, int]:
        return {CANDIDATE: self.count, CHAMPION: self.more.get("champion_requests", self.count)}

    def write(self, name: str, decision: Decision, before: State, after: State) -> bool:
        if before != self.now:
            return False
        self.now = after
        self.written.append(decision)
        return True


EQUAL = {"score": (0.7, 0.7), "error_rate": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("records", "action", "rule"),
    [
        (Fixed(PLAN, EQUAL), "next", "step"),
        (Fixed(PLAN, EQUAL, units=40), "continue", "step"),
        (Fixed(PLAN, EQUAL | {"score": (0.3, 0.7)}), "rollback", "failure_loss"),
        (Fixed(PLAN, EQUAL | {"error_rate": (0.6, 0.0)}), "rollback", "failure_above"),
        (Fixed(PLAN, EQUAL, ratio={CANDIDATE: 400, CHAMPION: 600}), "pause", "sample_ratio"),
        (Fixed(PLAN, EQUAL, missing=(150, 0)), "pause", "missing"),
        (Fixed(PLAN, EQUAL, missing=(400, 400)), "pause", "missing"),
        (Fixed(PLAN, EQUAL | {"score": (0.95, 0.7)}, units=300, step=1), "next", "success"),
        (Fixed(PLAN, EQUAL | {"score": (0.74, 0.7)}, units=300, step=1), "continue", "step"),
        (Fixed(PLAN, EQUAL, units=1000, step=1), "pause", "inconclusive"),
        (Fixed(PLAN, EQUAL, step=2), "promote", "step"),
        (Fixed(PLAN, EQUAL | {"score": (0.3, 0.7)}, step=2), "rollback", "failure_loss"),
    ],
)  # fmt: skip
def test_each_rule_decides_where_it_applies(records: Fixed, action: str, rule: str) -> None:
    decision = advance(records, "d", now=10.0)
    assert (decision.action, decision.rule) == (action, rule), decision.reason
    assert len(records.written) == (action != "continue")


def test_a_cost_that_doubles_is_harm_and_one_within_the_tolerated_loss_is_not() -> None:
    metrics = (Metric(success_gain=0.0), Metric(name="cost_usd", failure_loss=0.5))
    plan = Plan(steps=PLAN.steps, metrics=metrics)
    cost = metrics[1]

    class Costs(Fixed):
        def evidence(self, name: str, metric: Metric, now: float) -> Arms:
            if metric.name == "score":
                return super().evidence(name, metric, now)
            cells = {
                arm: cell_of([(f"{arm}{at}", 1, cost.value(usd)) for at in range(200)], salt="s")
                for arm, usd in zip((CANDIDATE, CHAMPION), self.values["cost_usd"], strict=True)
            }
            return {(self.now.step, "t"): cells}

    for usd, action in ((0.04, "rollback"), (0.022, "next")):
        assert advance(Costs(plan, EQUAL | {"cost_usd": (usd, 0.02)}), "d", now=1.0).action == action


def test_planned_evaluations_are_used_one_by_one() -> None:
    plan = replace(PLAN, test="obrien_fleming", evaluations=4)
    records = Fixed(plan, EQUAL, units=200, step=1)  # 400 of 2,000 rollouts: the first is planned at 500
    assert advance(records, "d", now=1.0).evaluated is False
    records.count = 300
    assert advance(records, "d", now=1.0).evaluated is True
    assert advance(records, "d", now=1.0).evaluated is False
    records.values = EQUAL | {"score": (0.99, 0.6)}
    records.count = 500
    assert advance(records, "d", now=1.0).action == "next"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Plan(steps=(Step(weight=50, decides=True), Step(weight=10))), "must not decrease; they are 50, 10"),
        (lambda: Plan(steps=(Step(weight=50), Step(weight=100))), "exactly one step must decide"),
        (lambda: Plan(steps=(Step(weight=100, decides=True),)), "must be below 100"),
        (lambda: Plan(steps=(Step(weight=50, decides=True), Step(shadow=True), Step(weight=95))), "only the first"),
        (lambda: Plan(steps=()), "at least one step"),
        (lambda: Plan(metrics=(Metric(),)), "needs success_gain"),
        (lambda: Plan(metrics=(Metric(success_gain=0.1), Metric())), "named twice"),
        (lambda: Plan(metrics=({"nmae": "score"},)), "Did you mean 'name'"),
        (lambda: Metric(name="latency"), "Did you mean 'latency_s'"),
        (lambda: Metric(name="error_rate", failure_above=3), "between 0 and 1"),
        (lambda: Metric(name="tokens", failure_above=0), "above 0"),
        (lambda: Step(), "needs a weight above 0"),
        (lambda: Step(weight=120), "weight: must be less than or equal to 100"),
        (lambda: Step(shadow=True, weight=10), "does not decide: leave out"),
        (lambda: Step(weight=10, max_requests=5), "does not decide"),
    ],
)  # fmt: skip
def test_plans_that_cannot_work_are_refused(change: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change()


def test_a_plan_in_a_file_is_the_same_plan(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN.to_dict()))
    assert load_plan(path) == PLAN
    path.write_text("steps: 3\n")
    with pytest.raises(ConfigError, match=r"plan\.yaml:1: steps: "):
        load_plan(path)
    path.write_text("steps: []\nmetrisc: []\n")
    with pytest.raises(ConfigError, match="metrics"):
        load_plan(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "share", "least", "most"),
    [
        ({}, "promoted", 0.0, 0.05),
        ({"drift": 0.2}, "promoted", 0.0, 0.05),
        ({"effect": 0.25, "delay_s": 100.0, "missing": 0.1}, "promoted", 0.9, 1.0),
        ({"effect": -0.25}, "rolled_back", 0.95, 1.0),
        ({"heavy": 1.2, "users": 200}, "rolled_back", 0.0, 0.05),
    ],
)
def test_deployment_plans_keep_their_error_rates(truth: dict[str, Any], share: str, least: float, most: float) -> None:
    horizon = 3 * truth.get("delay_s", 0.0)
    plan = replace(default_plan(), metrics=(Metric(success_gain=0.1, horizon_s=horizon),))
    report = simulate(plan, Traffic(**truth), runs=30, seed=5, interval=200)
    assert least <= getattr(report, share) <= most + 0.03, report


@pytest.mark.parametrize("shadow", [0, 10**9])
def test_a_plan_that_hardly_ends_is_simulated_within_a_limit(shadow: int) -> None:
    steps = (Step(weight=50, decides=True, requests=10**9, max_requests=10**9), Step(weight=95))
    plan = Plan(steps=(Step(shadow=True, requests=shadow), *steps) if shadow else steps)
    report = simulate(plan, Traffic(users=50), runs=40, most_requests=1000, total_requests=2500)
    assert (report.runs, report.undecided, report.rules) == (3, 1.0, {"requests": 3})
    assert report.step_requests[0] == 1000


def test_an_amount_is_shown_in_its_unit_and_as_the_share_saved() -> None:
    stored = {
        "metric": "latency_s", "gain": math.log(2), "standard_error": 0.1, "low": 0.0, "high": None,
        "champion": math.log(0.5), "candidate": math.log(0.25), "counts": {}, "missing": {}, "bounds": [None, None],
    }  # fmt: skip
    reading = json_value(stored_reading(stored).in_units())
    assert (reading["champion"], reading["candidate"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert (reading["gain"], reading["low"], reading["high"]) == (pytest.approx(0.5), 0.0, None)
    assert reading["standard_error"] == pytest.approx(0.05)
    score = stored_reading({**stored, "metric": "score"})
    assert score.in_units() is score
