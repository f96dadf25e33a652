"""Scores of stored rollouts by a rubric: failures, undecided ones, running ones."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from collected_answers import program as program

import assay
from assay.cli import group
from assay.commands.scoring import score_rollouts
from assay.datasets import Task
from assay.errors import ConfigError
from assay.jobs.recording import opened_store
from assay.traces import Rollout, Store, ToolCall, Transition


def counts(rubric: str, **options: Any) -> tuple[int, int, int, float | None]:
    """Rollouts that were scored, unscored and skipped, and their mean score."""
    report = score_rollouts(rubric=rubric, store="s.db", **options).to_dict()
    return report["scored"], report["unscored"], report["skipped"], report["mean"]


def test_a_decorated_function_is_scored_by_its_rubric_and_its_failure_is_a_score_of_0(program: str) -> None:
    @assay.recorded(rubric="r.yaml", store="s.db", expected={"answer": "7"})
    def agent(question: str, loud: bool = False) -> str:
        if question == "break":
            raise ValueError("no idea")
        return "7"

    @assay.recorded(store="s.db")
    async def later(question: str) -> str:
        await asyncio.sleep(0)
        return "8"

    assert agent("q") == "7"
    assert asyncio.run(later("q")) == "8"
    with pytest.raises(ValueError, match="no idea"):
        agent("break")
    opened_store("s.db")[0].flush()
    with Store("s.db") as store:
        rollouts = {(json.dumps(r.inputs), r.score, r.status) for r in store.rollouts()}
    assert ('{"question": "q"}', None, "done") in rollouts
    assert ('{"question": "break", "loud": false}', 0.0, "failed") in rollouts


def test_stored_rollouts_are_scored_by_a_rubric_afterwards(program: str) -> None:
    with assay.record({"question": "q"}, store="s.db", expected={"answer": "7"}) as run:
        used = ToolCall(name="f", arguments={"x": 1}, result="7")
        run.call([{"role": "user", "content": "q"}], "7", model="m", tools=[used])
        run.answer("7")
    Path("r2.yaml").write_text(
        "name: r2\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
        "- {name: ran, scope: step, weight: 0.05, check: 'assay.rubrics.steps:tool_executed'}\n"
    )
    opened_store("s.db")[0].flush()
    assert counts("r2.yaml") == (1, 0, 0, 1.0)
    assert counts("r2.yaml") == (0, 0, 1, None)
    assert counts("r2.yaml", again=True) == (1, 0, 0, 1.0)
    with Store("s.db") as store:
        rollout = store.rollout(run.rollout.id)
    assert (rollout.score, rollout.rubric[:3], rollout.transitions[0].step_rewards) == (1.0, "r2@", {"ran": 0.05})


def test_scoring_reports_the_number_of_running_rollouts(program: str) -> None:
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    with Store("s.db") as store:
        answers = {"expected": {"answer": "7"}, "prediction": {"answer": "7"}}
        for status, source in (
            ("running", "gateway"),
            ("running", "gateway"),
            ("running", "judge"),
            ("done", "gateway"),
        ):
            store.put_rollout(Rollout(status=status, source=source, inputs={"question": "q"}, **answers))
    report = score_rollouts(rubric="r.yaml", store="s.db").to_dict()
    assert (report["scored"], report["running"]) == (1, 2)
    result = CliRunner().invoke(group, ["traces", "score", "--rubric", "r.yaml", "--store", "s.db"])
    assert "2 rollouts are still running" in result.stdout


def test_a_failure_of_the_model_is_not_scored_as_the_agents(program: str) -> None:
    with Store("s.db") as store:
        broken = Transition(t=0, model="m", request={}, error="HTTP 500")
        rollout = Rollout(status="done", transitions=[broken], inputs={"question": "q"})
        store.put_rollout(rollout)
        store.put_transition(rollout.id, broken)
    assert counts("r.yaml") == (0, 1, 0, None)
    for bad in ({"score": 5.0}, {"score": "high"}, {"split": "Test"}):
        with pytest.raises(ConfigError), assay.record("x", store="s.db", **bad):
            pass


def test_a_recording_is_scored_with_the_expected_outputs_that_it_stores_and_can_be_read_at_once() -> None:
    @assay.recorded(rubric="exact", store="s.db", expected={"answer": "7"})
    def agent(inputs: dict[str, str]) -> str:
        return "7"

    agent({"question": "an argument of this name is no row"})
    row = {"inputs": {"question": "q"}, "expected": {"answer": "7"}}
    for task, fields in (
        ({"question": "q"}, {"expected": {"answer": "7"}}),
        (row, {}),
        (Task(**row), {}),
        (Task(inputs=row["inputs"], expected={"answer": "8"}), {"expected": {"answer": "7"}}),
    ):
        with assay.record(task, rubric="exact", store="s.db", **fields) as run:
            run.answer("7")
        assert run.rollout.score == 1
    with Store("s.db") as store:
        rollouts = list(store.rollouts())
    assert [(r.score, r.expected) for r in rollouts] == [(1, {"answer": "7"})] * 5
    assert {r.task_id for r in rollouts[:-1]} == {Task(inputs={"question": "Q "}).id}
    assert list(rollouts[-1].inputs) == ["inputs"]
