"""The model of an artifact where none is named: the one it was compiled with, at its own address."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from aiohttp import web

import assay
from assay.commands.collect import Collect, collect
from assay.commands.tune import tune
from assay.errors import ConfigError
from assay.runs.planning import plan_of
from assay.testing import scripted_lm
from rigs.serving import served


def answering() -> tuple[web.Application, list[str]]:
    """A server that answers every request, and the model names of the requests."""
    requests: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((await request.json())["model"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": '{"answer": "4"}'}}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app, requests


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"question": f"What is {n} + 0?", "answer": "4"}) + "\n" for n in range(40))
    )
    return {"rubric": "r.yaml", "data": "rows.jsonl"}


SMALL: dict[str, Any] = {"optimizer": "labeled", "sizes": {"val": 4, "gate": 3, "test": 3}}


def test_the_address_of_a_model_object_is_stored_in_the_artifact(project: dict[str, Any]) -> None:
    app, requests = answering()
    with served(app) as address:
        lm = dspy.LM("openai/m", api_base=f"{address}/v1", api_key="secret-4711", cache=False)
        report = assay.compile(dspy.Predict("question -> answer"), lm=lm, **SMALL, **project)
        manifest = (report.artifact / "manifest.json").read_text()
        assert json.loads(manifest)["api_base"] == f"{address}/v1"
        assert "secret-4711" not in manifest
        requests.clear()
        assert (
            assay.load(report.artifact, program=dspy.Predict("question -> answer"))(question="What is 2 + 2?").answer
            == "4"
        )
        assert set(requests) == {"m"}


@pytest.mark.slow
def test_every_job_on_an_artifact_uses_the_artifacts_model(project: dict[str, Any]) -> None:
    Path("p.py").write_text(
        "import dspy\n\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.p = dspy.Predict('question -> answer')\n\n    def forward(self, question):\n"
        "        return self.p(question=question)\n"
    )
    app, requests = answering()
    with served(app) as address:
        report = assay.compile("p.py:P", model="openai/own", api_base=f"{address}/v1", **SMALL, **project)
        artifact = str(report.artifact)
        requests.clear()
        assert collect(artifact, n=2, sizes={"train": 2}, **project).to_dict()["rollouts"] == 4
        assay.compile(artifact, max_search_calls=4, **SMALL, **project)
        tune(artifact, trials=2, sizes={"val": 2, "gate": 2, "test": 2}, cache=False, **project)
        assert plan_of(Collect(artifact, split="train", **project)).calls > 0
        assert set(requests) == {"own"}
        requests.clear()
        collect(artifact, n=1, model="openai/other", api_base=f"{address}/v1", sizes={"train": 2}, **project)
        assert set(requests) == {"other"}


def test_an_artifact_whose_model_has_no_loadable_name_requires_one(project: dict[str, Any]) -> None:
    report = assay.compile(
        dspy.Predict("question -> answer"), lm=scripted_lm(lambda request: '{"answer": "4"}'), **SMALL, **project
    )
    with pytest.raises(ConfigError, match="an object that no name stands for"):
        collect(str(report.artifact), **project)


def test_tenant_and_consent_columns_are_used_by_export_filters(project: dict[str, Any]) -> None:
    rows = [
        {"question": f"What is {n} + 0?", "answer": "4", "tenant": "ab"[n % 2], "consent": ["yes", "no"][n % 4 // 2]}
        for n in range(40)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lm = scripted_lm(lambda request: '{"answer": "4"}')
    collect(dspy.Predict("question -> answer"), n=1, lm=lm, **project)
    with assay.Store() as store:
        owners = {(rollout.tenant, rollout.consent) for rollout in store.rollouts(limit=None)}
    assert owners == {("a", "yes"), ("b", "yes"), ("a", "no"), ("b", "no")}


@pytest.mark.slow
def test_an_evaluation_on_tasks_that_the_compile_selected_on_is_reported(project: dict[str, Any]) -> None:
    lm = scripted_lm(lambda request: '{"answer": "4"}')
    report = assay.compile(dspy.Predict("question -> answer"), lm=lm, **SMALL, **project)
    on_val, on_gate = (
        assay.evaluate(str(report.artifact), lm=lm, split=split, **project).to_dict() for split in ("val", "gate")
    )
    assert any("were used to compile" in note for note in on_val["notes"])
    assert not any("were used to compile" in note for note in on_gate["notes"])
