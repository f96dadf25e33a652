"""Leases in the store, on both databases: one holder, by a clock that nobody sets, taken over after a kill."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from assay.traces import Store
from assay.traces.store.leases import Lease, LostLease, acquire, holder_of
from assay.traces.store.tables import leases, meta


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store(database_url) as opened:
        yield opened


def until(engine: sa.Engine) -> float:
    with engine.connect() as connection:
        return float(connection.execute(sa.select(leases.c.until)).scalar_one())


def test_one_process_holds_a_lease_also_when_the_time_is_set(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, now = acquire(store.engine, "work", 60.0), time.time
    assert lease is not None
    with lease:
        for jump in (0.0, -(10.0**9), 10.0**9):
            monkeypatch.setattr("time.time", lambda jump=jump: now() + jump)
            assert acquire(store.engine, "work", 60.0) is None
            assert holder_of(store.engine, "work") == lease.holder
            assert acquire(store.engine, f"other work {jump}", 60.0) is not None
            with lease.writing("a row") as connection:
                connection.execute(sa.insert(meta).values(key=f"jump {jump}", value="written"))
    assert holder_of(store.engine, "work") is None
    assert acquire(store.engine, "work", 60.0) is not None


def test_a_holder_renews_its_lease(store: Store) -> None:
    lease = acquire(store.engine, "work", 0.5)
    assert lease is not None
    with lease:
        before, waited = until(store.engine), threading.Event()
        while until(store.engine) == before:
            waited.wait(0.02)


def test_a_process_that_lost_its_lease_writes_nothing(store: Store) -> None:
    lost = acquire(store.engine, "work", 0.0)  # ends at once
    assert lost is not None
    assert acquire(store.engine, "work", 60.0) is not None
    with pytest.raises(LostLease), lost.writing("a row") as connection:
        connection.execute(sa.insert(meta).values(key="lost", value="written"))
    with store.engine.connect() as connection:
        assert connection.execute(sa.select(meta).where(meta.c.key == "lost")).first() is None
    with lost:
        pass
    assert holder_of(store.engine, "work") is not None  # it releases no lease of another process


@pytest.mark.parametrize("ends", [-1.0, 10.0**9])
def test_a_lease_ends_by_itself_and_after_the_clock_was_set_back(store: Store, ends: float) -> None:
    assert acquire(store.engine, "work", 60.0) is not None
    with store.engine.begin() as connection:
        connection.execute(sa.update(leases).values(until=leases.c.until - 60 + ends))
    assert holder_of(store.engine, "work") is None
    assert acquire(store.engine, "work", 60.0) is not None


def test_one_of_many_that_come_at_the_same_time_gets_the_lease(store: Store) -> None:
    together = threading.Barrier(8)

    def come(_: int) -> Lease | None:
        together.wait()
        return acquire(store.engine, "work", 60.0)

    with ThreadPoolExecutor(8) as pool:
        assert sum(lease is not None for lease in pool.map(come, range(8))) == 1


KILLED = """
import os, signal, sys
from assay.traces import Store
from assay.traces.store.leases import acquire
with acquire(Store(sys.argv[1]).engine, "work", 1.0):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lease_of_a_killed_process_is_taken_over(store: Store) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, store.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    waited = threading.Event()
    while (lease := acquire(store.engine, "work", 1.0)) is None:
        waited.wait(0.05)
    assert lease.holder
