"""Versions that hold the data of an erased person are named, or retired by policy; erasure can be of one tenant."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from production import artifact, two_versions

from assay.cli.main import group
from assay.commands.traces import forget_subject
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import set_flag
from assay.deployment.routing import Router
from assay.deployment.watching import watched
from assay.errors import ConfigError, DeploymentError
from assay.traces import Rollout, Store, Transition
from assay.traces.records import subject_digest

ANN = subject_digest("Ann")
WATCH = {"name": "error_rate", "above": 0.2, "action": "rollback"}
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),), watch=(WATCH,))


def of_ann(store: Store, folder: Path) -> Deployments:
    """`support`: 1 is the champion, 2 holds Ann's data and 3 does not; 2 is `best` too."""
    deployments = two_versions(store, folder)
    registry = deployments.registry
    third = artifact(folder / "three", "return dspy.Prediction(answer='third')")
    registry.register("support", third)
    registry.register("other", third, people=[ANN])  # the same folder as another agent's, by people
    store.put_artifact(str((folder / "two").resolve()), [ANN])
    registry.set_alias("support@2", "best")
    return deployments


def test_by_default_versions_are_named_and_nothing_changes(own_folder: Path) -> None:
    with Store() as store:
        deployments = of_ann(store, own_folder)
        aliases = deployments.registry.aliases("support")
        rows = {row["version"]: row for row in forget_subject("ann").to_dict()["versions"]}
        assert set(rows) == {"support@2", "other@1"}
        assert rows["support@2"]["aliases"] == ["best"]
        assert not any(row["retired"] or row["is_champion"] for row in rows.values())
        assert deployments.registry.aliases("support") == aliases
        deployments.start("support@2", PLAN)
    with pytest.raises(ConfigError, match="must be one of name, retire"):
        forget_subject("ann", versions="delete")


def test_a_retired_version_leaves_aliases_deployments_pins_and_preferences(own_folder: Path) -> None:
    with Store() as store:
        deployments = of_ann(store, own_folder)
        registry, deployment = deployments.registry, deployments.start("support@2", PLAN)
        set_flag(store.engine, "support", "pin:tenant:acme", 2)
        rows = forget_subject("ann", versions="retire").versions
        row = next(row for row in rows if row["version"] == "support@2")
        assert (row["retired"], row["deployment"]) == (True, deployment.id)
        assert deployments.get(deployment.id).state.status == "rolled_back"
        assert registry.aliases("support") == {"champion": 1}
        removed = [(c.alias, c.number) for c in registry.alias_history("support") if "is retired" in c.why]
        assert sorted(removed) == [("best", 0), ("candidate", 0)]
        assert Router(store.engine, "support").assign("u", tenant="acme").version.number == 1
        for refused in (
            lambda: deployments.start("support@2", PLAN), lambda: registry.set_alias("support@2", "best"),
            lambda: registry.version("support@best"),
        ):  # fmt: skip
            with pytest.raises(DeploymentError, match=r"is retired|no version 'best'"):
                refused()
        assert forget_subject("ann", versions="retire").to_dict()["versions"][1]["aliases"] == []  # again: nothing more
        assert list(registry.retired("support")) == [2]
        output = CliRunner().invoke(group, ["registry", "show", "support@2"]).output
        assert "best removed" in output


def test_a_champion_is_named_loudly_and_a_promotion_is_not_rolled_back_to_a_retired_version(own_folder: Path) -> None:
    with Store() as store:
        deployments = of_ann(store, own_folder)
        deployments.registry.set_alias("support@2", "champion")
        deployment = deployments.start("support@3", PLAN)
        output = CliRunner().invoke(group, ["traces", "forget", "ann", "--versions", "retire"])
        assert "WARNING: support@2 is the champion and stays in production" in output.output
        assert deployments.registry.aliases("support")["champion"] == 2
        assert deployments.get(deployment.id).state.status == "running"  # the way out of it
        deployments.order(deployment.id, "promote")
        with pytest.raises(DeploymentError, match="support@2 is retired"):
            deployments.order(deployment.id, "rollback")
        at = deployments.history(deployment.id)[-1]["at"] + 1
        for _ in range(120):
            store.put_rollout(
                Rollout(status="failed", phase="deployed", version="support@3", started_at=at, ended_at=at)
            )
        store.flush()
        alarm = watched(deployments, deployments.get(deployment.id), at)
        assert alarm is not None
        assert (alarm.action, alarm.reason.endswith("not rolled back, because support@2 is retired")) == ("alarm", True)
        assert deployments.registry.aliases("support")["champion"] == 3


def test_an_erasure_of_one_tenant_leaves_the_others(own_folder: Path) -> None:
    request = {"dialect": "chat", "body": {"messages": [{"role": "user", "content": "?"}]}}
    fields: dict[str, Any] = {"data_subject": "Ann", "status": "done", "ended_at": 2.0, "program": "p"}
    with Store() as store:
        for tenant in ("acme", "other", None):
            rollout = Rollout(tenant=tenant, inputs={"question": f"of {tenant}"}, **fields)
            store.put_rollout(rollout)
            store.put_transition(rollout.id, Transition(t=0, model="m", request=request, output="!"))
        store.flush()
        assert forget_subject(" ann", tenant="acme").to_dict()["removed"] == 1
        assert sorted(str(rollout.tenant) for rollout in store.rollouts()) == ["None", "other"]
        assert all(store.rollout(rollout.id).transitions[0].request == request for rollout in store.rollouts())
        forgotten = store.forgotten()
        assert forgotten.covers(ANN, "acme")
        assert not forgotten.covers(ANN, "other")
        assert not forgotten.covers(ANN, None)
        assert forget_subject("ann").to_dict()["removed"] == 2
        assert store.forgotten().covers(ANN, "other")
