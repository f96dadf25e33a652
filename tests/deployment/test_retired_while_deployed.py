"""A version is retired while another process deploys, promotes or names it: one of them waits for the other."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from production import two_versions

from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.errors import DeploymentError
from assay.traces import Store

PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


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
    retired_during(deployments, lambda: deployments.start("support@2", PLAN), "INSERT INTO deployments")
    deployment = deployments.get("support")
    assert (deployments.active("support"), deployment.state.status) == (None, "rolled_back")
    assert deployments.registry.aliases("support") == {"champion": 1}
    (row,) = deployments.history(deployment.id)
    assert (row["action"], row["reason"]) == ("rollback", "the candidate is retired: erased")


def test_a_version_that_was_retired_before_the_transaction_is_not_deployed(deployments: Deployments) -> None:
    def start() -> None:
        with pytest.raises(DeploymentError, match="support@2 is retired"):
            deployments.start("support@2", PLAN)

    retired_during(deployments, start, "UPDATE agent_versions")
    assert deployments.all("support") == []
    assert deployments.registry.aliases("support") == {"champion": 1}


def test_a_version_that_is_retired_while_it_is_named_loses_the_alias(deployments: Deployments) -> None:
    registry = deployments.registry
    retired_during(deployments, lambda: registry.set_alias("support@2", "best"), "INSERT INTO agent_aliases")
    assert registry.aliases("support") == {"champion": 1}


def test_a_rollback_of_a_promotion_names_no_retired_version(deployments: Deployments) -> None:
    deployment = deployments.start("support@2", PLAN)
    deployments.order(deployment.id, "promote")
    assert deployments.registry.aliases("support")["previous"] == 1
    assert deployments.retire(deployments.registry.version("support@2"), why="erased") is None
    assert deployments.registry.aliases("support")["champion"] == 2  # it stays in production
    deployments.order(deployment.id, "rollback")
    assert deployments.registry.aliases("support") == {"champion": 1}
