"""`assay.deployed(rubric=)` and `serve --agent-rubric` with judges: a model for each, or an error at the start."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from production import two_versions

import assay
from assay.commands.serve import serve
from assay.errors import ConfigError, unspoken
from assay.traces import Store
from rigs.serving import chat_completion, served

RUBRIC = """
name: nice
criteria:
- {name: right, check: "assay.rubrics.checks:exact", weight: 1}
- {name: nice, weight: 1, judge: {text: "Is it nice?", scale: [no, yes]}%s}
"""
NAMED = {"judge_model": "openai/judge"}


class Judging:
    """A model server: answers `yes`, fails or waits."""

    def __init__(self) -> None:
        self.fails, self.gate = False, threading.Event()
        self.gate.set()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        if self.fails:
            return web.Response(status=400, text="no")
        return chat_completion(body["model"], json.dumps({"reasoning": "", "verdict": "yes"}))


@pytest.fixture
def judging(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Judging, str]]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    judge, app = Judging(), web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    Path("r.yaml").write_text(RUBRIC % "")
    with Store() as store:
        two_versions(store, own_folder)
    with served(app) as address:
        yield judge, f"{address}/v1"


def test_a_judge_without_a_model_is_refused_at_the_start(own_folder: Path) -> None:
    with Store() as store:
        two_versions(store, own_folder)
    Path("r.yaml").write_text(RUBRIC % "")
    with pytest.raises(ConfigError, match="'nice', and no model was named for it") as refused:
        assay.deployed("support", rubric="r.yaml")
    assert "`judge_model=NAME`" in unspoken(refused.value)
    with pytest.raises(ConfigError, match="no model was named for it"):
        serve(model="m", upstream="http://127.0.0.1:9", port=0, agent=("support",), agent_rubric="r.yaml")
    Path("r.yaml").write_text(RUBRIC % ", when: right")  # also a judge that is rarely asked
    with pytest.raises(ConfigError, match="no model was named for it"):
        assay.deployed("support", rubric="r.yaml")
    with pytest.raises(ConfigError, match="judge_model: would have no effect without rubric"):
        assay.deployed("support", **NAMED)
    with pytest.raises(ConfigError, match="judge_model: would have no effect without agent_rubric"):
        serve(agent=("support",), **NAMED)
    Path("pairs.yaml").write_text("text: Which is nicer?\ncompare: pairs\nmodel: openai/judge\n")
    Path("r.yaml").write_text("name: n\ncriteria:\n- {name: nicer, weight: 1, judge: {use: pairs.yaml}}\n")
    with pytest.raises(ConfigError, match="compares several outputs of a task in 'nicer'"):
        assay.deployed("support", rubric="r.yaml")


def test_judges_score_after_the_answer_and_their_calls_are_recorded(judging: tuple[Judging, str]) -> None:
    judge, address = judging
    agent = assay.deployed("support", rubric="r.yaml", judge_api_base=address, **NAMED)
    judge.gate.clear()
    answers = [agent(question=str(at), expected={"answer": "yes"}, data_subject="ann") for at in range(3)]  # at once
    assert not agent.wait(0.05)
    judge.gate.set()
    assert agent.wait(120)
    agent.store.flush()
    rollouts = [agent.store.rollout(answer.rollout) for answer in answers]
    assert [(r.score, r.coverage, [v.grade for v in r.verdicts]) for r in rollouts] == [(1.0, 1.0, [1.0, 1.0])] * 3
    judged = [agent.store.rollout(r.id) for r in agent.store.rollouts() if r.source == "judge"]
    assert [r.data_subject for r in judged] == ["ann"] * 3
    assert all(r.transitions for r in judged)


def test_a_judge_that_fails_leaves_rollouts_unscored_and_says_so(
    judging: tuple[Judging, str], caplog: pytest.LogCaptureFixture
) -> None:
    judge, address = judging
    judge.fails = True
    agent = assay.deployed("support", rubric="r.yaml", judge_api_base=address, **NAMED)
    with caplog.at_level(logging.WARNING, "assay.deployed"):
        answers = [agent(question=str(at), expected={"answer": "yes"}) for at in range(2)]
        assert agent.wait(120)
    agent.store.flush()
    assert [agent.store.rollout(answer.rollout).score for answer in answers] == [None, None]
    warnings = [record.message for record in caplog.records if "stay unscored" in record.message]
    assert len(warnings) == 1
    assert "assay traces score" in warnings[0]
    judge.fails = False
    judge.gate.clear()
    agent(question="3", expected={"answer": "yes"})  # does not wait for the judge
    judge.gate.set()
    assert agent.wait(120)


def test_a_metric_that_leaves_its_range_takes_no_answer_from_a_caller(own_folder: Path) -> None:
    Path("metrics.py").write_text("def stars(example, pred, trace=None):\n    return 5\n")
    with Store() as store:
        two_versions(store, own_folder)
    agent = assay.deployed("support", rubric="metrics.py:stars")
    prediction = agent(question="?", expected={"answer": "yes"})
    agent.store.flush()
    rollout = agent.store.rollout(prediction.rollout)
    assert (prediction.answer, rollout.status, rollout.score) == ("yes", "done", None)
    assert rollout.prediction == {"answer": "yes"}


def test_a_metric_calls_the_model_that_is_named_for_judges(judging: tuple[Judging, str]) -> None:
    Path("metrics.py").write_text(
        "import dspy\n\ndef metric(example, pred, trace=None):\n"
        "    return dspy.Predict('answer -> verdict')(answer=pred.answer).verdict == 'yes'\n"
    )
    agent = assay.deployed("support", rubric="metrics.py:metric", judge_api_base=judging[1], **NAMED)
    prediction = agent(question="?")
    assert agent.wait(120)
    agent.store.flush()
    assert agent.store.rollout(prediction.rollout).score == 1.0
