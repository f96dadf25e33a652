"""No command scans a table if an index serves: query plans on SQLite of the statements that commands run."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from assay.cli.main import group
from assay.errors import FailureKind
from assay.traces import Rollout, Store, ToolCall, Transition
from assay.traces.store import counts as store_counts

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
    db = sqlite3.connect(filled)

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
