"""The gateway's own evaluations of a deployment, and the validation suite that is kept with it."""

import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from production import two_versions

import assay
from assay.commands.advancing import Advancer
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import set_suite, suite_of
from assay.deployment.settings import Suite, SuiteResult
from assay.errors import DeploymentError
from assay.rubrics import Criterion, Rubric
from assay.traces import Store

SHADOW = Plan(
    steps=(Step(shadow=True, requests=4), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),)
)  # fmt: skip
RUBRIC = Rubric("any", [Criterion(name="any", weight=1, check=lambda task, prediction, rollout: True)])


def test_gateways_advance_a_deployment_once_and_replay_no_rollout_twice(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        production = assay.deployed("support", rubric=RUBRIC)
        for at in range(4):
            production(question=str(at))
        production.store.flush()
        advancers = [Advancer(production.store, "support", rubric=RUBRIC, every_s=0.01) for _ in range(2)]
        assert advancers[0].once() == 0.0  # no deployment
        deployment = deployments.start("support@2", SHADOW)
        ready = threading.Barrier(2)

        def advance(advancer: Advancer) -> None:
            ready.wait()
            advancer.once()

        threads = [threading.Thread(target=advance, args=(advancer,)) for advancer in advancers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        production.store.flush()
        advancers[0].start()
        advancers[0].stop()
        assert [row["action"] for row in deployments.history(deployment.id)] == ["next"]
        assert deployments.requests(deployment.id, 0, 0.0) == {"candidate": 4}


def test_the_suite_of_an_agent_is_kept_with_its_deployment(own_folder: Path) -> None:
    data = own_folder / "suite.jsonl"
    data.write_text("{}")
    with Store() as store:
        deployments = two_versions(store, own_folder)
        assert suite_of(store.engine, "support") is None
        set_suite(
            store.engine, "support", Suite(data=str(data), rubric="exact", threshold=0.5, pass_rate=0.8), why="v1"
        )
        suite = suite_of(store.engine, "support")
        assert suite == Suite(data=str(data), rubric="exact", threshold=0.5, pass_rate=0.8)
        # 2 of 4 tasks reach 0.5; mean of the scored ones (1 + 1 + 0.25) / 3
        result = SuiteResult.of(suite, {"a": 1.0, "b": 1.0, "c": 0.25, "d": float("nan")}, (0.1, 1.0))
        assert (result.score, result.pass_rate, result.n, result.unscored) == (0.75, 0.5, 4, 1)
        assert result.missed == ("passes 50.0% of the validation suite's tasks, 80.0% are needed",)
        checks = {"suite": asdict(result), "breaks": ["outputs: …"], "changes": [], "forced": True}
        deployment = deployments.start("support@2", SHADOW, checks=checks)
        first = deployments.history(deployment.id)[0]
        assert (first["action"], first["number"], first["suite"]["pass_rate"]) == ("start", 0, 0.5)
        assert "forced: outputs: …; passes 50.0%" in first["reason"]
        data.write_text("[]")
        with pytest.raises(DeploymentError, match=r"suite\.jsonl, which is missing here or was changed since"):
            suite_of(store.engine, "support")
