"""Judges in a user's file: compiled, loaded elsewhere, used and audited."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

import assay
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_compile import compile_judge
from assay.commands.judge_score import score_rows
from assay.commands.scoring import score_rollouts
from assay.sources.modules import attribute_of
from assay.testing import scripted_lm
from rigs.serving import chat_completion, served

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
def project(own_folder: Path) -> Path:
    prepare(own_folder)
    return own_folder


def prepare(folder: Path) -> None:
    (folder / "wording.py").write_text('QUESTION = "Is it good?"\n')
    (folder / "mine.py").write_text(CODE)
    rows = [
        {"item_id": str(at), "output": f"{text} text {at}", "rater": "r", "label": label, "split": split}
        for at, (text, label, split) in enumerate(
            (*kind, split)
            for _ in range(6)
            for kind in (("poor", "no"), ("good", "yes"))
            for split in ("train", "val", "gate", "test")
        )
    ]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "d.jsonl").write_text('{"output": "a new good text"}\n{"output": "a new poor text"}\n')
    (folder / "c.jsonl").write_text('{"good": "another good text", "bad": "another poor text"}\n')


def compiled(folder: Path, judge: Any, **options: Any) -> Any:
    return compile_judge(judge, labels=str(folder / "labels.jsonl"), out=folder / "artifact", **options)


def script(request: Any) -> Any:
    p = 0.8 if "good text" in str(request.messages[-1].text) else 0.3
    return {"yes": p, "no": 1 - p}


def scripted(folder: Path) -> dict[str, Any]:
    return {"lm": scripted_lm(script, logprobs=True), "store": folder / "a.db"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Plain", "Keen", "made", "Lexical"])
def test_user_judge_is_compiled_loaded_scored_and_audited(project: Path, name: str) -> None:
    report = compiled(project, f"{project}/mine.py:{name}", **scripted(project))
    assert not any("only be loaded" in note for note in report.notes)
    manifest = json.loads((report.artifact / "manifest.json").read_text())
    assert "assay_source_" not in json.dumps(manifest["program"])
    elsewhere = project / "elsewhere" / "judge"
    shutil.copytree(report.artifact, elsewhere)
    for file in ("mine.py", "wording.py"):
        (project / file).unlink()
    if name == "Lexical":
        assert report.card["mass"] is None
        assert repr(report.card).startswith("ReliabilityCard(objective=")
        assert len(repr(report.card)) < 200
        code = f"from assay import load_judge; print(load_judge({str(elsewhere)!r}).word)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
        assert done.stdout.strip() == "good", done.stderr
    else:
        assert report.card["mass"] == {"mean": pytest.approx(1.0), "lowest": pytest.approx(1.0)}
    assert assay.load_judge(elsewhere).spec.text == "Is it good?"
    scored = score_rows(str(elsewhere), data=str(project / "d.jsonl"), **scripted(project))
    assert (scored.n, scored.coverage) == (2, 1.0)
    audited = audit_judge(str(elsewhere), cases=str(project / "c.jsonl"), **scripted(project))
    assert audited.attacks["tells good from bad"]["passed"]


@pytest.mark.slow
def test_a_judge_whose_config_leaves_out_an_argument_can_only_be_loaded_into_an_instance(project: Path) -> None:
    report = compiled(project, attribute_of(f"{project}/mine.py:Forgetful")("good"), **scripted(project))
    note = next(note for note in report.notes if "can only be loaded into an instance" in note)
    assert "'word'" in note
    assert "Forgetful.config" in note


class Judging:
    """A server that says yes to good texts, and the model and the key of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self.answer)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((body["model"], request.headers.get("Authorization", "")))
        return chat_completion(body["model"], "yes" if "good text" in json.dumps(body["messages"][-1]) else "no")

    def asked(self) -> set[tuple[str, str]]:
        """Models and keys since the last question."""
        calls, self.calls = self.calls, []
        return set(calls)


OWN = {("j", "Bearer sk-judge-4712")}


@pytest.fixture(scope="module")
def served_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A judge that was compiled with the model, the server and the key of its own, and another server."""
    folder, own, other = tmp_path_factory.mktemp("served"), Judging(), Judging()
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch, served(own.app) as address, served(other.app) as elsewhere:
        patch.setenv("JUDGE_KEY", "sk-judge-4712")
        named = {"model": "openai/j", "api_base": f"{address}/v1", "api_key_env": "JUDGE_KEY"}
        job = {"optimizer": "calibrate", "store": folder / "a.db", **named}
        artifact = compiled(folder, f"{folder}/mine.py:Plain", **job).artifact
        yield SimpleNamespace(
            folder=folder, artifact=artifact, named=named, own=own, other=other, elsewhere=f"{elsewhere}/v1"
        )


@pytest.fixture
def servers(served_judge: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.chdir(served_judge.folder)
    served_judge.own.asked()
    served_judge.other.asked()
    return served_judge


@pytest.mark.slow
def test_compiled_judge_uses_its_compiled_model_and_server(
    servers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((servers.artifact / "manifest.json").read_text())
    assert {name: manifest[name] for name in servers.named} == servers.named
    assert "sk-judge-4712" not in "".join(path.read_text() for path in servers.artifact.glob("*.*"))
    job: dict[str, Any] = {"data": "d.jsonl", "store": "a.db"}
    assert score_rows(str(servers.artifact), **job).verdicts == {"no": 1, "yes": 1}
    audit_judge(str(servers.artifact), cases="c.jsonl", store="a.db")
    assert servers.own.asked() == OWN
    score_rows(str(servers.artifact), model=None, cache=False, **job)
    assert servers.own.asked() == OWN
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for more, model in (({}, "j"), ({"model": "openai/other"}, "other")):
        score_rows(str(servers.artifact), api_base=servers.elsewhere, cache=False, **job, **more)
        assert servers.own.asked() == set()
        assert {asked for asked, _ in servers.other.asked()} == {model}


@pytest.mark.slow
def test_rubric_uses_a_compiled_judges_server_unless_overridden(servers: SimpleNamespace) -> None:
    Path("r.yaml").write_text(f"name: r\ncriteria:\n- {{name: good, judge: {{use: {servers.artifact}}}}}\n")
    Path("tasks.jsonl").write_text("".join(json.dumps({"question": f"a good text {n}"}) + "\n" for n in range(30)))
    Path("p.py").write_text("def echo(question):\n    return {'text': question}\n")
    job: dict[str, Any] = {"rubric": "r.yaml", "data": "tasks.jsonl", "store": "a.db", "cache": False}
    program = {"model": "openai/program", "api_base": servers.elsewhere}
    assert assay.evaluate("p.py:echo", **job, **program).to_dict()["result"]["score"] > 0.7
    assert (servers.own.asked(), servers.other.asked()) == (OWN, set())
    assay.evaluate("p.py:echo", **job, **program, judge_model="openai/other")
    assert servers.own.asked() == set()
    assert {model for model, _ in servers.other.asked()} == {"other"}
    assert score_rollouts(rubric="r.yaml", store="a.db", again=True).to_dict()["scored"] > 0
    assert servers.own.asked() == OWN
