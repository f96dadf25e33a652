"""The caps of an improvement apply to all its steps together; `resume` on a job that was never started starts it."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import assay
from assay.commands.compile import Compile
from assay.errors import Diverged
from assay.evaluation import SilentProgress, evaluate
from assay.runs.jobs import open_job
from assay.testing import scripted_lm
from rigs.serving import chat_completion, served

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


class Server:
    def __init__(self) -> None:
        self.calls = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls += 1
        return chat_completion(body["model"], json.dumps({"answer": "4"}))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.fixture
def job(place: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A job whose `prompts` step makes 10 model calls and whose `grpo` step makes 8 without the response cache."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def compile_program(program: str, *, split: str = "train", cached: bool = True, **options: Any) -> Any:
        known = {"max_calls", "api_base", "prompt_format", "sizes"}
        kept_options = {name: value for name, value in options.items() if name in known} | {"model": "openai/m"}
        config = Compile(program=program, rubric="r.yaml", data="data.jsonl", **kept_options)
        with open_job(config, program=program, rubric="r.yaml", progress=SilentProgress()) as opened:
            if not cached:
                opened.session.lm.recording.cache = None
            tasks = getattr(opened.splits, split)[: 10 if split == "train" else 8]
            opened.session.register(tasks)
            evaluate(opened.recorded, tasks, opened.session, name="all")
        raise Diverged("far enough")

    monkeypatch.setattr("assay.commands.improve.compile_program", compile_program)
    monkeypatch.setattr("assay.commands.improve.train", functools.partial(compile_program, split="val", cached=False))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    with served(app) as url:
        grpo = {
            "model": "embedded/smollm2-135m",
            "steps": 1,
            "prompts_per_step": 1,
            "num_generations": 4,
            "evaluate_every": 0,
        }  # 4 calls by its settings
        yield {
            "rubric": "r.yaml", "data": "data.jsonl", "name": "up", "model": "openai/m", "api_base": f"{url}/v1",
            "prompt_format": "json",
            "preflight": False, "sizes": {"gate": 4, "test": 4}, "grpo": grpo,
        }  # fmt: skip


RESERVED = 2 * 4 + 2 * 4  # calls of gate and test


def test_caps_cover_all_steps_and_survive_resume(job: dict[str, Any], server: Server) -> None:
    order = ["prompts", "grpo", "grpo"]
    report = assay.improve(
        "mine.py:Mine", order=order, max_calls=23 + RESERVED, resume=True, **job
    )  # starts the job, as there is nothing to resume
    assert "step 3 of 3, grpo" in str(report.stopped)
    assert "cap of 5 calls" in str(report.stopped)  # 23 - 10 - 8 are left to the third
    assert server.calls == 23
    report = assay.improve("mine.py:Mine", order=order, max_calls=25 + RESERVED, resume=True, **job)
    assert "cap of 7 calls" in str(report.stopped)  # of which 5 are spent
    assert server.calls == 25
    report = assay.improve("mine.py:Mine", order=order, max_calls=40 + RESERVED, resume=True, **job)
    assert [step["note"] for step in report.steps] == ["far enough"] * 3
    assert report.stopped is None
    assert 25 + 1 <= server.calls <= 40


def test_step_without_remaining_budget_is_not_started(job: dict[str, Any], server: Server) -> None:
    report = assay.improve("mine.py:Mine", order=["prompts", "grpo", "grpo"], max_calls=18 + RESERVED, **job)
    assert (
        "18 of 34 calls of the whole improvement are spent; the rest is kept for its gate and its sealed test"
        in str(report.stopped)
    )
    assert (len(report.steps), report.test, server.calls) == (2, None, 18)
    assert report.artifact is not None  # the program as it was, since no step was kept


def test_training_that_exceeds_the_caps_is_not_started(job: dict[str, Any], server: Server) -> None:
    report = assay.improve(
        "mine.py:Mine", order=["prompts", "grpo"], max_calls=60, **{**job, "grpo": {**job["grpo"], "steps": 20}}
    )
    text = (
        "step 2 of 2, grpo: 10 of 60 calls of the whole improvement are spent and 16 are kept for its gate and its "
        "sealed test: 34 are left"
    )
    assert report.stopped == f"{text}, and its work takes about 80"
    assert server.calls == 10


def test_resume_starts_a_job_that_never_started(place: Path) -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    options: dict[str, Any] = {
        "rubric": "r.yaml",
        "data": "data.jsonl",
        "lm": lm,
        "prompt_format": "json",
        "resume": True,
    }
    report = assay.evaluate("mine.py:Mine", **options)
    assert len(report.evaluation) > 5
    repeated = assay.evaluate("mine.py:Mine", **options)  # it is done: replayed from the response cache
    assert (repeated.to_dict()["calls"], repeated.evaluation.mean) == (
        report.to_dict()["calls"],
        report.evaluation.mean,
    )
