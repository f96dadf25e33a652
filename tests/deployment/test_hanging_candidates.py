"""A candidate that hangs: its rollouts have a limit, they are missing, and no step ends because of them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from production import two_versions

import assay
from assay.deployment.decisions import advance
from assay.deployment.evidence import CANDIDATE, CHAMPION
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.routing import Router
from assay.errors import ConfigError, FailureKind
from assay.models.limits import OverTime
from assay.traces import Rollout, Store

STEPS = (Step(weight=50, requests=20), Step(weight=50, decides=True))
PLAN = Plan(steps=STEPS, metrics=(Metric(success_gain=0.1), Metric(name="error_rate")))
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
        deployment = deployments.start("support@2", PLAN)
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
        deployment = deployments.start("support@2", PLAN)
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
