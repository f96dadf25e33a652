"""Missing values: bounds of a decision, never of a mean; arms that miss different shares; candidates that hang."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from production import two_versions

import assay
from assay.deployment.decisions import advance
from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, cell_of
from assay.deployment.plan import Metric, Plan, Step, default_plan
from assay.deployment.readings import Paired, reading_of, replayed_reading, uncomparable
from assay.deployment.routing import Router
from assay.deployment.settings import Traffic
from assay.deployment.simulation import simulate
from assay.errors import ConfigError, FailureKind
from assay.models.limits import OverTime
from assay.traces import Rollout, Store

SCORE = Metric(success_gain=0.0)
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(SCORE,))


def arms(*, candidate: tuple[int, int, int], champion: tuple[int, int, int], running: int = 0) -> Arms:
    """Right, wrong and missing answers of each arm, one of each user."""
    cells = {}
    for arm, (right, wrong, missing) in ((CANDIDATE, candidate), (CHAMPION, champion)):
        units = [(f"{arm}{at}", 1, float(at < right)) for at in range(right + wrong)]
        cells[arm] = cell_of(units, salt="s", missing=missing, running=running)
    return {(0, "t"): cells}


def low(missing: str, of: Arms, metric: Metric = SCORE) -> float:
    return reading_of(replace(PLAN, missing=missing, metrics=(metric,)), 0, metric, of).low


def test_failures_without_a_score_are_no_gain() -> None:
    """700 of 1,000 are right in both arms; the champion loses 90 of its failures, the candidate 180."""
    of = arms(candidate=(700, 120, 180), champion=(700, 210, 90))
    reading = reading_of(PLAN, 0, SCORE, of)
    assert (reading.champion, reading.candidate) == (pytest.approx(700 / 910), pytest.approx(700 / 820))  # the scored
    assert reading.gain == pytest.approx(700 / 820 - 700 / 910)
    assert low("propensity", of) > 0  # as if they were missing at random
    assert low("bounds", of) < low("alike", of) < 0
    assert reading.missing_by == "alike"


def test_without_missing_values_the_assumption_changes_nothing() -> None:
    of = arms(candidate=(800, 200, 0), champion=(700, 300, 0))
    assert low("alike", of) == low("bounds", of) == low("propensity", of) > 0
    assert reading_of(PLAN, 0, SCORE, of).missing_by == ""


def test_successes_without_a_score_are_no_gain_where_lower_is_better() -> None:
    """300 of 1,000 refuse in both arms; the candidate loses 100 of its refusals."""
    refusals = Metric(name="refusal_rate", success_gain=0.0)
    of = arms(candidate=(200, 700, 100), champion=(300, 700, 0))
    assert low("propensity", of, refusals) > 0 > low("alike", of, refusals)


def test_harm_is_not_claimed_from_what_is_missing() -> None:
    """The champion loses its failures: it only looks better."""
    of = arms(candidate=(700, 300, 0), champion=(700, 120, 180))
    highs = {by: reading_of(replace(PLAN, missing=by), 0, SCORE, of).high for by in ("alike", "propensity")}
    assert highs["propensity"] < 0 < highs["alike"]


@pytest.mark.parametrize("missing", ["alike", "bounds", "propensity"])
def test_a_real_gain_is_shown_where_few_are_missing_in_both_arms(missing: str) -> None:
    of = arms(candidate=(760, 190, 50), champion=(665, 285, 50))  # 0.8 and 0.7, 5 % missing
    assert (low(missing, of) > 0) == (missing != "bounds")  # by bounds 0.76 - 0.715 on 1,000 is too little
    assert low(missing, arms(candidate=(2820, 150, 30), champion=(2079, 891, 30))) > 0


@pytest.mark.parametrize(
    ("candidate", "champion", "pauses"),
    [
        ((700, 120, 180), (700, 210, 90), True),
        ((700, 210, 90), (700, 120, 180), True),
        ((3500, 1455, 45), (3500, 1500, 0), False),  # 0.9 and 0 %: a small difference
        ((700, 250, 50), (700, 250, 50), False),
        ((7000, 2990, 10), (7000, 3000, 0), False),  # 1 of 1,000
        ((5, 2, 3), (7, 3, 0), False),  # too few
    ],
)
def test_different_shares_without_a_value_pause(
    candidate: tuple[int, int, int], champion: tuple[int, int, int], pauses: bool
) -> None:
    of = arms(candidate=candidate, champion=champion)
    assert (uncomparable(PLAN, SCORE, reading_of(PLAN, 0, SCORE, of), of) is not None) == pauses


def test_shares_that_differ_between_steps_alone_do_not_pause() -> None:
    """Half the rollouts of the first step have no score, in both arms; a tenth of them is on the candidate."""
    first = arms(candidate=(40, 10, 50), champion=(360, 90, 450))[0, "t"]
    second = arms(candidate=(700, 300, 0), champion=(700, 300, 0))[0, "t"]
    of = {(0, "t"): first, (1, "t"): second}
    assert uncomparable(PLAN, SCORE, reading_of(PLAN, 0, SCORE, of), of) is None


def test_replays_without_a_score_are_no_harm() -> None:
    plan = default_plan()
    worse = Paired(differences=[-0.2] * 60 + [0.0] * 20, champion=0.7)
    readings = {
        (by, missing): replayed_reading(replace(plan, missing=by), SCORE, replace(worse, missing=missing))
        for by in ("bounds", "alike", "propensity") for missing in (0, 40)
    }  # fmt: skip
    assert len({reading.gain for reading in readings.values()}) == 1
    assert len({readings[by, 0].high for by in ("bounds", "alike", "propensity")}) == 1
    assert readings["propensity", 40].high == readings["propensity", 0].high
    assert readings["bounds", 40].high > readings["alike", 40].high


def rollout(deployment: str, arm: str, at: int, began: float, **more: Any) -> Rollout:
    return Rollout(
        task_id=f"{arm}{at}", inputs={}, phase="deployed", version="support@1", unit=f"{arm}{at}", arm=arm,
        deployment=deployment, stage=0, propensity=0.5, started_at=began, **{"ended_at": began + 1, **more},
    )  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "the agent failed": {"status": "failed"},
    "the server failed": {"status": "error"},
    "the judge gave no verdict": {"status": "done"},
    "it never ended": {"status": "running", "ended_at": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_missing_score_is_bounded_and_pauses(own_folder: Path, kind: str) -> None:
    now = time.time()
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", PLAN).id
        for at in range(200):
            fails, began = at % 10 < 3, now - 2000 + at
            store.put_rollout(rollout(deployment, "champion", at, began, status="done", score=float(not fails)))
            lost = KINDS[kind] if fails else {"status": "done", "score": 1.0}  # the candidate loses its failures
            store.put_rollout(rollout(deployment, "candidate", at, began, **lost))
        store.flush()
        decision = advance(deployments, deployment, now)
    (reading,) = decision.readings
    assert (decision.action, decision.rule) == ("pause", "missing")
    assert reading.missing == {"champion": 0, "candidate": 60}
    assert (reading.candidate, reading.gain) == (1.0, pytest.approx(0.3))  # of the scored ones
    assert reading.low < 0


@pytest.mark.parametrize("fades", [True, False])
def test_a_gain_that_is_not_shown_in_the_newer_half_of_a_step_does_not_promote(own_folder: Path, fades: bool) -> None:
    now = time.time()
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", PLAN).id
        for at in range(1200):
            rates = {"champion": 6, "candidate": 9 if at < 600 or not fades else 6}
            for arm, rate in rates.items():
                score = float(at % 10 < rate)
                store.put_rollout(rollout(deployment, arm, at, now - 5000 + at, status="done", score=score))
        store.flush()
        decision = advance(deployments, deployment, now + 60)
    assert decision.action == ("continue" if fades else "promote"), decision.reason
    assert decision.readings[0].low > 0
    assert decision.readings[0].newer == pytest.approx(0.0 if fades else 0.3, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("champion", "candidate"), [(0.3, 0.6), (0.0, 0.1)])
def test_lost_failures_neither_promote_nor_roll_back(champion: float, candidate: float) -> None:
    traffic = Traffic(unscored_failures=champion, candidate_unscored_failures=candidate)
    report = simulate(default_plan(gain=0.0), traffic, runs=20, seed=3, interval=100)
    assert (report.promoted, report.rolled_back) == (0.0, 0.0), report


# -- a candidate that hangs


STEPS = (Step(weight=50, requests=20), Step(weight=50, decides=True))
TWO_STEPS = Plan(steps=STEPS, metrics=(Metric(success_gain=0.1), Metric(name="error_rate")))
RUBRIC = "name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
HANGS = "import time; time.sleep(600)"


@pytest.mark.timeout(120)
def test_a_rollout_over_its_limit_is_a_failure_of_the_agent(own_folder: Path) -> None:
    Path("r.yaml").write_text(RUBRIC)
    with Store() as store:
        two_versions(store, own_folder, HANGS)
    agent = assay.deployed("support@2", rubric="r.yaml", timeout_s=0.1)
    with pytest.raises(OverTime, match="the agent took longer than the limit"):
        agent(question="?", expected={"answer": "yes"})
    agent.store.flush()
    (rollout,) = agent.store.rollouts()
    assert (rollout.status, rollout.failure, rollout.score) == ("failed", FailureKind.TIMEOUT, 0.0)
    with pytest.raises(ConfigError, match="timeout_s: must be greater than 0"):
        assay.deployed("support", timeout_s=0)


def test_the_champion_answers_for_a_version_that_hangs(own_folder: Path) -> None:
    waits = "exec('import pathlib, time\\nwhile not pathlib.Path(\\'go\\').exists(): time.sleep(0.01)')"
    with Store() as store:
        deployments = two_versions(store, own_folder, f"{waits}; return dspy.Prediction(answer='late')")
        deployment = deployments.start("support@2", TWO_STEPS)
        router = Router(store.engine, "support")
        units = [f"u{at}" for at in range(40) if router.assign(f"u{at}").arm == CANDIDATE]
    agent = assay.deployed("support")
    agent.hanging, agent.long_s = 2, 0.1
    with ThreadPoolExecutor(2) as threads:
        late = [threads.submit(agent, question="?", unit=unit) for unit in units[:2]]
        try:
            while len(list(agent.store.rollouts())) < 2:  # both have begun
                agent.store.flush()
            time.sleep(0.2)
            assert agent(question="?", unit=units[2]).version == "support@1"
            assert agent.fallbacks == {"support@2": 1}
        finally:
            Path("go").touch()
        assert [answer.result().answer for answer in late] == ["late", "late"]
    assert agent(question="?", unit=units[2]).version == "support@2"
    agent.store.flush()
    rollouts = [agent.store.rollout(rollout.id) for rollout in agent.store.rollouts()]
    assert [r.deployment for r in rollouts if r.version == "support@1"] == [None]
    assert {r.deployment for r in rollouts if r.version == "support@2"} == {deployment.id}


def test_no_step_ends_while_the_candidate_runs_and_later_its_rollouts_are_missing(own_folder: Path) -> None:
    with Store("a.db") as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", TWO_STEPS)
        router, now = Router(store.engine, "support"), time.time()
        for at in range(80):
            fields = router.assign(f"u{at}").fields()
            ended = {"status": "done", "ended_at": now, "score": 0.7} if fields["arm"] == CHAMPION else {}
            made = Rollout(phase="deployed", task_id=f"t{at}", inputs={"q": "?"}, **{**fields, **ended})
            made.started_at = now - 1
            store.put_rollout(made)
        store.flush()
        first = advance(deployments, deployment.id, now + 1)
        later = advance(deployments, deployment.id, now + 700)
    assert (first.action, first.rule) == ("continue", "step")
    assert "rollouts of the candidate have not ended, 0 have: it hangs" in first.reason
    assert (later.action, later.rule) == ("pause", "missing")
    assert "100% of the candidate and 0% of the champion" in later.reason


@pytest.mark.parametrize(("horizon_s", "ahead_s"), [(100.0, 0.0), (0.0, 100.0)], ids=["horizon", "clock ahead"])
def test_a_step_does_not_end_on_rollouts_that_have_no_value_yet(
    own_folder: Path, horizon_s: float, ahead_s: float
) -> None:
    plan = Plan(steps=STEPS, metrics=(Metric(success_gain=0.1, horizon_s=horizon_s),))
    with Store("a.db") as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", plan)
        router, now = Router(store.engine, "support"), time.time()
        for at in range(80):
            fields = {**router.assign(f"u{at}").fields(), "status": "done", "ended_at": now + ahead_s, "score": 0.7}
            store.put_rollout(Rollout(phase="deployed", task_id=f"t{at}", inputs={"q": "?"}, **fields))
        store.flush()
        first = advance(deployments, deployment.id, now + 1)
        later = advance(deployments, deployment.id, now + 101)
    assert (first.action, later.action) == ("continue", "next")
    assert "80 of 20 rollouts at 50 %, 0 of them older than every horizon" in first.reason


def test_a_step_does_not_end_before_anything_was_scored(own_folder: Path) -> None:
    with Store("a.db") as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", TWO_STEPS)
        router, now, decisions = Router(store.engine, "support"), time.time(), []
        rows = [
            Rollout(
                phase="deployed", task_id=f"t{at}", inputs={"q": "?"}, status="done", ended_at=now,
                **router.assign(f"u{at}").fields(),
            )
            for at in range(80)
        ]  # fmt: skip
        for score in (None, 0.7):
            for row in rows:
                row.score = score
                store.put_rollout(row)
            store.flush()
            decisions.append(advance(deployments, deployment.id, now + 1))
    assert [decision.action for decision in decisions] == ["continue", "next"]
    assert "none of them has a value of score, so harm could not show; score them" in decisions[0].reason
