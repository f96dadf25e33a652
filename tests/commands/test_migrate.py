"""`assay migrate`: the verdict by a margin, each cure, caps, resume, and an old side of recorded rollouts.

A scripted server has models that answer in one prompt format alone, need demonstrations or an instruction, or are
always wrong. Which questions a model gets right depends on the question alone.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from aiohttp import web

import assay
from assay.deployment import load_artifact
from assay.errors import BudgetExceeded, Cancelled, ConfigError, ModelError, ProgramError
from assay.evaluation.statistics import paired_gain
from assay.jobs.migration import standing_of
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.projects import Said, write_rows
from rigs.serving import ChatServer

ONE = """import dspy


class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""
TWO = """import dspy


class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("question -> number")
        self.add = dspy.Predict("number -> answer")

    def forward(self, question):
        return self.add(number=self.read(question=question).number)
"""
CHANGING = """import dspy


class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        if dspy.__version__ == "3.4.0":
            self.extract = dspy.Predict("answer -> number")

    def forward(self, question):
        return self.answer(question=question)
"""
TYPED = """import dspy


class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        kind = "str" if dspy.__version__ == "3.4.0" else "int"
        self.answer = dspy.Predict(f"question -> answer: {kind}")

    def forward(self, question):
        return {"answer": str(self.answer(question=question).answer)}
"""
SIZES = {"train": 20, "val": 10, "gate": 24, "test": 24}
ADVICE = "Add carefully."
SHARES = {"bad": 0.0, "shown": 0.3, "careful": 0.2, "hasty": 0.2}  # of right answers without help; others 0.9


def share_of(number: int) -> float:
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:4], "big") / 2**32


def format_of(system: str) -> str:
    if "Reply with: " in system:
        return "lean"
    return "json" if "JSON object" in system else "chat" if "[[ ## " in system else "xml"


def answers(body: dict[str, Any]) -> Any:
    """The field that the prompt asks for, in its format."""
    model, texts = body["model"], [message["content"] for message in body["messages"]]
    if "improved_instruction" in texts[-1]:
        return f"[[ ## improved_instruction ## ]]\n{ADVICE}\n\n[[ ## completed ## ]]"
    form = format_of(texts[0])
    if model.endswith("-only") and model != f"{form}-only":
        return "I cannot say."
    number = int(re.findall(r"\d+", texts[-1])[0])
    if "`number`" in texts[0].partition("output fields")[2] or "Reply with: number" in texts[0]:
        return written("number", str(number), form)
    helped = len(texts) > 3 if model == "shown" else "carefully" in texts[0]
    share = 0.95 if helped and model in ("shown", "careful", "hasty") else SHARES.get(model, 0.9)
    return written("answer", str(number + 1 if share_of(number) < share else 0), form)


def written(name: str, value: str, form: str) -> str:
    return {
        "json": json.dumps({name: value}), "lean": f"{name}: {value}", "xml": f"<{name}>\n{value}\n</{name}>",
        "chat": f"[[ ## {name} ## ]]\n{value}\n\n[[ ## completed ## ]]",
    }[form]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with ChatServer(answers).serving() as serving:
        yield serving


