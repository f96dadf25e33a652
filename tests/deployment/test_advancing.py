"""Evaluations of a deployment by gateways and by commands: replays, the suite, judges; judges in production."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from aiohttp import web
from production import two_versions

import assay
from assay.commands.advancing import Advancer
from assay.commands.deploy import advance_deployment
from assay.commands.serve import serve
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import set_suite, suite_of
from assay.deployment.settings import Suite, SuiteResult
from assay.errors import ConfigError, DeploymentError, unspoken
from assay.rubrics import Criterion, Rubric
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.serving import chat_completion, served

SHADOW = Plan(
    steps=(Step(shadow=True, requests=4), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),)
)  # fmt: skip
RUBRIC = Rubric("any", [Criterion(name="any", weight=1, check=lambda task, prediction, rollout: True)])


def test_gateways_advance_a_deployment_once_and_replay_no_rollout_twice(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        production = assay.deployed("support", rubric=RUBRIC)
        for at in range(4):
            production(question=str(at))
        production.store.flush()
        advancers = [Advancer(production.store, "support", rubric=RUBRIC, every_s=0.01) for _ in range(2)]
        assert advancers[0].once() == 0.0  # no deployment
        deployment = deployments.start("support@2", SHADOW)
        ready = threading.Barrier(2)

        def advance(advancer: Advancer) -> None:
            ready.wait()
            advancer.once()

        threads = [threading.Thread(target=advance, args=(advancer,)) for advancer in advancers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        production.store.flush()
        advancers[0].start()
        advancers[0].stop()
        assert [row["action"] for row in deployments.history(deployment.id)] == ["next"]
        assert deployments.requests(deployment.id, 0, 0.0) == {"candidate": 4}


def test_the_suite_of_an_agent_is_kept_with_its_deployment(own_folder: Path) -> None:
    data = own_folder / "suite.jsonl"
    data.write_text("{}")
    with Store() as store:
        deployments = two_versions(store, own_folder)
        assert suite_of(store.engine, "support") is None
        set_suite(
            store.engine, "support", Suite(data=str(data), rubric="exact", threshold=0.5, pass_rate=0.8), why="v1"
        )
        suite = suite_of(store.engine, "support")
        assert suite == Suite(data=str(data), rubric="exact", threshold=0.5, pass_rate=0.8)
        # 2 of 4 tasks reach 0.5; mean of the scored ones (1 + 1 + 0.25) / 3
        result = SuiteResult.of(suite, {"a": 1.0, "b": 1.0, "c": 0.25, "d": float("nan")}, (0.1, 1.0))
        assert (result.score, result.pass_rate, result.n, result.unscored) == (0.75, 0.5, 4, 1)
        assert result.missed == ("passes 50.0% of the validation suite's tasks, 80.0% are needed",)
        checks = {"suite": asdict(result), "breaks": ["outputs: …"], "changes": [], "forced": True}
        deployment = deployments.start("support@2", SHADOW, checks=checks)
        first = deployments.history(deployment.id)[0]
        assert (first["action"], first["number"], first["suite"]["pass_rate"]) == ("start", 0, 0.5)
        assert "forced: outputs: …; passes 50.0%" in first["reason"]
        data.write_text("[]")
        with pytest.raises(DeploymentError, match=r"suite\.jsonl, which is missing here or was changed since"):
            suite_of(store.engine, "support")


# -- judges of an advance

STEPS = (Step(shadow=True, requests=2), Step(weight=50, decides=True))
JUDGED = """
name: nice
criteria:
- {name: right, check: "assay.rubrics.checks:exact", weight: 1}
- {name: nice, weight: 1, judge: {text: "Is it nice?", scale: [no, yes]}}
"""


async def grade(request: web.Request) -> web.Response:
    body = await request.json()
    verdict = "yes" if "better" in json.dumps(body["messages"][-1]) else "no"
    return chat_completion(body["model"], json.dumps({"reasoning": "", "verdict": verdict}))


@pytest.mark.slow
def test_judges_of_an_advance_use_the_named_model_also_for_replays(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    Path("r.yaml").write_text(JUDGED)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", grade)
    with served(app) as address, Store() as store:
        deployments = two_versions(store, own_folder)
        production = assay.deployed("support")
        for at in range(2):
            production(question=str(at), expected={"answer": "better"})
        production.store.flush()
        started = deployments.start("support@2", replace(SHADOW, steps=STEPS))
        command = ["deploy", "advance", "support", "--rubric", "r.yaml"]
        with pytest.raises(ConfigError, match="no model was named for it") as refused:
            advance_deployment("support", rubric="r.yaml")
        assert "`judge_model=NAME`" in unspoken(refused.value)
        with pytest.raises(ConfigError, match="judge_model: would have no effect without rubric"):
            advance_deployment("support", judge_model="openai/judge")
        named = ["--judge-model", "openai/judge", "--judge-api-base", f"{address}/v1"]
        done = assay_command(*command, *named)
        assert done.code == 0, done.stderr
        store.flush()
        rollouts = {rollout.phase: store.rollout(rollout.id) for rollout in store.rollouts() if rollout.deployment}
        scores = [rollout.score for rollout in store.rollouts() if rollout.version == "support@1"]
        pairs = deployments.shadow(started.id, SHADOW.metrics[0])
    assert (rollouts["shadow"].score, rollouts["shadow"].coverage) == (1.0, 1.0)
    assert scores == [0.0, 0.0]
    assert (list(pairs.differences), pairs.missing) == ([1.0, 1.0], 0)


def test_an_advance_names_the_criterion_that_it_could_not_decide(own_folder: Path) -> None:
    Path("r.yaml").write_text('name: r\ncriteria: [{name: same_text, check: "assay.rubrics.checks:exact"}]')
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployments.start("support@2", Plan(steps=(Step(weight=50, decides=True),), metrics=SHADOW.metrics))
        production = assay.deployed("support")
        for at in range(2):
            production(question=str(at))
        production.store.flush()
        done = assay_command("deploy", "advance", "support", "--rubric", "r.yaml")
    assert done.code == 0, done.stderr
    assert "same_text" in done.stderr
    assert "expected=" in done.stderr


# -- judges of production


NICE = """
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
    Path("r.yaml").write_text(NICE % "")
    with Store() as store:
        two_versions(store, own_folder)
    with served(app) as address:
        yield judge, f"{address}/v1"


def test_a_judge_without_a_model_is_refused_at_the_start(own_folder: Path) -> None:
    with Store() as store:
        two_versions(store, own_folder)
    Path("r.yaml").write_text(NICE % "")
    with pytest.raises(ConfigError, match="'nice', and no model was named for it") as refused:
        assay.deployed("support", rubric="r.yaml")
    assert "`judge_model=NAME`" in unspoken(refused.value)
    with pytest.raises(ConfigError, match="no model was named for it"):
        serve(model="m", upstream="http://127.0.0.1:9", port=0, registered=("support",), agent_rubric="r.yaml")
    Path("r.yaml").write_text(NICE % ", when: right")  # also a judge that is rarely asked
    with pytest.raises(ConfigError, match="no model was named for it"):
        assay.deployed("support", rubric="r.yaml")
    with pytest.raises(ConfigError, match="judge_model: would have no effect without rubric"):
        assay.deployed("support", **NAMED)
    with pytest.raises(ConfigError, match="judge_model: would have no effect without agent_rubric"):
        serve(registered=("support",), **NAMED)
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
