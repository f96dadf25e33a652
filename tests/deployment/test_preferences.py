"""Routing preferences: Thompson sampling over versions that were champions, with exact propensities."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from production import two_versions

from assay.deployment.evidence import unit_digest
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.routing import Quality, Router, choice, probabilities, qualities, set_preference
from assay.deployment.settings import Preference
from assay.errors import ConfigError, DeploymentError
from assay.traces import Rollout, Store

BOTH = Preference(versions=(1, 2), floor=0.1)


def test_the_better_version_of_each_task_type_is_found_and_propensities_are_right() -> None:
    rates = {"sums": {1: 0.6, 2: 0.8}, "words": {1: 0.8, 2: 0.6}}
    random = np.random.default_rng(7)
    for kind, best in (("sums", 2), ("words", 1)):
        counts, totals, planned, gained, shares = {1: 0, 2: 0}, {1: 0.0, 2: 0.0}, 0.0, 0.0, dict[int, float]()
        for batch in range(20):
            shares = probabilities(BOTH, {n: Quality(count=counts[n], total=totals[n]) for n in (1, 2)})
            assert (sum(shares.values()), min(shares.values()) >= 0.1) == (pytest.approx(1), True)
            for at in range(100):
                number = choice(unit_digest(f"{batch}-{at}"), kind, shares, salt="a")
                score = float(random.random() < rates[kind][number])
                counts[number] += 1
                totals[number] += score
                planned += shares[best]
                gained += score * (number == best) / shares[number]
        assert shares[best] > 0.85
        # 2,000 rollouts: the count of the better version is its sum of propensities, up to 4 standard errors of at
        # most sqrt(2000 / 4) = 22; weighted by them its score is unbiased
        assert abs(counts[best] - planned) < 90
        assert gained / 2000 == pytest.approx(0.8, abs=0.05)


def test_a_unit_stays_with_its_version_and_the_cost_can_decide() -> None:
    units = [unit_digest(str(at)) for at in range(2000)]
    before = [choice(unit, "t", {1: 0.5, 2: 0.5}, salt="a") for unit in units]
    after = [choice(unit, "t", {1: 0.4, 2: 0.6}, salt="a") for unit in units]
    moved = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    assert set(moved) == {(1, 2)}
    assert 0.07 < len(moved) / 2000 < 0.13
    measured = {1: Quality(count=200, total=160, cost_usd=0.01), 2: Quality(count=200, total=170, cost_usd=0.2)}
    assert probabilities(BOTH, measured)[2] > 0.7
    assert probabilities(Preference(versions=(1, 2), floor=0.1, cost_weight=1.0), measured)[1] > 0.8


@pytest.mark.parametrize("versions", ["12", ["x", "y"], [1.5, 2], [True, 2]])
def test_versions_that_are_no_whole_numbers_are_refused(versions: Any) -> None:
    with pytest.raises(ConfigError, match="versions: must be"):
        Preference(versions=versions)


def test_a_preference_holds_without_a_deployment_and_is_logged(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        with pytest.raises(DeploymentError, match="support@2 was never the champion"):
            set_preference(store.engine, "support", BOTH)
        with pytest.raises(ConfigError, match="versions: must be at least two versions"):
            Preference(versions=(1, 1))
        deployments.registry.set_alias("support@2", "champion")
        set_preference(store.engine, "support", BOTH, why="two good ones")
        for at in range(60):
            version = f"support@{1 + at % 2}"
            rollout = Rollout(task_id=f"t{at}", task_type="sums", status="done", score=float(at % 2), version=version)
            rollout.phase = "deployed"
            store.put_rollout(rollout)
        store.flush()
        assert qualities(store.engine, "support", BOTH)["sums"][2] == Quality(count=30, total=30.0)
        router = Router(store.engine, "support", refresh_s=0)
        assert router.shares()["sums"][2] == pytest.approx(0.9, abs=0.01)
        assignments = [router.assign(str(at), task_type="sums") for at in range(300)]
        assert sum(one.version.number == 2 for one in assignments) > 240
        assert {(one.arm, one.deployment) for one in assignments} == {("routed", None)}
        assert {router.assign(str(at), task_type="new").propensity for at in range(20)} == {0.5}
        deployments.start(
            "support@1", Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))
        )
        assert router.assign("u", task_type="sums").deployment is not None
