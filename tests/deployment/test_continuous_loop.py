"""The lease of a loop and the rows of its steps, on both databases."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.deployment.loops import Lease, Loops, LostLease
from assay.errors import DeploymentError
from assay.traces import Store


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    where = tmp_path / "s.db"
    if request.param == "postgresql":
        where = request.getfixturevalue("postgres_url")
    with Store(where) as opened:
        with opened.engine.begin() as connection:  # the PostgreSQL of all tests is one
            for table in ("loops", "loop_steps"):
                connection.execute(sa.text(f"DELETE FROM {table}"))
        Loops(opened.engine).enable("support", "loop.yaml", "0" * 64)
        yield opened


@pytest.mark.timeout(300)
def test_one_process_holds_the_lease_of_a_loop_and_releases_it(store: Store) -> None:
    loops = Loops(store.engine)
    lease = loops.acquire("support", lease_s=2.0)
    assert lease is not None
    with lease:
        assert loops.get("support").holder == lease.holder  # type: ignore[union-attr]
        # the first beat decides
        assert loops.acquire("support", lease_s=3600, sleep=lambda seconds: time.sleep(0.05)) is None
    again = loops.acquire("support", lease_s=2.0)
    assert again is not None
    assert loops.acquire("support", lease_s=0.3) is not None  # it never beat
    with pytest.raises(LostLease, match="taken the loop of agent 'support' over"):
        again.begin(1, "pool")
    assert loops.steps("support") == []


def test_only_one_of_two_processes_gets_a_free_lease(store: Store) -> None:
    """Both read the row before either writes: the second finds other beats."""
    loops, second = Loops(store.engine), []
    lease = loops.acquire("support", lease_s=0.2)
    assert lease is not None

    def clock() -> float:  # the second takes over while the first still waits
        if not second:
            second.append(Loops(store.engine).acquire("support", lease_s=0.0))
        return time.monotonic() + 10

    assert loops.acquire("support", lease_s=0.2, clock=clock) is None
    assert second[0] is not None


@pytest.mark.parametrize("jump", [-(10**9), 10**9])
def test_clocks_that_jump_neither_steal_nor_block_a_lease(
    store: Store, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    loops, now = Loops(store.engine), time.time
    lease = loops.acquire("support", lease_s=1.0)
    assert lease is not None
    with lease:
        monkeypatch.setattr("assay.deployment.loops.time.time", lambda: now() + jump)
        assert loops.acquire("support", lease_s=1.0) is None
        lease.begin(1, "pool")
    assert loops.acquire("support", lease_s=1.0) is not None


KILLED = """
import os, signal, sys
from assay.deployment.loops import Loops
from assay.traces import Store
lease = Loops(Store(sys.argv[1]).engine).acquire("support", lease_s=1.0)
with lease:
    lease.begin(3, "improve")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lease_of_a_killed_process_is_taken_over_and_its_step_begun_again(store: Store) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, store.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    loops = Loops(store.engine)
    assert [(step.step, step.status, step.attempts) for step in loops.steps("support")] == [("improve", "running", 1)]
    slept: list[float] = []
    lease = loops.acquire("support", lease_s=1.0, clock=lambda: sum(slept), sleep=slept.append)
    assert lease is not None
    assert 1.0 <= sum(slept) < 1.5
    with lease:
        lease.begin(3, "improve")
        lease.end(3, "improve", "done", {"artifact": "a"})
    (step,) = loops.steps("support")
    assert (step.attempts, step.status, step.detail) == (2, "done", {"artifact": "a"})


def test_a_loop_that_was_never_started_is_named(store: Store) -> None:
    loops = Loops(store.engine)
    for call in (loops.acquire, loops.disable):
        with pytest.raises(DeploymentError, match="agent 'nobody' has no loop"):
            call("nobody")
    loops.disable("support", by="ann")
    loop = loops.get("support")
    assert loop is not None
    assert (loop.enabled, loop.changed_by) == (False, "ann")
    assert loops.get("nobody") is None


def test_only_one_of_many_concurrent_processes_runs_the_loop(store: Store) -> None:
    """They all read a free lease before any of them takes it."""
    together, got = threading.Barrier(8), list[Lease | None]()

    def come() -> None:
        together.wait()
        got.append(Loops(store.engine).acquire("support", lease_s=5.0))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    while not any(got):
        time.sleep(0.01)
    with next(lease for lease in got if lease is not None):  # the others wait for its first beat
        for thread in threads:
            thread.join(120)
    assert len(got) == 8
    assert len([lease for lease in got if lease is not None]) == 1
