"""The store, the same on SQLite and PostgreSQL: what it keeps, its tables, counts and leases; kills; erasure."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from assay.cli import group
from assay.errors import ConfigError, FailureKind, StoreError
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict
from assay.traces.store import store_address
from assay.traces.store.counts import file_stats
from assay.traces.store.erasure import erase_subject
from assay.traces.store.leases import Lease, LostLease, acquire, holder_of
from assay.traces.store.listing import find_run, list_runs, usage_of_phases
from assay.traces.store.location import REVISION
from assay.traces.store.paging import calls_from
from assay.traces.store.tables import leases, meta, metadata, revisions


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store(database_url) as opened:
        yield opened


# -- records


def full_rollout() -> Rollout:
    transition = Transition(
        t=0, model="m", weights="w", adapters=("a", "b"), request={"messages": [{"text": "hé"}]}, response={"x": 1},
        output="out",
        tools=[ToolCall(name="calculator", arguments={"expression": "1+1"}, result="2")], constrained=True, cached=True,
        prompt_tokens=5, completion_tokens=2, token_ids=(1, 2), logprobs=(-0.5, -1.0), latency_ms=1.5, cost_usd=0.25,
        started_at=3.0, step_rewards={"call_runs": 0.05}, return_=1.0, failure=FailureKind.PARSE, thinking_tokens=1,
        shown_tasks=("0a1b",),
    )  # fmt: skip
    return Rollout(
        run_id="run", task_id="t", task_type="sum", group_id="t", program="p", program_version="v",
        parameters={"temperature": 0.1},
        model="m", adapters=("a",), seed=0, split="val", phase="search", status="done", inputs={"question": "?"},
        prediction={"answer": "2"}, rubric="r@1", score=0.5, coverage=1.0, human_rating=0.75, tenant="x",
        data_subject="y",
        consent="z", failure=FailureKind.AGENT, verdicts=[Verdict(criterion="correct", grade=None, reason="why")],
        ended_at=9.0, transitions=[transition],
    )  # fmt: skip


def test_a_rollout_is_read_back_as_it_was_written_last(store: Store) -> None:
    rollout = full_rollout()
    store.put_transition(rollout.id, rollout.transitions[0])
    for score in (None, 0.25, 0.5):
        rollout.score = score
        store.put_rollout(rollout)
        store.flush()
    assert store.rollout(rollout.id[:14]) == rollout
    assert len(list(store.rollouts())) == 1


def test_what_a_database_cannot_hold_costs_no_row(store: Store) -> None:
    inputs = {"q": "a\0b \ud800 \U0001f600"}
    store.put_rollout(Rollout(id="a" * 32, inputs=inputs, score=float("nan"), prediction={"x": float("inf")}))
    store.put_rollout(Rollout(id="b" * 32, task_id="t\0", seed=2**63, score=0.5))
    store.put_rollout(Rollout(id="c" * 32, seed=2**63 - 1))
    store.flush()
    nan, wide, widest = sorted(store.rollouts(), key=lambda rollout: rollout.id)
    assert (nan.score, nan.prediction, nan.inputs["q"][-1]) == (None, {"x": None}, "\U0001f600")
    assert (wide.seed, wide.score, widest.seed, store.dropped) == (None, 0.5, 2**63 - 1, 0)


def test_an_id_must_name_one_rollout(store: Store) -> None:
    with pytest.raises(StoreError, match="no rollout's id starts with 'zz'"):
        store.rollout("zz")
    for _ in range(2):
        store.put_rollout(Rollout())
    store.flush()
    with pytest.raises(StoreError, match="more than one"):
        store.rollout("0")


@pytest.mark.postgres
def test_the_start_of_an_id_is_found_by_an_index_on_postgresql(postgres_url: str) -> None:
    with Store(postgres_url) as store, store.engine.connect() as connection:
        connection.execute(sa.text("SET enable_seqscan = off"))
        plan = connection.execute(sa.text("EXPLAIN SELECT * FROM rollouts WHERE id LIKE '0abc%' ESCAPE '/'")).scalars()
        assert any("rollouts_by_prefix" in line and "Scan" in line for line in plan)


def test_a_rating_survives_the_run_that_writes_the_rollout_again(store: Store) -> None:
    rollout = Rollout(score=0.5)
    store.put_rollout(rollout)
    store.rate(rollout.id, 0.9)
    rollout.status = "done"
    store.put_rollout(rollout)
    store.flush()
    assert store.rollout(rollout.id).human_rating == 0.9
    for broken in (1.5, float("nan"), -0.1):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            store.rate(rollout.id, broken)
    with pytest.raises(StoreError, match="no rollout"):
        store.rate("nobody", 0.5)


def test_a_resumed_run_keeps_its_first_start(store: Store) -> None:
    store.put_run("one", kind="tune", config={}, status="running", started_at=100.0)
    store.put_run("one", kind="tune", config={}, status="stopped", started_at=100.0)
    store.flush()
    assert (find_run(store, "one")["started_at"], find_run(store, "one")["resumed_at"]) == (100.0, None)
    for process, status in product((200.0, 300.0), ("running", "done")):
        store.put_run("one", kind="tune", config={}, status=status, started_at=process)
        store.flush()
        run = find_run(store, "one")
        assert (run["started_at"], run["resumed_at"], run["status"]) == (100.0, process, status)
    assert run["seconds"] == run["ended_at"] - 300.0


def test_an_interim_row_has_the_fields_at_the_time_of_the_call(store: Store) -> None:
    rollout = Rollout(task_id="t", inputs={"q": "?"})
    store.put_rollout(rollout, interim=True)
    rollout.status = "done"
    store.flush()
    assert store.rollout(rollout.id).status == "running"


def test_a_row_that_cannot_be_built_is_reported_and_affects_no_other_row(store: Store) -> None:
    other = Rollout()
    store.put_rollout(Rollout(verdicts=[5]), interim=True)  # type: ignore[list-item]
    store.put_rollout(other)
    with pytest.raises(StoreError, match="refused 1 rows"):
        store.flush()
    assert store.rollout(other.id).id == other.id


@pytest.mark.timeout(120)
def test_a_store_can_be_closed_by_two_threads_at_once(store: Store) -> None:
    store.close()
    store.close(timeout_s=3600)  # the writer is ending and answers nothing


# -- counts: cached answers cost nothing, failed calls have no price

KINDS = {
    "priced": {"cost_usd": 0.25},
    "unpriced": {"cost_usd": None},
    "failed": {"cost_usd": None, "error": "refused"},
    "failed and paid": {"cost_usd": 0.5, "error": "refused"},
    "cached": {"cost_usd": 0.125, "cached": True},
    "cached, unpriced": {"cost_usd": None, "cached": True},
}


def test_all_counts_of_a_run_agree_on_calls_tokens_and_cost(store: Store) -> None:
    for number, kinds in enumerate([*product(KINDS, repeat=2), tuple(KINDS)]):
        calls = [
            Transition(t=t, model="m", request={}, prompt_tokens=10, completion_tokens=1, **KINDS[kind])  # type: ignore[arg-type]
            for t, kind in enumerate(kinds)
        ]
        run = f"run {number}"
        rollout = Rollout(run_id=run, task_id="t", status="done", model="m", phase="search", transitions=calls)
        store.put_rollout(rollout)
        for call in calls:
            store.put_transition(rollout.id, call)
        store.flush()
        (usage,) = usage_of_phases(store, run)
        spent, counts, paged = store.spent(run)["search"], store.stats(run_id=run), calls_from(store, rollout.id)
        known = None if rollout.unpriced else rollout.cost_usd
        costs = [usage.cost_usd, None if spent.unpriced else spent.cost_usd, counts["cost_usd"], paged.cost_usd]
        assert costs == [known] * 4, kinds
        assert usage.calls == spent.calls == counts["transitions"] - counts["cached"], kinds
        assert spent.tokens == 11 * spent.calls, kinds


# -- tables


@pytest.mark.parametrize(
    "statements",  # leave a store as another version has it
    [
        ["UPDATE store_revision SET version_num = '0007'"],
        ["DELETE FROM store_revision"],
        ["DROP TABLE store_revision"],
        [f"DROP TABLE {name}" for name in sorted(metadata.tables.keys() - {"runs"})],
    ],
    ids=["an older revision", "a revision without a row", "no revision", "one table alone"],
)
def test_a_store_of_another_version_is_refused_and_left_as_it_is(database_url: str, statements: list[str]) -> None:
    Store(database_url).close()
    engine = sa.create_engine(store_address(database_url).url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    before = sa.inspect(engine).get_table_names()
    for _ in range(2):
        with pytest.raises(StoreError):
            Store(database_url)
    assert sa.inspect(engine).get_table_names() == before
    engine.dispose()
    if engine.dialect.name == "sqlite":
        assert file_stats(Path(database_url)) is None


def test_each_command_refuses_a_store_of_another_version_and_names_the_way_out() -> None:
    Store("old.db").close()
    with closing(sqlite3.connect("old.db")) as db:
        db.execute("UPDATE store_revision SET version_num = '0001'")
        db.commit()
    evaluate = "evaluate math_qa --rubric math_qa --data arithmetic:size=40 --model openai/none"
    reading = ("traces stats", "traces list", "runs list", "registry list", "index .", "export sft --out rows")
    for command in (*reading, evaluate):
        error = CliRunner().invoke(group, [*command.split(), "--store", "old.db"]).exception
        assert isinstance(error, StoreError), command
        assert error.exit_code == 1
        assert "old.db" in str(error)
        assert "name another store" in str(error).lower()


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("certainly not a database, and long enough to be read as one")
    with pytest.raises(StoreError, match=r"s\.db' is not an SQLite database. Name another file"):
        Store(tmp_path / "s.db")


def test_a_new_file_that_is_locked_during_the_journal_change_is_retried(tmp_path: Path) -> None:
    """SQLite ignores the time limit for this lock: without retries 6 of 480 simultaneous openings failed."""
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE of_another_process (n)")
    other.execute("BEGIN IMMEDIATE")
    freed = threading.Timer(0.3, other.rollback)
    freed.start()
    with Store(tmp_path / "s.db") as store, store.engine.connect() as connection:
        freed.join()
        other.close()
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.connection.dbapi_connection.isolation_level == ""  # type: ignore[union-attr]  # transactions


# -- several threads and processes


def test_many_threads_create_and_fill_a_store_and_lose_and_duplicate_nothing(database_url: str) -> None:
    def write(worker: int) -> None:
        with Store(database_url) as store:
            for i in range(100):
                store.put_transition(f"rollout{worker % 3}", Transition(t=100 * worker + i, model="m", request={}))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    with Store(database_url) as store:
        assert store.stats()["transitions"] == 600


SHARED = """
import sys, time
from assay.traces import Rollout, Store, Transition
time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
with Store(sys.argv[1]) as store:
    for at in range(100):
        rollout = Rollout(id=f"{int(sys.argv[2]):04x}{at:028x}", run_id=sys.argv[2], status="done")
        store.put_rollout(rollout)
        for t in range(3):
            call = Transition(t=t, model="m", request={"messages": []}, output=f"{sys.argv[2]} {at} {t}")
            store.put_transition(rollout.id, call)
        store.put_rollout(Rollout(id=f"{0xffff:04x}{at:028x}", run_id=sys.argv[2]))  # all of them write this one
