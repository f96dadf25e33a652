"""A store with a running deployment: its row, and rollouts of both arms."""

from typing import Any

import sqlalchemy as sa
from pages import NOW, rollout_of_sums

from assay.deployment.plan import Metric, Plan, Step
from assay.traces import Store
from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json

DEPLOYMENT = "d" * 32
PLAN = Plan(
    steps=(Step(weight=50.0, requests=100), Step(weight=70.0, decides=True), Step(weight=100.0)),
    metrics=(Metric(name="score", success_gain=0.05), Metric(name="error_rate", failure_loss=0.1)),
)


def put_deployment(store: Store, *, agent: str = "support", rollouts: int = 30, **fields: Any) -> None:
    """Stores the deployment of version 2 in place of 1, with `rollouts` rollouts of each arm: the candidate is right in
    three of four, the champion in one of two."""
    row = {
        "id": DEPLOYMENT, "agent": agent, "champion": 1, "candidate": 2, "plan_json": as_json(PLAN.to_dict()),
        "status": "running", "stage": 0, "stage_at": NOW, "decided": 0, "evaluations": 0, "active": agent,
        "started_at": NOW, "started_by": agent, **fields,
    }  # fmt: skip
    with store.engine.begin() as connection:
        connection.execute(sa.insert(schema.deployments).values(**row))
    for number in range(rollouts):
        for place, (arm, right) in enumerate((("champion", number % 2), ("candidate", number % 4 > 0))):
            rollout_of_sums(
                store, 10 * number + place, source="gateway", deployment=DEPLOYMENT, stage=0, arm=arm,
                unit=f"{arm}{number}", propensity=0.5, score=float(right),
            )  # fmt: skip
    store.flush()
