"""The gate of a step of `assay improve` ends once it has decided, under the caps of the whole improvement."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

import assay
from assay.errors import BudgetExceeded
from assay.models import Meter
from assay.testing.serving import served

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        found, number = self.answer(question=question), int(question.split()[2])
        return dspy.Prediction(answer=str({what}))
"""


class Server:
    def __init__(self) -> None:
        self.calls = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls += 1
        choice = {"index": 0, "message": {"role": "assistant", "content": json.dumps({"answer": "4"})}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        return web.json_response({"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def job(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An improvement whose only step comes to `after.py`."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    made = SimpleNamespace(outcome=SimpleNamespace(winner="one"), artifact="after.py:Mine", meter=Meter())
    monkeypatch.setattr("assay.improving.compile_program", lambda *_, **__: made)
    rows = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (tmp_path / "before.py").write_text(PROGRAM.format(what="number"))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    with served(app) as url:
        yield {
            "rubric": "r.yaml", "data": "data.jsonl", "name": "up", "order": ["prompts"], "model": "openai/m", "api_base": f"{url}/v1",
            "adapter": "json", "sizes": {"gate": 50, "test": 5}, "cache": False, "preflight": False,
        }  # fmt: skip


def test_a_gate_ends_once_it_has_decided(job: dict[str, Any], server: Server) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", **job)
    step = report.steps[0]
    assert step["kept"]
    assert step["gate"]["low"] > 0
    assert (step["gate"]["n"], step["before"], step["after"]) == (20, 0.0, 1.0)  # of 50, evaluated every 10
    assert step["note"] == "gate ended after 20 of 50 tasks: a difference is shown; its interval holds for stopping early"
    assert server.calls == 2 * 20 + 2 * 5  # gate and test


def test_a_gate_that_can_show_nothing_any_more_ends(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="-number"))  # as wrong
    step = assay.improve("before.py:Mine", **job).steps[0]
    assert not step["kept"]
    assert 10 <= step["gate"]["n"] < 50
    assert "could hardly be shown" in step["note"]


def test_without_early_stop_a_gate_takes_the_whole_split(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    step = assay.improve("before.py:Mine", early_stop=False, **job).steps[0]
    assert (step["gate"]["n"], step["kept"], "note" in step) == (50, True, False)


def test_the_caps_are_of_both_sides_of_a_gate_together(job: dict[str, Any], server: Server) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    with pytest.raises(BudgetExceeded, match=r"decides nothing\. Raise the cap"):
        assay.improve("before.py:Mine", max_calls=14, **job)
    assert server.calls == 14
    report = assay.improve("before.py:Mine", max_calls=100, resume=True, **job)
    assert report.steps[0]["kept"]


def test_the_sealed_test_is_opened_once_and_ends_once_it_has_decided(job: dict[str, Any], server: Server) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", **{**job, "sizes": {"gate": 10, "test": 50}})
    assert report.test is not None
    assert report.test_openings == {"this_job": 1, "this_store": 1}
    assert (report.test["before"]["n"], report.test["after"]["n"], report.test["gain"]["n"]) == (20, 20, 20)  # of 50, evaluated every 10
    assert report.test["gain"]["low"] > 0
    assert report.notes == ["test ended after 20 of 50 tasks: a difference is shown; its interval holds for stopping early"]
    assert server.calls == 2 * 10 + 2 * 20


def test_without_early_stop_the_sealed_test_takes_the_whole_split(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", early_stop=False, **{**job, "sizes": {"gate": 10, "test": 30}})
    assert report.test is not None
    assert (report.test["after"]["n"], report.notes) == (30, [])
    assert report.test_openings == {"this_job": 1, "this_store": 1}


def test_the_interval_of_a_criterion_is_as_wide_as_that_of_the_score_where_a_test_ended_early(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2 * (number % 3 > 0)"))  # two of three tasks
    report = assay.improve("before.py:Mine", **{**job, "sizes": {"gate": 30, "test": 100}})
    assert report.test is not None
    assert report.test["gain"]["n"] < 100
    assert report.test["criteria"]["right"] == report.test["gain"]  # the only criterion