"""


@pytest.mark.slow
def test_processes_that_create_a_store_at_once_lose_and_duplicate_nothing(database_url: str) -> None:
    count, start = 4, str(time.time() + 3)
    writers = [
        subprocess.Popen([sys.executable, "-c", SHARED, database_url, str(number), start], stderr=subprocess.PIPE)
        for number in range(count)
    ]
    errors = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * count, errors
    with Store(database_url) as store, store.engine.connect() as connection:
        outputs = connection.execute(sa.text("SELECT output FROM transitions")).scalars().all()
        rollouts = connection.execute(sa.text("SELECT count(*) FROM rollouts")).scalar()
        assert connection.execute(sa.select(revisions.c.version_num)).scalars().all() == [REVISION]
    expected = [f"{number} {at} {t}" for number in range(count) for at in range(100) for t in range(3)]
    assert (sorted(outputs), rollouts) == (sorted(expected), count * 100 + 100)


KILLED = """
import os, signal, sys
import sqlalchemy as sa
from assay.traces import Store

def die(conn, cursor, statement, *_):
    if "INSERT INTO store_revision" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

sa.event.listen(sa.Engine, "before_cursor_execute", die)
Store(sys.argv[1])
"""


@pytest.mark.chaos
def test_a_creation_that_is_killed_leaves_an_empty_database(database_url: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, database_url], check=False)
    assert killed.returncode == -signal.SIGKILL
    engine = sa.create_engine(store_address(database_url).url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    with Store(database_url) as store:
        assert store.stats()["rollouts"] == 0


def test_a_full_disk_is_reported_and_loses_no_stored_rows(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    store.put_rollout(Rollout(task_id="before"))
    store.flush()
    with store.engine.begin() as connection:  # SQLite's own way to be out of room
        connection.execute(sa.text("PRAGMA max_page_count = 1"))
    sa.event.listen(store.engine, "connect", lambda db, _: db.execute("PRAGMA max_page_count = 20"))
    store.engine.dispose()
    store.put_transition("r", Transition(t=0, model="m", request={"text": "x" * 500_000}))
    with pytest.raises(StoreError, match=r"refused 1 rows.*full"):
        store.flush()
    assert store.dropped == 1
    assert [r.task_id for r in store.rollouts()] == ["before"]


# -- erasure


def test_no_file_of_the_store_holds_an_erased_text(own_folder: Path) -> None:
    with Store(own_folder / "a.db") as store:
        for name in ("ann", "bob"):
            inputs = {"question": f"the parcel of {name} is lost " * 300}
            store.put_rollout(Rollout(task_id=name, inputs=inputs, data_subject=name, status="done"))
        store.flush()
        assert erase_subject(store, "ann").removed == 1
        content = b"".join(file.read_bytes() for file in own_folder.glob("a.db*"))
        assert (b"the parcel of ann" in content, b"the parcel of bob" in content) == (False, True)


# -- leases: one holder, by a clock that nobody sets, taken over after a kill


def lease_end(engine: sa.Engine) -> float:
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
        before, waited = lease_end(store.engine), threading.Event()
        while lease_end(store.engine) == before:
            waited.wait(0.02)


def test_a_lease_that_was_not_renewed_in_time_is_doubtful_until_it_is(store: Store) -> None:
    lease, waited = acquire(store.engine, "work", 0.5), threading.Event()
    assert lease is not None
    assert not lease.is_doubtful
    while not lease.is_doubtful:
        waited.wait(0.02)
    with lease:
        while lease.is_doubtful:
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


def test_a_lease_within_another_is_lost_with_it(store: Store) -> None:
    whole = acquire(store.engine, "whole", 60.0)
    assert whole is not None
    with whole:
        part = acquire(store.engine, "part", 60.0)
        assert part is not None
        store.belong_to(part)
        with part, part.writing("a row"):
            pass
        with store.engine.begin() as connection:
            connection.execute(sa.update(leases).where(leases.c.name == "whole").values(token="of the next one"))
        with pytest.raises(LostLease), part.writing("a row"):
            pass
        with pytest.raises(LostLease), store.changing():
            pass
        assert part.lost
        assert store.obstacle is not None
    after = acquire(store.engine, "part", 60.0)
    assert after is not None
    with after.writing("a row"):
        assert not after.lost


@pytest.mark.parametrize("ends", [-1.0, 10.0**9])
def test_a_lease_ends_by_itself_and_after_the_clock_was_set_back(store: Store, ends: float) -> None:
    assert acquire(store.engine, "work", 60.0) is not None
    with store.engine.begin() as connection:
        connection.execute(sa.update(leases).values(until=leases.c.until - 60 + ends))
    assert holder_of(store.engine, "work") is None
    assert acquire(store.engine, "work", 60.0) is not None


def test_a_run_whose_process_has_ended_is_interrupted(store: Store) -> None:
    for number, run in enumerate(("ended-1", "killed-9", "killed-10", "loop.part-x", "loop.part-y", "gateway-x")):
        store.put_run(run, kind="collect", config={}, status="running", started_at=float(number))
    store.put_run("ended-1", kind="collect", config={}, status="done", started_at=0.0)
    store.flush()
    for name, length_s in (("ended", 0.0), ("killed", 60.0), ("loop.part-x", 60.0), ("loop.part-y", 0.0)):
        assert acquire(store.engine, f"job:{name}", length_s) is not None
    expected = {
        "ended-1": "done", "killed-9": "interrupted", "killed-10": "running", "loop.part-x": "running",
        "loop.part-y": "interrupted", "gateway-x": "running",
    }  # fmt: skip
    listed = {run["id"]: run["status"] for run in list_runs(store)}
    assert listed == expected
    for status in ("running", "interrupted", "done"):
        named = {run["id"] for run in list_runs(store, status=status)}
        assert named == {run for run, its in expected.items() if its == status}
    assert [find_run(store, run)["status"] for run in expected] == [*expected.values()]
    shown = CliRunner().invoke(group, ["runs", "list", "--store", store.url])
    assert "interrupted" in shown.output


def test_one_of_many_that_come_at_the_same_time_gets_the_lease(store: Store) -> None:
    together = threading.Barrier(8)

    def come(_: int) -> Lease | None:
        together.wait()
        return acquire(store.engine, "work", 60.0)

    with ThreadPoolExecutor(8) as pool:
        assert sum(lease is not None for lease in pool.map(come, range(8))) == 1


HOLDER = """
import os, signal, sys
from assay.traces import Store
from assay.traces.store.leases import acquire
with acquire(Store(sys.argv[1]).engine, "work", 1.0):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lease_of_a_killed_process_is_taken_over(store: Store) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER, store.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    waited = threading.Event()
    while (lease := acquire(store.engine, "work", 1.0)) is None:
        waited.wait(0.05)
    assert lease.holder
