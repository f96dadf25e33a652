"""Pages of rollouts by key: order, windows, and plans that read by index."""

from collections.abc import Iterator
from typing import Any

import pytest

from assay.errors import ConfigError, StoreError
from assay.traces import Rollout, Store
from assay.traces.store.evaluations import evaluations_of
from assay.traces.store.paging import Cursor, RolloutFilters, page_statement, rollout_page, small_runs


def put(store: Store, number: int, **fields: Any) -> None:
    values = {"id": f"{number:032x}", "run_id": "run", "task_id": f"task-{number}", "status": "done", "split": "val"}
    store.put_rollout(Rollout(**{**values, "started_at": 100.0 + number // 2, **fields}))


def numbers(page: Any) -> list[int]:
    return [int(row.id, 16) for row in page.rows]


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """Rollouts 0 to 29, two at a time; every tenth failed."""
    with Store(database_url) as opened:
        for number in range(30):
            put(opened, number, status="done" if number % 10 else "failed", inputs={"question": f"Ärger {number}"})
        opened.flush()
        yield opened


def test_pages_before_and_after_a_rollout(store: Store) -> None:
    first = rollout_page(store, RolloutFilters(), limit=10)
    assert (numbers(first), first.more, first.searched) == (list(range(29, 19, -1)), True, None)
    older = rollout_page(store, RolloutFilters(), before=first.rows[-1].cursor, limit=25)
    assert (numbers(older), older.more, older.searched) == (list(range(19, -1, -1)), False, None)
    newer = rollout_page(store, RolloutFilters(), after=older.rows[0].cursor, limit=4)
    assert (numbers(newer), newer.more) == ([23, 22, 21, 20], True)


def test_runs_tasks_and_texts_are_found_in_and_beyond_the_window(store: Store) -> None:
    put(store, 99, run_id="old", started_at=1.0)
    store.flush()
    for equal in ({"run_id": "old"}, {"task_id": "task-99"}, {"run_id": "old", "task_id": "task-99"}):
        page = rollout_page(store, RolloutFilters(equal=equal), window=5)
        assert (numbers(page), page.searched) == ([99], None)
    large = rollout_page(store, RolloutFilters(equal={"run_id": "run"}), window=5, limit=10)  # is read by time
    assert (numbers(large), large.searched) == ([29, 28, 27, 26, 25], Cursor(112.0, f"{25:032x}"))
    assert numbers(rollout_page(store, RolloutFilters(text="Ärger 7"))) == [7]


def test_runs_are_small_up_to_a_number_of_rollouts(store: Store) -> None:
    put(store, 99, run_id="old")
    for run_id in ("run", "old", "empty"):
        store.put_run(run_id, kind="evaluate", config={}, status="done", started_at=1.0)
    store.flush()
    for asked, most, small in ((["run", "old", "empty"], 29, {"old", "empty"}), (["run"], 30, {"run"}), ([], 1, set())):
        assert small_runs(store, asked, most=most) == small


@pytest.mark.postgres
@pytest.mark.slow
def test_postgresql_compares_the_window_and_not_all_rollouts(empty_postgres_url: str) -> None:
    query = page_statement(
        RolloutFilters(equal={"status": "failed"}), Cursor(1e12, "~"), newer=False, limit=5, narrow=None
    )
    with Store(empty_postgres_url) as opened, opened.engine.connect() as connection:
        compiled = query.compile(opened.engine, compile_kwargs={"literal_binds": True})
        plan = [line.strip() for line in connection.exec_driver_sql(f"EXPLAIN {compiled}").scalars()]
    (filtered,) = [at for at, line in enumerate(plan) if line.startswith("Filter:") and "'failed'" in line]
    assert "Subquery Scan on found" in plan[filtered - 1]
    assert "Limit" in plan[filtered + 1]


def test_scores_of_a_run_by_task(store: Store) -> None:
    for number, score in ((101, 0.5), (102, 1.0), (103, None)):
        put(store, number, run_id="scored", task_id="t" if number < 103 else "u", score=score, program_version="v")
    put(store, 104, run_id="scored", source="judge")
    store.flush()
    (evaluated,) = evaluations_of(store, "scored")
    assert (evaluated.split, evaluated.version, evaluated.scores) == ("val", "v", {"t": 0.75})
    assert evaluated.tasks["u"].score is None
    with pytest.raises(StoreError, match="more than 3 rollouts"):
        evaluations_of(store, "scored", most=3)
    put(store, 105, run_id="scored", task_id="t", split="test", score=0.25)
    store.flush()
    assert [one.split for one in evaluations_of(store, "scored")] == ["val", "test"]
    assert [one.scores for one in evaluations_of(store, "scored", most=3)] == [{"t": 0.25}]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no filter by model"):
        RolloutFilters(equal={"model": "m"})
    for text in ("", "1", "x~y", "1~", "nan~a", "1;2~a"):
        with pytest.raises(ConfigError, match="not a place in a list"):
            Cursor.of(text)
    cursor = Cursor(1764085812.1234567, "01a2118c")
    assert Cursor.of(str(cursor)) == cursor
