"""The loops in a store and the rows of their steps, on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.deployment.loops import Loops
from assay.deployment.registry import current_user
from assay.errors import DeploymentError
from assay.traces import Store
from assay.traces.store.leases import LostLease


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def loops(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loops]:
    where = request.getfixturevalue("postgres_url") if request.param == "postgresql" else tmp_path / "s.db"
    with Store(where) as opened:
        with opened.engine.begin() as connection:  # the PostgreSQL of all tests is one
            for table in ("loops", "loop_steps", "leases"):
                connection.execute(sa.text(f"DELETE FROM {table}"))
        started = Loops(opened.engine)
        started.enable("support", "loop.yaml", "0" * 64)
        yield started


def test_a_step_that_did_not_end_is_begun_again_by_the_next_holder(loops: Loops) -> None:
    killed = loops.acquire("support", lease_s=0.0)  # ends at once
    assert killed is not None
    loops.begin(killed, "support", 3, "improve")
    assert [(step.step, step.status, step.attempts) for step in loops.steps("support")] == [("improve", "running", 1)]
    lease = loops.acquire("support")
    assert lease is not None
    with lease:
        assert loops.known("support").holder == lease.holder
        assert loops.acquire("support") is None
        loops.begin(lease, "support", 3, "improve")
        with pytest.raises(LostLease):
            loops.end(killed, "support", 3, "improve", "done", {"artifact": "of the killed process"})
        loops.end(lease, "support", 3, "improve", "done", {"artifact": "a"})
    (step,) = loops.steps("support")
    assert (step.attempts, step.status, step.detail) == (2, "done", {"artifact": "a"})
    assert loops.known("support").holder is None


def test_a_loop_that_was_never_started_is_named(loops: Loops) -> None:
    for call in (loops.acquire, loops.disable):
        with pytest.raises(DeploymentError, match="agent 'nobody' has no loop"):
            call("nobody")
    loops.disable("support")
    assert (loops.known("support").enabled, loops.known("support").changed_by) == (False, current_user())
    assert loops.get("nobody") is None
