"""`assay deploy advance --rubric`: judges score production and replays, with the model that is named for them."""

import json
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner
from production import two_versions

import assay
from assay.cli.main import group
from assay.commands.deploy import advance_deployment
from assay.deployment.plan import Metric, Plan, Step
from assay.errors import ConfigError, unspoken
from assay.traces import Store
from rigs.serving import chat_completion, served

PLAN = Plan(steps=(Step(shadow=True, requests=2), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),))
RUBRIC = """
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
    Path("r.yaml").write_text(RUBRIC)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", grade)
    with served(app) as address, Store() as store:
        deployments = two_versions(store, own_folder)
        production = assay.deployed("support")
        for at in range(2):
            production(question=str(at), expected={"answer": "better"})
        production.store.flush()
        started = deployments.start("support@2", PLAN)
        command = ["deploy", "advance", "support", "--rubric", "r.yaml"]
        with pytest.raises(ConfigError, match="no model was named for it") as refused:
            advance_deployment("support", rubric="r.yaml")
        assert "`judge_model=NAME`" in unspoken(refused.value)
        with pytest.raises(ConfigError, match="judge_model: would have no effect without rubric"):
            advance_deployment("support", judge_model="openai/judge")
        named = ["--judge-model", "openai/judge", "--judge-api-base", f"{address}/v1"]
        done = CliRunner().invoke(group, [*command, *named])
        assert done.exit_code == 0, done.output
        store.flush()
        rollouts = {rollout.phase: store.rollout(rollout.id) for rollout in store.rollouts() if rollout.deployment}
        scores = [rollout.score for rollout in store.rollouts() if rollout.version == "support@1"]
        pairs = deployments.shadow(started.id, PLAN.metrics[0])
    assert (rollouts["shadow"].score, rollouts["shadow"].coverage) == (1.0, 1.0)
    assert scores == [0.0, 0.0]
    assert (list(pairs.differences), pairs.missing) == ([1.0, 1.0], 0)


def test_an_advance_names_the_criterion_that_it_could_not_decide(own_folder: Path) -> None:
    Path("r.yaml").write_text('name: r\ncriteria: [{name: same_text, check: "assay.rubrics.checks:exact"}]')
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployments.start("support@2", Plan(steps=(Step(weight=50, decides=True),), metrics=PLAN.metrics))
        production = assay.deployed("support")
        for at in range(2):
            production(question=str(at))
        production.store.flush()
        done = CliRunner().invoke(group, ["deploy", "advance", "support", "--rubric", "r.yaml"])
    assert done.exit_code == 0, done.output
    assert "same_text" in done.stderr
    assert "expected=" in done.stderr
