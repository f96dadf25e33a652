"""Judges in a user's file: compiled, loaded elsewhere, used and audited."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import assay
import assay.commands.judge_compile as judging
import assay.commands.scoring
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_score import score_rows
from assay.runs.loading import load_judge
from assay.testing import scripted_lm
from rigs.serving import served

CODE = '''
from assay.judges import Judge, PointwiseJudge

from wording import QUESTION


class Plain(PointwiseJudge):
    """Says its question itself and takes nothing."""

    def __init__(self):
        super().__init__({"text": QUESTION, "scale": ("no", "yes")}, shows=("output",))


class Keen(PointwiseJudge):
    """Takes what every judge takes, but for its question."""

    def __init__(self, **options):
        super().__init__(QUESTION, **{"shows": ("output",), **options})


class Lexical(Judge):
    """Asks no model."""

    def __init__(self, word="good"):
        super().__init__(QUESTION, shows=("output",))
        self.word = word

    @property
    def config(self):
        return {**super().config, "word": self.word}

    def read(self, given):
        p = 0.9 if self.word in str(given["output"]) else 0.2
        return {"no": 1 - p, "yes": p}, None


class Forgetful(Lexical):
    """Its config leaves out what it is made of."""

    def __init__(self, word):
        super().__init__(word)

    @property
    def config(self):
        return Judge.config.fget(self)


made = Keen()
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "wording.py").write_text('QUESTION = "Is it good?"\n')
    (tmp_path / "mine.py").write_text(CODE)
    rows = [
        {
            "item_id": str(n),
            "output": f"{'good' if n % 2 else 'poor'} text {n}",
            "rater": "r",
            "label": "yes" if n % 2 else "no",
            "split": split,
        }
        for n, split in enumerate(["train", "val", "gate", "test"] * 12)
    ]
    for at, row in enumerate(rows):
        good = (at // 4) % 2
        row |= {"output": f"{'good' if good else 'poor'} text {at}", "label": "yes" if good else "no"}
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def script(request: Any) -> Any:
    p = 0.8 if "good text" in str(request.messages[-1].text) else 0.3
    return {"yes": p, "no": 1 - p}


def options(project: Path) -> dict[str, Any]:
    return {"lm": scripted_lm(script, logprobs=True), "store": project / "a.db"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Plain", "Keen", "made", "Lexical"])
def test_user_judge_is_compiled_loaded_scored_and_audited(project: Path, name: str) -> None:
    report = judging.compile_judge(
        f"{project}/mine.py:{name}", labels=str(project / "labels.jsonl"), out=project / "artifact", **options(project)
    )
    assert not any("only be loaded" in note for note in report.notes)
    manifest = json.loads((report.artifact / "manifest.json").read_text())
    assert "assay_source_" not in json.dumps(manifest["program"])
    if name == "Lexical":
        assert report.card["mass"] is None
        assert repr(report.card).startswith("ReliabilityCard(objective=")
        assert len(repr(report.card)) < 200
    else:
        assert report.card["mass"] == {"mean": pytest.approx(1.0), "lowest": pytest.approx(1.0)}
    elsewhere = project / "elsewhere" / "judge"
    shutil.copytree(report.artifact, elsewhere)
    for file in ("mine.py", "wording.py"):
        (project / file).unlink()
    assert load_judge(elsewhere).spec.text == "Is it good?"
    (project / "d.jsonl").write_text('{"output": "good text"}\n{"output": "poor text"}\n')
    scored = score_rows(str(elsewhere), data=str(project / "d.jsonl"), **options(project))
    assert (scored.n, scored.coverage) == (2, 1.0)
    (project / "c.jsonl").write_text('{"good": "a good text", "bad": "a poor text"}\n')
    audited = audit_judge(str(elsewhere), cases=str(project / "c.jsonl"), **options(project))
    assert audited.attacks["tells good from bad"]["passed"]


@pytest.mark.slow
def test_artifact_loads_in_another_process(project: Path) -> None:
    report = judging.compile_judge(
        f"{project}/mine.py:Lexical", labels=str(project / "labels.jsonl"), out=project / "artifact", **options(project)
    )
    code = f"from assay.runs.loading import load_judge; print(load_judge({str(report.artifact)!r}).word)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout.strip() == "good", done.stderr


@pytest.mark.slow
def test_compile_reloads_its_artifact(project: Path) -> None:
    from assay.sources.modules import attribute_of

    judge = attribute_of(f"{project}/mine.py:Forgetful")("good")
    report = judging.compile_judge(
        judge, labels=str(project / "labels.jsonl"), out=project / "artifact", **options(project)
    )
    note = next(note for note in report.notes if "can only be loaded into an instance" in note)
    assert "'word'" in note
    assert "Forgetful.config" in note


@pytest.mark.slow
def test_compiled_judge_uses_its_compiled_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judging.compile_judge(
        f"{project}/mine.py:Plain", labels=str(project / "labels.jsonl"), out=project / "artifact", **options(project)
    )
    requests: list[str] = []

    def opened(config: Any, **_: Any) -> Any:
        requests.append(config.model)
        raise InterruptedError

    monkeypatch.setattr("assay.runs.opening.open_run", opened)
    (project / "d.jsonl").write_text('{"output": "good text"}\n')
    for chosen in ({}, {"model": None}, {"model": "openai/other"}):
        with pytest.raises(InterruptedError):
            score_rows(str(report.artifact), data=str(project / "d.jsonl"), store=project / "b.db", **chosen)
    measured = json.loads((report.artifact / "manifest.json").read_text())["model"]
    assert requests == [measured, measured, "openai/other"]


def judging_server() -> tuple[web.Application, list[str]]:
    """A server that says yes to good texts, and the keys that its calls came with."""
    keys: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization", ""))
        word = "yes" if "good text" in json.dumps((await request.json())["messages"][-1]) else "no"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": word}}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "j", "choices": [choice], "usage": {}}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app, keys


@pytest.mark.slow
def test_compiled_judge_uses_its_compiled_server(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-4712")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (own, requests), (other, other_requests) = judging_server(), judging_server()
    judge, labels, db = f"{project}/mine.py:Plain", str(project / "labels.jsonl"), project / "a.db"
    with served(own) as address, served(other) as elsewhere:
        named = {"model": "openai/j", "api_base": f"{address}/v1", "api_key_env": "JUDGE_KEY"}
        report = judging.compile_judge(
            judge, labels=labels, optimizer="calibrate", out=project / "artifact", store=db, **named
        )
        manifest = (report.artifact / "manifest.json").read_text()
        assert json.loads(manifest)["api_base"] == f"{address}/v1"
        assert json.loads(manifest)["api_key_env"] == "JUDGE_KEY"
        assert "sk-judge-4712" not in "".join(path.read_text() for path in report.artifact.glob("*.*"))
        (project / "d.jsonl").write_text('{"output": "a new good text"}\n{"output": "a new poor text"}\n')
        (project / "c.jsonl").write_text('{"good": "another good text", "bad": "another poor text"}\n')
        compiled, rows = str(report.artifact), str(project / "d.jsonl")
        requests.clear()
        assert score_rows(compiled, data=rows, store=db).verdicts == {"no": 1, "yes": 1}
        audit_judge(compiled, cases=str(project / "c.jsonl"), store=db)
        assert len(requests) > 2
        assert set(requests) == {"Bearer sk-judge-4712"}
        requests.clear()
        score_rows(compiled, data=rows, store=db, api_base=f"{elsewhere}/v1", cache=False)
        assert len(other_requests) >= 2
        assert not requests


@pytest.mark.slow
def test_rubric_uses_a_compiled_judges_server_unless_overridden(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-4712")
    (own, requests), (other, other_requests) = judging_server(), judging_server()
    labels, db = str(project / "labels.jsonl"), project / "a.db"
    (project / "p.py").write_text(
        "import dspy\n\n\nclass P(dspy.Module):\n    def forward(self, question):\n"
        "        return dspy.Prediction(text=question)\n"
    )
    (project / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"a good text {n}"}) + "\n" for n in range(30))
    )
    with served(own) as address, served(other) as elsewhere:
        named = {"model": "openai/j", "api_base": f"{address}/v1", "api_key_env": "JUDGE_KEY"}
        report = judging.compile_judge(
            f"{project}/mine.py:Plain",
            labels=labels,
            optimizer="calibrate",
            out=project / "artifact",
            store=db,
            **named,
        )
        (project / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: good, judge: {{use: {report.artifact}}}}}\n")
        requests.clear()

        def evaluated(**judge: Any) -> float:
            options = {
                "rubric": project / "r.yaml",
                "data": str(project / "tasks.jsonl"),
                "store": db,
                "cache": False,
                **judge,
            }
            return assay.evaluate(
                f"{project}/p.py:P", model="openai/program", api_base=f"{elsewhere}/v1", **options
            ).to_dict()["result"]["score"]

        assert evaluated() > 0.7
        assert set(requests) == {"Bearer sk-judge-4712"}
        assert not other_requests
        requests.clear()
        evaluated(judge_model="openai/other")
        assert len(other_requests) >= 3
        assert not requests

        assert (
            assay.commands.scoring.score_rollouts(rubric=project / "r.yaml", store=db, again=True).to_dict()["scored"]
            > 0
        )
        assert set(requests) == {"Bearer sk-judge-4712"}