@pytest.fixture(autouse=True)
def place(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (own_folder / "r.yaml").write_text("name: sums\ncriteria:\n- {name: right, check: exact}\n")
    rows = [
        {"question": f"What is {n} + 1?", "answer": str(n + 1), "task_type": ("even", "odd")[n % 2]}
        for n in range(100, 400)
    ]
    write_rows("d.jsonl", rows)
    return own_folder


def made(server: ChatServer, source: str = ONE, *, form: str = "lean") -> str:
    """An artifact of the program with the model `old`, in a prompt format. Compiled once for each program and
    version of DSPy."""
    Path("sums.py").write_text(source)
    kept = _made.setdefault((source, form, dspy.__version__), Path(tempfile.mkdtemp(dir=_folder.name)) / "old")
    if not kept.exists():
        assay.compile(
            "sums.py:Sums", rubric="r.yaml", data="d.jsonl", model="openai/old", api_base=server.url,
            optimizer="labeled", sizes={"train": 4, "val": 4, "gate": 1, "test": 1}, gate=False, test=False,
            preflight=False, prompt_format=form, out=kept, store=kept.parent / "made.db",
        )  # fmt: skip
    server.bodies.clear()
    return str(shutil.copytree(kept, "old"))


_folder = tempfile.TemporaryDirectory(prefix="assay-migrated-")
_made: dict[tuple[str, str, str], Path] = {}


def migrated(server: ChatServer, model: str | None, **more: Any) -> Any:
    named = {} if model is None else {"model": f"openai/{model}", "api_base": server.url}
    return assay.migrate("old", **{"data": "d.jsonl", "sizes": SIZES, "threads": 2, "margin": 0.2, **named, **more})


def kept(report: Any) -> list[str]:
    return [cure["cure"] for cure in report.cures if cure["kept"]]


def test_a_new_side_that_is_no_worse_costs_one_comparison_and_is_a_new_artifact(server: ChatServer) -> None:
    old = made(server)
    report = migrated(server, "same", out="new")
    data = report.to_dict()
    assert (data["verdict"], data["split"], data["cures"], data["stopped"]) == ("no worse", "gate", [], None)
    assert (data["old"]["model"], data["new"]["model"]) == ("openai/old", "openai/same")
    assert data["old"]["score"] == data["new"]["score"] > 0.8
    assert (data["gain"]["mean"], data["gain"]["n"]) == (0.0, 24)
    assert data["test_openings"] is None
    assert (data["criteria"]["right"]["n"], sorted(data["task_types"])) == (24, ["even", "odd"])
    # 24 gate tasks of each side; the preflight of the new side is a val task, that of the old side a gate task
    assert Counter(server.models) == {"old": 24, "same": 25}
    assert data["calls"] == 49
    manifest = json.loads(Path("new/manifest.json").read_text())
    assert (Path(manifest["parent"]).resolve(), manifest["model"]) == (Path(old).resolve(), "openai/same")
    assert "unproven" not in manifest
    assert manifest["settings"]["adapter"] == "lean"
    again = migrated(server, "same", out="new", resume=True)
    assert (again.to_dict(), len(server.bodies)) == (json.loads(json.dumps(data)), 49)


def test_a_new_side_that_stays_worse_ends_with_exit_code_1_and_an_unproven_artifact(server: ChatServer) -> None:
    made(server)
    done = assay_command(
        "migrate", "old", "--data", "d.jsonl", "--model", "openai/bad", "--api-base", server.url, "--gate-size", "24",
        "--val-size", "6", "--train-size", "6", "--out", "new", "--json",
    )  # fmt: skip
    report = done.report
    assert (done.code, report["verdict"], report["artifact"]) == (1, "worse", str(Path("new").resolve()))
    assert "worse" in done.stderr
    assert (report["old"]["score"] > 0.8, report["new"]["score"]) == (True, 0.0)
    assert report["gain"]["high"] < 0
    assert [(cure["cure"], cure["kept"]) for cure in report["cures"]] == [
        ("old prompt format", False), ("other prompt formats", False), ("new demonstrations", False),
        ("new instructions", False),
    ]  # fmt: skip
    assert report["test_openings"] is None
    manifest = json.loads(Path("new/manifest.json").read_text())
    assert (manifest["unproven"], manifest["result"]["verdict"]) == (True, "worse")
    note = "unproven: compared with the artifact that it was migrated from, it is 'worse'"
    assert note in assay_command("run", "new", "question=What is 1 + 1?").stderr


@pytest.mark.parametrize(
    ("model", "more", "cure", "form"),
    [
        ("lean-only", {"prompt_format": "json"}, "old prompt format", "lean"),
        ("xml-only", {}, "other prompt formats", "xml"),
        ("shown", {}, "new demonstrations", "lean"),
        ("careful", {}, "new instructions", "lean"),
    ],
)
def test_the_cheapest_cure_that_helps_is_kept_and_the_test_is_opened_once(
    server: ChatServer, model: str, more: dict[str, Any], cure: str, form: str
) -> None:
    made(server)
    report = migrated(server, model, out="new", **more)
    assert kept(report) == [cure] == [report.cures[-1]["cure"]]
    assert report.gate["high"] < 0  # before the cure
    row = report.cures[-1]
    assert row["gate"]["low"] > 0
    assert row["val"]["after"] > row["val"]["before"]
    assert (report.verdict, report.split) == ("no worse", "test")
    assert report.test_openings == {"this_job": 1, "this_store": 1}
    assert (report.old["prompt_format"], report.new["prompt_format"]) == ("lean", form)
    new = load_artifact("new")
    assert new.settings["adapter"] == form
    shown = sum(len(predictor.demos) for predictor in new.program.predictors())
    assert (shown > 0 or hasattr(new.program, "pool")) == (cure == "new demonstrations")
    advised = [ADVICE in predictor.signature.instructions for predictor in new.program.predictors()]
    assert any(advised) == (cure == "new instructions")
    assert report.new["parse_failures"] == 0


def test_answers_that_cannot_be_parsed_or_are_cut_are_counted_apart(server: ChatServer) -> None:
    made(server)
    report = migrated(server, "lean-only", prompt_format="json", max_calls=51)  # which ends it after the gate
    assert report.new["failed"] == report.new["n"] == report.new["parse_failures"]
    assert (report.old["parse_failures"], report.old["truncated"], report.new["truncated"]) == (0, 0, 0)


def test_only_the_predictors_that_lose_get_new_instructions(server: ChatServer) -> None:
    made(server, TWO)
    report = migrated(server, "hasty", out="new")
    assert kept(report) == ["new instructions"]
    assert report.cures[-1]["predictors"] == ["add"]
    texts = {name: part.signature.instructions for name, part in load_artifact("new").program.named_predictors()}
    assert {name: ADVICE in text for name, text in texts.items()} == {"read": False, "add": True}


def test_too_few_tasks_say_how_many_would_decide(server: ChatServer) -> None:
    made(server)
    done = assay_command(
        "migrate", "old", "--data", "d.jsonl", "--model", "openai/same", "--api-base", server.url, "--gate-size", "8",
    )  # fmt: skip
    assert done.code == 0
    # no score differs: -ln(0.05) / 0.02 = 149.8
    assert "too few tasks to decide by the margin 0.02; about 150 would decide" in done.stdout
    assert len(server.bodies) == 17


def test_verdicts_by_hand() -> None:
    def verdict(differences: list[float], margin: float) -> tuple[str, int | None]:
        before = {str(at): 0.5 for at in range(len(differences))}
        after = {str(at): 0.5 + value for at, value in enumerate(differences)}
        standing = standing_of(before, after, paired_gain(before, after), margin=margin)
        return standing.verdict, standing.tasks_needed

    assert verdict([0.0] * 150, 0.02) == ("no worse", None)  # 2.996 / 150 = 0.01997
    assert verdict([0.0] * 149, 0.02) == ("too few tasks", 150)
    assert verdict([-0.5] * 100, 0.02) == ("worse", None)
    assert verdict([-0.01] * 1000, 0.02) == ("no worse", None)  # a loss within the margin
    assert verdict([], 0.02) == ("too few tasks", None)
    name, needed = verdict([-0.5, 0.0, 0.0, 0.0] * 3, 0.02)
    assert (name, needed is not None and needed > 12) == ("too few tasks", True)


def test_a_program_of_another_shape_is_refused_by_name(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(dspy, "__version__", "3.4.0")
        made(server, CHANGING)
    for more in ({"model": None}, {"model": "same"}):
        with pytest.raises(ProgramError, match="it has 'extract'; the program's predictors are 'answer'"):
            migrated(server, **more)
    assert server.bodies == []


@pytest.mark.parametrize(("cap", "split", "stopped"), [(30, 14, "gate tasks"), (60, 24, "reserved for gate and test")])
def test_a_cap_ends_it_and_a_higher_one_continues(server: ChatServer, cap: int, split: int, stopped: str) -> None:
    made(server)
    report = migrated(server, "shown", max_calls=cap)
    assert len(server.bodies) <= cap
    assert report.calls == len(server.bodies)
    assert report.gain["n"] <= split
    assert stopped in report.stopped
    assert kept(report) == []
    resumed = migrated(server, "shown", resume=True)
    assert (kept(resumed), resumed.stopped) == (["new demonstrations"], None)
    assert resumed.calls == len(server.bodies)
    sent = Counter(map(json.dumps, server.bodies))
    assert max(sent.values()) == 1


def test_caps_that_leave_nothing_for_gate_are_said(server: ChatServer) -> None:
    made(server)
    with pytest.raises(BudgetExceeded, match="the caps leave nothing for gate"):
        migrated(server, "same", max_calls=3)
    assert len(server.bodies) <= 3


def test_stopped_anywhere_it_resumes_to_the_same_result_and_pays_nothing_twice(server: ChatServer) -> None:
    class Stopping(Said):
        def say(self, text: str) -> None:
            super().say(text)
            if "cure: new demonstrations" in text:
                raise KeyboardInterrupt

    made(server)
    whole = migrated(server, "shown", store="whole.db", cache=False).to_dict()
    requests = len(server.bodies)
    server.bodies.clear()
    with pytest.raises((KeyboardInterrupt, Cancelled)):
        migrated(server, "shown", progress=Stopping())
    assert 0 < len(server.bodies) < requests
    resumed = migrated(server, "shown", resume=True).to_dict()
    assert len(server.bodies) == requests
    same = ("verdict", "gain", "cures", "split", "calls", "tokens", "gate")
    assert {name: resumed[name] for name in same} == {name: whole[name] for name in same}


@pytest.mark.slow
def test_killed_it_resumes_and_pays_nothing_twice(server: ChatServer) -> None:
    made(server)
    server.delay_s = 0.02
    command = [
        sys.executable, "-m", "assay", "migrate", "old", "--data", "d.jsonl", "--model", "openai/shown", "--api-base",
        server.url, "--gate-size", "24", "--test-size", "24", "--val-size", "10", "--margin", "0.2", "--threads", "1",
        "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
    try:
        while len(server.bodies) < 70:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = subprocess.run([*command, "--resume"], stdout=subprocess.PIPE, env=os.environ, check=True)
    finally:
        server.delay_s = 0.0
        process.kill()
    report = json.loads(done.stdout)
    assert [cure["cure"] for cure in report["cures"] if cure["kept"]] == ["new demonstrations"]
    assert report["test_openings"]["this_job"] == 1
    sent = Counter(map(json.dumps, server.bodies))
    assert sum(count - 1 for count in sent.values()) == report["repeated_calls"] <= 1  # the one in flight
    assert report["calls"] == len(sent)


def test_for_another_dspy_the_old_side_is_recorded_and_labelled(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(dspy, "__version__", "3.4.0")
        made(server)
        with pytest.raises(ConfigError, match=r"nothing changes: old was made with openai/old and DSPy 3.4.0 too"):
            migrated(server, None)
    with pytest.raises(ConfigError, match=r"no rollout of .* DSPy 3.4.0 and openai/old") as error:
        migrated(server, None)
    assert "run assay evaluate" in str(error.value)
    data: dict[str, Any] = {"rubric": "old/rubric/rubric.yaml", "data": "d.jsonl", "sizes": SIZES}
    assay.evaluate("old", split="gate", **data)  # by DSPy of now
    with pytest.raises(ConfigError, match="no rollout of"):
        migrated(server, None)
    with monkeypatch.context() as before:
        before.setattr(dspy, "__version__", "3.4.0")
        assay.evaluate("old", split="gate", cache=False, **data)
    server.bodies.clear()
    said = Said()
    report = migrated(server, None, out="new", cache=False, progress=said)
    assert (report.old["recorded"], report.new["recorded"], report.verdict) == (True, False, "no worse")
    assert (report.old["dspy"], report.new["dspy"]) == ("3.4.0", dspy.__version__)
    assert report.gain["n"] == 24
    assert len(server.bodies) == 25
    note = "the old side is recorded rollouts, not run now: 24 of 24 gate tasks"
    assert note in report.notes
    assert "old, recorded" in str(list(report.lines()))
    assert report.prompts == []  # the recorded calls are rendered as they were
    assert load_artifact("new").manifest["parent"] == "old"


def test_a_prompt_that_this_dspy_renders_otherwise_is_listed(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(dspy, "__version__", "3.4.0")
        made(server, TYPED, form="json")
        assay.evaluate("old", split="gate", rubric="r.yaml", data="d.jsonl", sizes={"gate": 5})
    report = migrated(server, None, rubric="r.yaml", sizes={**SIZES, "gate": 5})
    reason = f"DSPy {dspy.__version__} renders it otherwise than 3.4.0"
    assert report.prompts == [{"predictor": "answer", "differs": True, "reason": reason}]
    assert report.gain["n"] == 5


def away() -> web.Response:
    return web.json_response({"error": {"message": "there is no such model"}}, status=404)


def test_a_model_that_is_gone_can_be_compared_by_its_recorded_rollouts(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(server)
    assay.evaluate("old", rubric="old/rubric/rubric.yaml", data="d.jsonl", split="gate", sizes=SIZES)
    monkeypatch.setattr(server, "answer", lambda body: away() if body["model"] == "old" else answers(body))
    with pytest.raises(ModelError, match=r"the old side: .*answer"):
        migrated(server, "same", cache=False)
    report = migrated(server, "same", cache=False, recorded=True)
    assert (report.old["recorded"], report.old["dspy"], report.verdict) == (True, dspy.__version__, "no worse")


def test_predictors_whose_prompt_differs_are_listed_before_any_call(server: ChatServer) -> None:
    class Counting(Said):
        def say(self, text: str) -> None:
            super().say(f"{len(server.bodies)} {text}")

    made(server, TWO)
    said = Counting()
    report = migrated(server, "same", prompt_format="json", progress=said)
    reason = "format json in place of lean"
    assert report.prompts == [{"predictor": name, "differs": True, "reason": reason} for name in ("read", "add")]
    assert f"0 prompts that differ: read, add ({reason})" in said.lines


def test_what_cannot_be_migrated_is_refused_by_name(server: ChatServer) -> None:
    made(server)
    with pytest.raises(ConfigError, match=r"'sums.py:Sums' is not the folder of an artifact"):
        assay.migrate("sums.py:Sums", data="d.jsonl", model="openai/same")
    with pytest.raises(ConfigError, match="margin"):
        migrated(server, "same", margin=1.0)
    Path("new").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        migrated(server, "same", out="new")
    for kind, words in (("judge", "is a compiled judge"), ("program", "rubric: is missing")):
        Path("new/manifest.json").write_text(json.dumps({"format": 2, "kind": kind, "program": "p", "model": "m"}))
        with pytest.raises(ConfigError, match=words):
            assay.migrate("new", data="d.jsonl", model="openai/same")
    assert server.bodies == []


def test_an_artifact_whose_model_was_an_object_needs_recorded_rollouts(server: ChatServer) -> None:
    Path("sums.py").write_text(ONE)
    lm = scripted_lm(lambda request: "answer: 1")
    sizes = {"train": 4, "val": 4, "gate": 1, "test": 1}
    assay.compile(
        "sums.py:Sums", rubric="r.yaml", data="d.jsonl", lm=lm, optimizer="labeled", sizes=sizes, gate=False,
        test=False, preflight=False, prompt_format="lean", out="old",
    )  # fmt: skip
    server.bodies.clear()
    with pytest.raises(ConfigError, match=r"an object that no name stands for. Take its recorded rollouts"):
        migrated(server, "same")
    assert server.bodies == []


def test_a_dry_run_says_what_it_takes_and_calls_nothing(server: ChatServer) -> None:
    made(server)
    done = assay_command(
        "migrate", "old", "--data", "d.jsonl", "--model", "openai/same", "--api-base", server.url, "--gate-size", "24",
        "--dry-run", "--json",
    )  # fmt: skip
    assert (done.code, done.report["kind"], server.bodies) == (0, "migrate", [])
    assert done.report["calls"] > 0
    line = "48 calls of them compare both sides on gate; the others are for a new side that is worse"
    assert line in done.report["warnings"]


def test_the_rollouts_of_both_sides_are_stored_with_their_models(server: ChatServer) -> None:
    made(server)
    migrated(server, "same", store="own.db")
    with Store("own.db") as store:
        sides = Counter(row.model for row in store.rollouts() if row.phase == "gate")
        kinds = [row.kind for row in store.engine.connect().exec_driver_sql("SELECT kind FROM runs")]
    assert sides == {"openai/old": 24, "openai/same": 24}
    assert kinds == ["migrate"]
