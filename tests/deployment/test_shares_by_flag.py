"""A flag changes the share of the candidate within a step, while the base rate of production drifts."""

import time
from pathlib import Path

import pytest
from production import two_versions

from assay.deployment.evidence import difference
from assay.deployment.plan import Metric, Plan, Step
from assay.traces import Rollout, Store

PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


def serve(store: Store, deployment: str, *, share: float, rate: float, name: str) -> None:
    """200 rollouts without an effect: exactly this share is on the candidate, and both arms succeed at this rate."""
    for number in range(200):
        arm = "candidate" if number % 10 < 10 * share else "champion"
        store.put_rollout(Rollout(
            task_id=f"{name}{number}", inputs={}, phase="deployed", version="support@1", status="done",
            started_at=time.time() - 5, ended_at=time.time() - 4, unit=f"{name}{number}", deployment=deployment,
            stage=0, arm=arm, propensity=share if arm == "candidate" else 1 - share,
            score=float(number // 10 % 10 < 10 * rate),
        ))  # fmt: skip


def test_a_percentage_set_by_a_flag_does_not_make_a_gain(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", PLAN)
        serve(store, deployment.id, share=0.1, rate=0.3, name="a")  # percentage=10
        serve(store, deployment.id, share=0.9, rate=0.8, name="b")  # percentage=90, some days later
        store.flush()
        cells = deployments.evidence(deployment.id, PLAN.metrics[0], time.time())
        assert sorted(cells) == [(0, "default"), (0, "default, 90.0000% on the candidate")]
        estimate = difference(cells)
    # pooled: (0.1 * 0.3 + 0.9 * 0.8) - (0.9 * 0.3 + 0.1 * 0.8) = 0.4
    assert estimate.mean == pytest.approx(0.0, abs=1e-9)
