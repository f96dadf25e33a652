"""Watches: alarms on the candidate's rollouts while it is deployed and after its promotion."""

import time
from pathlib import Path
from typing import Any

import pytest
from production import two_versions

from assay.commands.advancing import Advancer
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.watching import watched
from assay.errors import ConfigError
from assay.rubrics.checks import refusal
from assay.traces import Rollout, Store, Transition

WATCH = (
    {"name": "parse_error_rate", "above": 0.1},
    {"name": "input_drift", "above": 0.3, "action": "pause"},
    {"name": "error_rate", "above": 0.2, "action": "rollback"},
)
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),), watch=WATCH)


def serve(store: Store, version: int, kind: str, *, failed: int = 0, unparsed: int = 0, age_s: float = 0.0) -> None:
    """120 rollouts in production, some of them failed or with a parse failure."""
    at = time.time() - age_s
    for number in range(120):
        rollout = Rollout(
            task_id=f"{kind}{number}", task_type=kind, inputs={"question": "?"}, phase="deployed", started_at=at,
            version=f"support@{version}", ended_at=at, status="failed" if number < failed else "done",
        )  # fmt: skip
        store.put_rollout(rollout)
        if unparsed:
            call = Transition(t=0, model="m", request={}, response={}, output="?", started_at=at)
            call.failure = "parse" if number < unparsed else None  # type: ignore[assignment]
            store.put_transition(rollout.id, call)
    store.flush()


def test_a_promoted_version_that_fails_is_taken_back_and_each_alarm_is_given_once(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        serve(store, 1, "bills", age_s=3600)
        deployment = deployments.start("support@2", Plan(**PLAN.to_dict()))
        assert watched(deployments, deployment) is None
        deployments.order(deployment.id, "promote")
        serve(store, 2, "bills", unparsed=60)
        advancer = Advancer(store, "support")
        assert advancer.once() > 0
        assert [row["action"] for row in deployments.history(deployment.id)] == ["promote", "alarm"]
        serve(store, 2, "parcels")
        advancer.once()  # what was an alarm is not given again; a pause of a promoted version is an alarm
        last = deployments.history(deployment.id)[-1]
        assert (last["action"], last["watch"]) == ("alarm", "input_drift above 0.3")
        assert "new: parcels" in last["reason"]
        serve(store, 2, "bills", failed=120)
        advancer.once()
        last = deployments.history(deployment.id)[-1]
        assert (last["action"], last["rule"], last["watch"]) == ("rollback", "watch", "error_rate above 0.2")
        assert deployments.registry.aliases("support")["champion"] == 1
        assert advancer.once() == 0.0
        assert Deployments(store.engine).get(deployment.id).state.status == "rolled_back"


@pytest.mark.parametrize(
    ("watch", "reason"),
    [
        ({"name": "latency_s", "above": 2.0}, "the median of latency_s of support@2 is 3, above 2 (50 values)"),
        ({"name": "cost_usd", "above": 0.01}, "the median of cost_usd of support@2 is 0.02, above 0.01 (50 values)"),
        ({"name": "tokens", "above": 2000}, "the median of tokens of support@2 is 2.5e+03, above 2000 (50 values)"),
    ],
)
def test_a_slow_or_expensive_version_is_taken_back(own_folder: Path, watch: dict[str, Any], reason: str) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        plan = Plan(**{**PLAN.to_dict(), "watch": ({**watch, "action": "rollback"},)})
        deployment = deployments.start("support@2", plan)
        deployments.order(deployment.id, "promote")
        for size in (0.1, 1.0):
            assert watched(deployments, deployments.get(deployment.id)) is None  # cheap so far
            for number in range(10 if size < 1 else 40):
                at = time.time()
                rollout = Rollout(
                    task_id=f"{number}", inputs={}, phase="deployed", version="support@2", started_at=at,
                    ended_at=at + 3 * size + 500 * (number == 0), status="done",
                )  # fmt: skip
                store.put_rollout(rollout)
                call = Transition(t=0, model="m", request={}, response={}, output="?", started_at=at)
                call.cost_usd, call.prompt_tokens = 0.02 * size, int(2500 * size)
                store.put_transition(rollout.id, call)
            store.flush()
        alarm = watched(deployments, deployments.get(deployment.id))
        assert alarm is not None
        assert (alarm.action, alarm.reason) == ("rollback", reason)
        assert deployments.registry.aliases("support")["champion"] == 1


def test_limits_and_names_of_watches_are_checked_and_refusals_are_recognized() -> None:
    for wrong, message in (
        ({"name": "eror_rate", "above": 0.1}, "Did you mean 'error_rate'"),
        ({"name": "score"}, "needs one limit"),
        ({"name": "score", "below": 1.5}, "must be between 0 and 1"),
        ({"name": "score", "below": 0.1, "acton": "pause"}, "acton"),
    ):
        with pytest.raises(ConfigError, match=message):
            Plan(watch=(wrong,))
    for answer, grade in (
        ("I’m sorry, but I can’t help with that.", 1.0), ("As an AI language model I am unable to say.", 1.0),
        ("I cannot assist with this request.", 1.0), ("The parcel arrives on Monday.", 0.0),
        ("You can't miss it: it is beside the station.", 0.0),
    ):  # fmt: skip
        assert refusal(None, {"answer": answer}, None).value == grade  # type: ignore[arg-type]
