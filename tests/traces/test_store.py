"""The store, the same on SQLite and PostgreSQL; kills, hostile text, a full disk, a newer schema."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.errors import ConfigError, FailureKind, StoreError
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict
from assay.traces.store.listing import find_run
from assay.traces.store.tables import metadata


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = str(tmp_path / "s.db")
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        metadata.drop_all(engine)
        engine.dispose()
    with Store(url) as opened:
        yield opened


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


def test_a_rollout_is_read_back_as_it_was_written(store: Store) -> None:
    rollout = full_rollout()
    store.put_rollout(rollout)
    store.put_transition(rollout.id, rollout.transitions[0])
    store.flush()
    assert store.rollout(rollout.id[:14]) == rollout


def test_a_rollout_that_is_written_again_is_replaced(store: Store) -> None:
    rollout = full_rollout()
    for score in (None, 0.25, 1.0):
        rollout.score = score
        store.put_rollout(rollout)
        store.flush()
    assert [r.score for r in store.rollouts()] == [1.0]


def test_nan_nul_and_lone_surrogates_are_kept_out_of_the_database(store: Store) -> None:
    rollout = Rollout(
        task_id="t\0", inputs={"q": "a\0b \ud800 \U0001f600"}, score=float("nan"), prediction={"x": float("inf")}
    )
    store.put_rollout(rollout)
    store.flush()
    stored = next(store.rollouts())
    assert stored.score is None
    assert stored.prediction == {"x": None}
    assert stored.inputs["q"].endswith("\U0001f600")
    assert store.dropped == 0


def test_a_number_of_more_than_64_bits_does_not_cost_the_row(store: Store) -> None:
    store.put_rollout(Rollout(id="a" * 32, seed=2**63, score=0.5))
    store.put_rollout(Rollout(id="b" * 32, seed=2**63 - 1))
    store.flush()
    assert [(r.seed, r.score) for r in sorted(store.rollouts(), key=lambda r: r.id)] == [(None, 0.5), (2**63 - 1, None)]


def test_many_threads_lose_and_duplicate_nothing(store: Store) -> None:
    def write(worker: int) -> None:
        for i in range(200):
            store.put_transition(f"rollout{worker}", Transition(t=i, model="m", request={}))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    assert store.stats()["transitions"] == 1600


def test_spent_counts_calls_but_not_cached_answers(store: Store) -> None:
    rollout = Rollout(run_id="r-1", phase="search")
    store.put_rollout(rollout)
    for t, cached in enumerate((False, True, False)):
        store.put_transition(
            rollout.id, Transition(t=t, model="m", request={}, cached=cached, prompt_tokens=10, completion_tokens=1)
        )
    store.flush()
    spent = store.spent("r-1")["search"]
    assert (spent.calls, spent.tokens) == (2, 22)


def test_an_id_must_name_one_rollout(store: Store) -> None:
    with pytest.raises(StoreError, match="no rollout's id starts with 'zz'"):
        store.rollout("zz")
    for _ in range(2):
        store.put_rollout(Rollout())
    store.flush()
    with pytest.raises(StoreError, match="more than one"):
        store.rollout("0")


WRITER = """
import itertools, sys, time
from assay.traces import Rollout, Store, Transition
store = Store(sys.argv[1])
rollout = Rollout()
store.put_rollout(rollout)
for t in itertools.count():
    store.put_transition(rollout.id, Transition(t=t, model="m", request={}, started_at=time.time()))
    print(t, time.time(), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_last_second(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    time.sleep(4)
    killed = time.time()
    os.kill(process.pid, signal.SIGKILL)
    written = [line.split() for line in process.communicate()[0].splitlines() if len(line.split()) == 2]
    older = [int(t) for t, at in written if float(at) < killed - 1]
    assert len(older) > 100
    with Store(path) as store:
        assert store.stats()["transitions"] > max(older)


SHARED = """
import sys
from assay.traces import Rollout, Store, Transition
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
def test_eight_concurrent_processes_lose_and_duplicate_nothing(store: Store) -> None:
    url = store.engine.url.render_as_string(hide_password=False)
    writers = [
        subprocess.Popen([sys.executable, "-c", SHARED, url, str(number)], stderr=subprocess.PIPE, text=True)
        for number in range(8)
    ]
    errors = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 8, errors
    assert store.stats()["transitions"] == 8 * 100 * 3
    with store.engine.connect() as connection:
        outputs = {row[0] for row in connection.execute(sa.text("SELECT output FROM transitions"))}
        count = connection.execute(sa.text("SELECT count(*) FROM rollouts")).scalar()
    assert outputs == {f"{number} {at} {t}" for number in range(8) for at in range(100) for t in range(3)}
    assert count == 8 * 100 + 100


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
    for process in (200.0, 300.0):
        for status in ("running", "done"):
            store.put_run("one", kind="tune", config={}, status=status, started_at=process)
            store.flush()
            run = find_run(store, "one")
            assert (run["started_at"], run["resumed_at"], run["status"]) == (100.0, process, status)
    assert run["seconds"] == run["ended_at"] - 300.0


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("certainly not a database, and long enough to be read as one")
    with pytest.raises(StoreError, match=r"s\.db' is not an SQLite database. Name another file"):
        Store(tmp_path / "s.db")


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


@pytest.mark.postgres
def test_the_start_of_an_id_is_found_by_an_index_on_postgresql(postgres_url: str) -> None:
    with Store(postgres_url) as store, store.engine.connect() as connection:
        connection.execute(sa.text("SET enable_seqscan = off"))
        plan = (
            connection.execute(sa.text("EXPLAIN SELECT * FROM rollouts WHERE id LIKE '0abc%' ESCAPE '/'"))
            .scalars()
            .all()
        )
    assert any("rollouts_by_prefix" in line and "Scan" in line for line in plan)


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
