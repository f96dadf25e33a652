"""Queries of stores: pages of rollouts by key, and plans that read by index for the statements that commands run."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from assay.cli import group
from assay.errors import ConfigError, FailureKind, StoreError
from assay.traces import Rollout, Store, ToolCall, Transition
from assay.traces.store import counts as store_counts
from assay.traces.store.evaluations import evaluations_of
from assay.traces.store.paging import Cursor, RolloutFilters, page_statement, rollout_page, small_runs

# -- pages: order, windows


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


# -- plans: no command scans a table if an index serves


RUN = "compile-1-abc"
# A plan that scans a table reads all of it, unless a covering index answers. Exports read rollouts in index order, a
# list ends at its limit, the index of failed calls holds no others, and there are few runs.
FULL_SCAN = re.compile(r"^SCAN (transitions|rollouts|labels|runs)\b(?!.* USING COVERING INDEX)")
# Exports read all rollouts in order of their groups, and the personal values that any of them declares.
ALLOWED = re.compile(
    r"^SCAN (rollouts USING INDEX rollouts_by_(group|subject|time)|transitions USING INDEX transitions_failed|runs$)"
)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "s.db"
    with Store(path) as store:
        store.put_run(RUN, kind="compile", config={}, status="done", started_at=1.0)
        for at in range(30):
            rollout = Rollout(
                id=f"{at:032x}", run_id=RUN, task_id=f"t{at % 5}", group_id=f"t{at % 5}", status="done", score=at / 30,
                rubric="r@1",
                split="gate" if at % 7 == 0 else "train", inputs={"q": f"question {at}"}, prediction={"answer": "4"},
                data_subject=f"p{at % 3}", failure=FailureKind.PARSE if at == 3 else None,
            )  # fmt: skip
            store.put_rollout(rollout)
            request = {"messages": [{"role": "user", "parts": [{"type": "text", "text": f"q{at}"}]}]}
            for t, tools in enumerate(([ToolCall(name="calculator", arguments={}, result="4")], [])):
                answer: dict[str, Any] = {"response": {"text": "4"}, "output": "4", "tools": tools, "cost_usd": 0.0}
                store.put_transition(rollout.id, Transition(t=t, model="m", request=request, prompt_tokens=3, **answer))
    return path


@pytest.fixture
def plans(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans of every statement that goes through SQLAlchemy or `assay.traces.store.counts` from here on."""
    recorded: list[tuple[str, str]] = []
    db = sqlite3.connect(filled, check_same_thread=False)

    def explain(statement: str, values: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "DELETE", "UPDATE")):
            recorded.extend((row[3], statement) for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", values))

    def listener(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        explain(statement, parameters[0] if executemany else parameters)

    original = store_counts.stats

    def stats(execute: Any, run_id: str | None = None) -> Any:
        return original(
            lambda statement, values: (explain(statement, dict(values)), execute(statement, values))[1], run_id
        )

    monkeypatch.setattr(store_counts, "stats", stats)
    sa.event.listen(sa.Engine, "before_cursor_execute", listener)
    yield recorded
    sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    db.close()


def full_scans(plans: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(plan, statement) for plan, statement in plans if FULL_SCAN.match(plan) and not ALLOWED.match(plan)]


ESTIMATE = "math_qa --rubric math_qa --data arithmetic:size=60 --model embedded/smollm2-135m --dry-run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "traces list",
        f"traces list --run {RUN}",
        "traces list --task t1",
        "traces list --split gate",
        "traces show 0000000000000000000000000000001",
        f"traces show {3:032x}",
        "traces stats",
        f"traces stats --run {RUN}",
        f"traces rate {3:032x} 0.5",
        "traces close",
        "traces forget p1",
        "export sft --min-clean 0 --out out",
        f"export sft --min-clean 0 --out out --run {RUN}",
        "export grpo --rubric math_qa --min-clean 0 --out out",
        "export preferences --min-clean 0 --out out",
        "export transitions --min-clean 0 --out out",
        *(f"{command} {ESTIMATE}" for command in ("compile", "evaluate", "tune", "collect")),
    ],
)
def test_no_command_scans_a_table(filled: Path, plans: list[tuple[str, str]], command: str) -> None:
    result = CliRunner().invoke(group, [*command.split(), "--store", str(filled)])
    if ESTIMATE in command:
        assert result.exit_code == 0, result.output
        assert any("transitions" in statement for _, statement in plans)
    else:
        assert any("rollouts" in plan for plan, _ in plans)
    assert full_scans(plans) == []


def test_a_resumed_run_scans_no_table(filled: Path, plans: list[tuple[str, str]]) -> None:
    with Store(filled) as store:
        assert store.spent(RUN)["search"].calls == 60
        assert store.runs("compile-1") == [(RUN, "done")]
        store.unrecorded(RUN)
        store.forget_rater("ann")
        list(store.labels("q"))
    assert len(plans) >= 5
    assert full_scans(plans) == []
