"""Versions that hold an erased person's data are named, or retired, also while another process deploys them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from production import artifact, two_versions

from assay.cli import group
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


# -- retired while another process deploys, promotes or names it


UNWATCHED = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def deployments(request: pytest.FixtureRequest, own_folder: Path) -> Any:
    """The agent `support` with two versions."""
    where = request.getfixturevalue("empty_postgres_url") if request.param == "postgresql" else None
    with Store(where) as store:
        yield two_versions(store, own_folder)


def retired_during(deployments: Deployments, action: Callable[[], Any], before: str) -> None:
    """Retires version 2 in another thread when `action` is about to run a statement that begins with `before`."""
    version, own = deployments.registry.version("support@2"), threading.current_thread()
    thread = threading.Thread(target=deployments.retire, args=(version,), kwargs={"why": "erased"})

    def interrupt(_: Any, __: Any, statement: str, *___: Any) -> None:
        if threading.current_thread() is own and statement.startswith(before) and thread.ident is None:
            thread.start()
            thread.join(0.3)  # it ends by then unless it waits for the transaction

    sa.event.listen(deployments.engine, "before_cursor_execute", interrupt)
    try:
        action()
    finally:
        sa.event.remove(deployments.engine, "before_cursor_execute", interrupt)
        thread.join()


def test_a_version_that_is_retired_while_its_deployment_starts_is_rolled_back(deployments: Deployments) -> None:
    retired_during(deployments, lambda: deployments.start("support@2", UNWATCHED), "INSERT INTO deployments")
    deployment = deployments.get("support")
    assert (deployments.active("support"), deployment.state.status) == (None, "rolled_back")
    assert deployments.registry.aliases("support") == {"champion": 1}
    (row,) = deployments.history(deployment.id)
    assert (row["action"], row["reason"]) == ("rollback", "the candidate is retired: erased")


def test_a_version_that_was_retired_before_the_transaction_is_not_deployed(deployments: Deployments) -> None:
    def start() -> None:
        with pytest.raises(DeploymentError, match="support@2 is retired"):
            deployments.start("support@2", UNWATCHED)

    retired_during(deployments, start, "UPDATE agent_versions")
    assert deployments.all("support") == []
    assert deployments.registry.aliases("support") == {"champion": 1}


def test_a_version_that_is_retired_while_it_is_named_loses_the_alias(deployments: Deployments) -> None:
    registry = deployments.registry
    retired_during(deployments, lambda: registry.set_alias("support@2", "best"), "INSERT INTO agent_aliases")
    assert registry.aliases("support") == {"champion": 1}


def test_a_rollback_of_a_promotion_names_no_retired_version(deployments: Deployments) -> None:
    deployment = deployments.start("support@2", UNWATCHED)
    deployments.order(deployment.id, "promote")
    assert deployments.registry.aliases("support")["previous"] == 1
    assert deployments.retire(deployments.registry.version("support@2"), why="erased") is None
    assert deployments.registry.aliases("support")["champion"] == 2  # it stays in production
    deployments.order(deployment.id, "rollback")
    assert deployments.registry.aliases("support") == {"champion": 1}
