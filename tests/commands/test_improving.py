"""`assay improve`: what is refused and tried before its first step, its gates, its caps, and a complete improvement."""

import contextlib
import functools
import json
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from aiohttp import web

import assay
from assay.commands import improve as improving
from assay.commands.compile import Compile
from assay.commands.improve import Improve, compile_program
from assay.errors import (
    AssayError,
    BudgetExceeded,
    Cancelled,
    ConfigError,
    Diverged,
    ModelError,
    ProgramError,
    ProgramFailed,
)
from assay.evaluation import SilentProgress, evaluate
from assay.jobs.job import open_job
from assay.jobs.planning import plan_of
from assay.models.lora import list_adapters
from assay.models.unrecorded import Unrecorded
from assay.optimizers.finetuning.run_folder import working_folder
from assay.traces import Store
from assay.traces.store.leases import LostLease
from assay.traces.store.listing import list_runs
from assay.traces.store.tables import leases
from rigs.command_line import assay_command
from rigs.projects import Said, sums, write_program, write_project, write_rows
from rigs.serving import ChatServer

STATE = Path(".assay/improve/up")
WEIGHTS = {"model": "embedded/smollm2-135m"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """Answers 4 to everything, except for models named `down`."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    missing = {"error": {"message": "no such model", "type": "invalid_request_error"}}

    def answer(body: dict[str, Any]) -> Any:
        return web.json_response(missing, status=404) if body["model"] == "down" else json.dumps({"answer": "4"})

    with ChatServer(answer).serving() as running:
        yield running


@pytest.fixture
def job(own_folder: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job whose steps end at once."""

    def far_enough(*_: Any, **__: Any) -> None:
        raise Diverged("far enough")

    for step in ("compile_program", "collect", "train"):
        monkeypatch.setattr(improving, step, far_enough)
    return {
        **write_project(300), "name": "up", "order": ["prompts"], "model": "openai/m", "api_base": server.url,
        "prompt_format": "json", "sft": WEIGHTS, "grpo": WEIGHTS,
    }  # fmt: skip


def improve(job: dict[str, Any], *order: str, **more: Any) -> Any:
    return assay.improve("mine.py:Mine", **{**job, **({"order": [*order]} if order else {}), **more})


def notes(report: Any) -> list[str]:
    return [step["note"] for step in report.steps]


# -- before the first step


@pytest.mark.parametrize("order", ["prompts", "sft", "grpo"])
def test_prices_program_and_judges_are_tried_before_the_first_step(
    job: dict[str, Any], server: ChatServer, order: str
) -> None:
    with pytest.raises(ConfigError, match="no price is known for openai/m"):
        improve(job, order, max_cost_usd=1.0)
    assert server.models == []
    write_program(body='raise RuntimeError("no such table: prices")')
    with pytest.raises(ProgramFailed, match="first 3 tasks with RuntimeError"):
        improve(job, order)
    assert len(server.models) == 3
    write_program()
    server.bodies.clear()
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        improve(job, order, rubric="judged.yaml", judge_model="openai/down")
    assert server.models.count("m") <= 3
    said = Said()  # corrected: the job starts from the beginning, and there is nothing to resume
    report = improve(job, order, sizes={"gate": 1, "test": 2}, progress=said)
    assert notes(report) == ["far enough"]
    small = "too few tasks for a decision: gate has 1 task, test has 2 tasks"
    assert "too few tasks for a decision" in report.notes[0]
    begins = [at for at, line in enumerate(said.lines) if small in line or line.startswith("step 1")]
    assert small in said.lines[begins[0]]


def test_all_that_a_job_will_call_is_tried(job: dict[str, Any], server: ChatServer) -> None:
    Path("plain.py").write_text("def plain(question):\n    return {'answer': '4'}\n")
    with pytest.raises(ProgramError, match="has no predictors, so there is nothing to compile"):
        assay.improve("plain.py:plain", **{**job, "order": ["sft", "prompts"]})
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        improve(job, "grpo", monitor="judged.yaml", judge_model="openai/down")
    write_program("other.py", 'raise RuntimeError("gone")')
    others = write_rows("others.jsonl", [{"question": f"And {n}?", "answer": "4"} for n in range(60)])
    with pytest.raises(ProgramFailed, match=r"other\.py:11"):
        improve(job, "grpo", retention=[f"other.py:Mine,r.yaml,{others}"])
    server.bodies.clear()
    with pytest.raises(ModelError, match="the reflection model openai/down did not answer"):
        improve(job, "prompts", reflection_model="openai/down")
    options = {key: job[key] for key in ("rubric", "data", "model", "api_base", "prompt_format")}
    with pytest.raises(ModelError, match="reflection_model, reflection_api_key_env"):
        assay.compile("mine.py:Mine", optimizer="copro", reflection_model="openai/down", **options)


def test_the_preflight_runs_once_for_all_steps_and_can_be_left_out(job: dict[str, Any], server: ChatServer) -> None:
    improve(job, "sft", "sft")
    assert len(server.models) == 1
    improve(job, "sft", preflight=False, name="unchecked")
    assert len(server.models) == 1


def test_settings_without_effect_are_noted_or_refused(job: dict[str, Any], server: ChatServer) -> None:
    for unused, reason in (
        ({"judge_model": "openai/x"}, "no criterion of the rubric 'r' is decided by a judge"),
        ({"reflection_model": "openai/m"}, "no step of order=sft compiles prompts"),
    ):
        with pytest.raises(ConfigError, match=f"would have no effect: {reason}"):
            improve(job, "sft", **unused)
    assert server.models == []
    Path("assay.toml").write_text('[judge]\nmodel = "openai/of-file"\n[reflection]\nmodel = "openai/also"')
    roles = {
        name: value for name, value in assay.project_settings("improve").items() if name.startswith(("judge", "refl"))
    }
    report = improve(job, "sft", **roles, optimizer="gepa")
    assert [note for note in report.to_dict()["notes"] if "no effect" in note] == [
        "`judge_model='openai/of-file'` has no effect: no criterion of the rubric 'r' is decided by a judge",
        "`optimizer='gepa'` has no effect: no step of `order=sft` compiles prompts",
        "`reflection_model='openai/also'` has no effect: no step of `order=sft` compiles prompts",
        "`grpo={'model': 'embedded/smollm2-135m'}` has no effect: `order=sft` has no such step",
    ]
    report = improve(job, "grpo", monitor="judged.yaml", preflight=False, judge_model="openai/x", name="monitored")
    assert not [note for note in report.to_dict()["notes"] if "judge_model" in note]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"order": ["prompt"]}, "order: 'prompt' must be one of prompts.*Did you mean 'prompts'"),
    ({"order": []}, "order: must name at least one"),
    ({"order": ["prompts", "sft"], "sft": {}}, "sft cannot train 'openai/m'.*order prompts"),
    ({"order": ["grpo"], "grpo": {"model": "embedded:some.gguf"}}, "grpo cannot train 'embedded:some.gguf'"),
    ({"order": ["prompts", "sft"], "sft": {"epoch": 2}}, "sft:.*'epoch'"),
    (
        {"order": ["grpo"], "rubric": "judged.yaml", "judge_model": "embedded/smollm2-135m"},
        "the model in training, which would learn to satisfy itself",
    ),
    ({"order": ["prompts"], "monitor": "judged.yaml"}, "monitor: would have no effect"),
]
ELSEWHERE = ["..", ".", "", "../../victim", "a/b", "/tmp/victim", "a\\b", "a\0", "-x", ".x", "é/"]


def test_invalid_settings_and_names_are_refused_before_the_first_step_and_nothing_is_removed(
    job: dict[str, Any], server: ChatServer, tmp_path: Path
) -> None:
    for folder in (".assay/improve", ".assay/artifacts", "victim", ".assay/training", "a/b"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "thesis").touch()
    before = {path for path in tmp_path.rglob("*") if path.name != "__pycache__"}
    for wrong, message in [*REFUSED, *(({"name": name}, r"name[=:]") for name in ELSEWHERE)]:
        with pytest.raises(ConfigError, match=message):
            improve(job, **wrong)
        with pytest.raises(ConfigError, match=message):
            plan_of(Improve("mine.py:Mine", **{**job, **wrong}))
    assert server.models == []
    assert not STATE.exists()
    assert before <= set(tmp_path.rglob("*"))


def test_guards_are_checked_before_the_first_step_and_passed_to_the_training(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"rubric": "math_qa", "data": "arithmetic:size=60", "order": ["grpo"], "preflight": False}
    other = "classify,classify,words.jsonl"
    for extra, message in (
        ({"retention": ["math_qa,math_qa,arithmetic:size=60"]}, "named twice"),
        ({"retention": ["nothing"]}, "must be PROGRAM,RUBRIC,DATA"),
        ({"monitor": "missing.yaml"}, "missing.yaml"),
        ({"retention": [other], "grpo": {"evaluate_every": 0}}, "evaluate_every=0 evaluates none"),
    ):
        with pytest.raises(AssayError, match=message):
            assay.improve("math_qa", name="x", **{**job, **extra})
    recorded: dict[str, Any] = {}

    def training(*_: Any, **options: Any) -> None:
        recorded.update(options)
        raise Diverged("far enough")

    monkeypatch.setattr(improving, "train", training)
    report = assay.improve("math_qa", name="y", retention=[other], monitor="classify", **job)
    assert (report.steps[0]["note"], report.steps[0]["converged"]) == ("far enough", False)
    assert (recorded["retention"], recorded["monitor"]) == ([other], "classify")


@pytest.mark.parametrize("resume", [False, True])
def test_what_exists_in_the_place_of_a_job_is_kept(job: dict[str, Any], server: ChatServer, resume: bool) -> None:
    for folder in (".assay/improve/up", ".assay/training/sft-1"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "thesis").touch()
        with pytest.raises(ConfigError, match="not made"):
            improve(job, "sft", resume=resume, name=Path(folder).name.removesuffix("-1"))
        assert (Path(folder) / "thesis").is_file()
    Path(".assay/improve/link").symlink_to(STATE.resolve())
    with pytest.raises(ConfigError, match="symbolic link"):
        improve(job, name="link", resume=resume)
    Path(".assay/adapters/new-2").mkdir(parents=True)
    flags = [f"--{name.replace('_', '-')}={job[name]}" for name in ("rubric", "data", "model", "api_base")]
    words = ["improve", "mine.py:Mine", "--name=new", "--order=prompts,sft", "--sft=model=embedded/smollm2-135m"]
    ended = assay_command(*words, *flags, "--dry-run", *(["--resume"] if resume else []))
    assert ended.code == (0 if resume else 2)  # one that is resumed made it itself
    assert resume or "there is an adapter 'new-2'" in ended.stderr
    if not resume:
        with pytest.raises(ConfigError, match="there is an adapter 'new-2'"):
            improve(job, "prompts", "sft", name="new")
        write_unfinished("down")
        with pytest.raises(ConfigError, match="unfinished improvement 'down'"):
            plan_of(Improve("mine.py:Mine", **{**job, "name": "down"}))
    assert [path.name for path in STATE.iterdir()] == ["thesis"]
    assert server.models == []


def write_unfinished(name: str) -> None:
    settings = Improve("mine.py:Mine", name=name, rubric="r.yaml", data="data.jsonl")
    with Store() as store:
        store.put_state(settings.state_key, {"opens_as": "x"})


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_job_left_before_its_state_is_removed(
    resume: bool, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_state", killed)
        with pytest.raises(KeyboardInterrupt):
            improve(job)
    (STATE / "half-written").touch()
    assert notes(improve(job, resume=resume)) == ["far enough"]
    assert not STATE.exists()


def test_an_improvement_is_resumed_with_its_own_store(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(improving, "compile_program", killed)
        with pytest.raises(KeyboardInterrupt):
            improve(job)
    with pytest.raises(ConfigError, match="begun on another store"):
        improve(job, resume=True, store=".assay/other.db")
    assert notes(improve(job, resume=True)) == ["far enough"]


def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes to a folder that has the same project and nothing that was made of it."""
    folder = Path("other").absolute()
    shutil.copytree(".", folder, ignore=shutil.ignore_patterns(".assay", "other"))
    monkeypatch.chdir(folder)


@pytest.mark.postgres
def test_an_improvement_runs_once_and_continues_on_another_machine(
    job: dict[str, Any], empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine ends its first step, and loses its second one to a signal."""
    job |= {"order": ["prompts", "prompts"], "store": empty_postgres_url}
    home, taken = Path.cwd(), list[str]()

    def step(*_: Any, **__: Any) -> None:
        taken.append(Path.cwd().name)
        if len(taken) == 2:
            other_machine(monkeypatch)
            with pytest.raises(ConfigError, match=r"running already on .+ since 20"):
                improve(job, resume=True)
            monkeypatch.chdir(home)
            raise KeyboardInterrupt
        raise Diverged(f"step {len(taken)}")

    monkeypatch.setattr(improving, "compile_program", step)
    with pytest.raises(KeyboardInterrupt):
        improve(job)
    monkeypatch.chdir("other")
    with pytest.raises(ConfigError, match="unfinished improvement 'up'"):
        improve(job)
    report = improve(job, resume=True)
    assert taken == [home.name, home.name, "other"]
    assert notes(report) == ["step 1", "step 3"]
    monkeypatch.chdir(home)
    assert improve(job, resume=True).to_dict() == json.loads(json.dumps(report.to_dict()))
    assert len(taken) == 3


class Taken(Said):
    """Another process takes the improvement over while its second step is announced."""

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("step 2"):
            with Store() as store, store.engine.begin() as connection:
                connection.execute(sa.update(leases).values(token="of the next one"))


def test_calls_of_a_killed_part_that_are_not_stored_are_in_the_report(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(program: str, **_: Any) -> None:
        with Store() as store:
            (run,) = [row["id"] for row in list_runs(store) if ".preflight-" in row["id"]]
            key = f"{run.partition('.')[0]}.0.prompts-k"
            assert store.reserve_run(key, kind="compile", started_at=1.0)
            store.put_run(key, kind="compile", config={}, status="done", started_at=1.0, unrecorded=Unrecorded(lost=3))
        raise Diverged("far enough")

    monkeypatch.setattr(improving, "compile_program", step)
    report = improve(job)
    assert report.to_dict()["unrecorded"] == 3
    assert "warning: 3 LM calls could not be recorded" in list(report.lines())


def test_who_lost_an_improvement_opens_none_of_its_parts(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[str]()

    def step(program: str, **_: Any) -> None:
        taken.append(program)
        raise Diverged("far enough")

    monkeypatch.setattr(improving, "compile_program", step)
    with pytest.raises(LostLease):
        improve(job, "prompts", "prompts", progress=Taken())
    assert len(taken) == 1


def test_a_part_of_an_improvement_that_was_taken_over_writes_nothing_more(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []

    def step(program: str, **options: Any) -> Any:
        with Store() as store:
            with store.engine.begin() as connection:
                connection.execute(sa.update(leases).where(leases.c.until > 0).values(token="of the next one"))
            written.append([row["id"] for row in list_runs(store)])
        return compile_program(program, **options)

    monkeypatch.setattr(improving, "compile_program", step)
    with pytest.raises(LostLease):
        improve(job)
    with Store() as store:
        assert [row["id"] for row in list_runs(store)] == written[0]


def test_an_improvement_leaves_the_folder_of_a_training_that_runs(job: dict[str, Any]) -> None:
    with (
        working_folder("up-1", {}, made_from={}, resume=False) as work,
        pytest.raises(ConfigError, match="another process is training 'up-1'"),
    ):
        improve(job, "sft")
    assert (work / "job.json").is_file()
    assert notes(improve(job, "sft")) == ["far enough"]
    assert not work.exists()


@pytest.mark.postgres
def test_an_improvement_whose_programs_are_on_another_machine_names_it(
    job: dict[str, Any], empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("made").absolute()
    job |= {"store": empty_postgres_url, "preflight": False}
    monkeypatch.setattr(improving, "compile_program", lambda *_, **__: made(str(folder)))
    with pytest.raises(AssayError):  # the program of the step cannot be loaded for its gate
        improve(job)
    other_machine(monkeypatch)
    with pytest.raises(ConfigError, match=f"was run on {socket.gethostname()}, which has {folder}: resume it there"):
        improve(job, resume=True)


def test_an_artifact_leaves_the_files_in_its_place(job: dict[str, Any], server: ChatServer) -> None:
    Path("mine").mkdir()
    Path("mine/thesis").touch()
    with pytest.raises(ConfigError, match="exists"):
        improve(job, out="mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis"]
    assert server.models == []
    Path(".assay/artifacts/up").mkdir(parents=True)
    report = improve(job)
    assert (report.artifact.name, list(Path(".assay/artifacts/up").iterdir())) == ("up-2", [])


# -- gate and test

Gated = dict[str, Any]


@pytest.fixture
def gated(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Gated:
    """A job without response cache, whose only step results in `after.py`. Its program is always wrong."""
    monkeypatch.setattr(improving, "compile_program", lambda *_, **__: made())
    answering("mine.py", "number")
    gated = {**job, "sizes": {"gate": 50, "test": 5}, "cache": False, "preflight": False}
    del gated["sft"], gated["grpo"]
    return gated


def made(artifact: str = "after.py:Mine", **fields: Any) -> Any:
    return SimpleNamespace(**{"winner": "one", "stopped": None, "artifact": artifact, **fields})


def answering(file: str, what: str) -> None:
    """Writes a program that answers `what` of the task's number, whatever its model says."""
    write_program(file, f"number = int(question.split()[2])\nreturn dspy.Prediction(answer=str({what}))")


@pytest.mark.slow
def test_gate_and_test_end_at_their_decision_and_the_test_is_opened_once(gated: Gated, server: ChatServer) -> None:
    answering("after.py", "number + 2")
    report = improve(gated, sizes={"gate": 50, "test": 50})
    (step,) = report.steps
    ended = "ended after 20 of 50 tasks: a difference is shown; its interval holds for stopping early"
    assert (step["kept"], step["note"], report.notes) == (True, f"gate {ended}", [f"test {ended}"])
    assert (step["gate"]["n"], step["before"], step["after"]) == (20, 0.0, 1.0)  # of 50, evaluated every 10
    assert min(step["gate"]["low"], report.test["gain"]["low"]) > 0
    assert [report.test[key]["n"] for key in ("before", "after", "gain")] == [20] * 3
    assert report.test_openings == {"this_job": 1, "this_store": 1}
    assert len(server.models) == 2 * 20 + 2 * 20
    whole = improve(gated, early_stop=False, name="whole", sizes={"gate": 20, "test": 30})
    assert (whole.steps[0]["gate"]["n"], "note" in whole.steps[0]) == (20, False)
    assert (whole.test["after"]["n"], whole.notes) == (30, [])
    assert whole.test_openings == {"this_job": 1, "this_store": 2}


@pytest.mark.slow
def test_a_prompt_step_runs_its_gate_once(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improving, "compile_program", assay.compile)
    answering("mine.py", "number + 2 if len(self.answer.demos) > 1 else number")
    sizes = {"train": 20, "val": 20, "gate": 20, "test": 5}
    step = improve(gated, optimizer="labeled", sizes=sizes).steps[0]
    assert (step["kept"], step["before"], step["after"]) == (True, 0.0, 1.0)
    with Store() as store:
        phases = [rollout.phase for rollout in store.rollouts()]
    assert phases.count("gate") == 2 * step["gate"]["n"]  # before and after, by the step alone
    assert phases.count("test") == 2 * 5


def test_compile_without_its_own_gate_searches_with_the_full_cap(gated: Gated, server: ChatServer) -> None:
    options = {key: value for key, value in gated.items() if key not in ("name", "order", "sft", "grpo")}
    options |= {"optimizer": "labeled", "gate": False, "test": False, "max_calls": 60}
    report = assay.compile("mine.py:Mine", **options).to_dict()
    assert (report["gate"], report["replaces"], report["test"]["compiled"]) == (None, False, None)
    # 60 calls allow 20 tasks for both and the search; half of them would allow 10
    assert [row["n"] for row in report["candidates"]] == [20, 20]
    assert len(server.models) == 40


@pytest.mark.slow
def test_a_gate_that_can_no_longer_show_a_gain_ends(gated: Gated) -> None:
    answering("after.py", "-number")  # as wrong
    step = improve(gated).steps[0]
    assert not step["kept"]
    assert 10 <= step["gate"]["n"] < 50
    assert "can hardly become significant" in step["note"]


@pytest.mark.slow
@pytest.mark.parametrize("kept_on", ["val", "gate"])
def test_a_step_that_is_not_kept_says_which_gain_its_tasks_would_have_shown(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, kept_on: str
) -> None:
    answering("after.py", "-number")
    sizes = {"train": 20, "val": 20, "gate": 10, "test": 5}
    if kept_on == "val":
        monkeypatch.setattr(improving, "compile_program", assay.compile)
    report = improve(gated, optimizer="labeled", sizes=sizes)
    step = report.steps[0]
    assert (step["kept"], step["gate"] is None) == (False, kept_on == "val")
    shown = re.search(rf"{sizes[kept_on]} {kept_on} tasks\D*(\d\.\d+)", step["note"])
    assert shown
    assert 0 < float(shown[1]) <= 1
    assert shown[0] in (report.artifact / "report.md").read_text()


@pytest.mark.slow
def test_a_gate_stopped_by_a_cap_decides_nothing_and_resumes(
    gated: Gated, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering("after.py", "number + 2 * (number % 5 == 0)")  # one of five tasks
    report = improve(gated, max_calls=30)
    assert len(server.models) == 22  # 8 are kept for the sealed test, and no step is kept that it would compare
    assert "step 1 of 1, prompts: gate ended after 11 of 50 tasks" in str(report.stopped)
    assert (report.steps, report.test) == ([], None)
    repeated = improve(gated, max_calls=30, resume=True)  # nothing is left to do: the stored report is returned
    assert (repeated.to_dict(), len(server.models)) == (report.to_dict(), 22)
    monkeypatch.delattr(improving, "compile_program")  # the result of the step is stored until its gate
    report = improve(gated, max_calls=300, resume=True)
    assert (report.steps[0]["kept"], report.test is None, report.stopped) == (True, False, None)
    assert not STATE.exists()


def test_a_sealed_test_stopped_by_a_cap_is_reported_with_its_finished_tasks(gated: Gated, server: ChatServer) -> None:
    answering("after.py", "number + 2")
    report = improve(gated, max_calls=36, sizes={"gate": 10, "test": 30})
    assert report.test["gain"]["n"] == 8  # what the gate leaves
    assert report.stopped is None  # enough for an interval
    assert report.notes == ["test ended after 8 of 30 tasks: the caps leave 8 tasks for test"]
    assert len(server.models) == 36


@pytest.mark.slow
def test_criterion_intervals_have_the_level_of_the_score_if_a_test_ended_early(gated: Gated) -> None:
    answering("after.py", "number + 2 * (number % 3 > 0)")  # two of three tasks
    report = improve(gated, sizes={"gate": 30, "test": 100})
    assert report.test["gain"]["n"] < 100
    assert report.test["criteria"]["right"] == report.test["gain"]  # the only criterion


# -- caps of the whole improvement


def searching(
    split: str = "train", *, most: int | None = None, cached: bool = True, ends: tuple[type[BaseException], ...] = ()
) -> Callable[..., None]:
    """A step that runs the program on the tasks of a split; it may end by the errors in `ends`."""

    def step(program: str, **options: Any) -> None:
        known = {"max_calls", "api_base", "prompt_format", "sizes", "cache"}
        kept = {name: value for name, value in options.items() if name in known}
        config = Compile(program=program, rubric="r.yaml", data="data.jsonl", model="openai/m", **kept)
        with open_job(config, program=program, rubric="r.yaml", progress=SilentProgress()) as opened:
            if not cached:
                opened.session.lm.recording.cache = None
            tasks = getattr(opened.splits, split)[:most]
            opened.session.register(tasks)
            with contextlib.suppress(*ends):
                evaluate(opened.recorded, tasks, opened.session, name="all")

    return step


@pytest.fixture
def capped(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job whose `prompts` step makes 10 model calls and whose `grpo` step makes 8 without the response cache."""

    def diverging(step: Callable[..., None], *arguments: Any, **options: Any) -> None:
        step(*arguments, **options)
        raise Diverged("far enough")

    monkeypatch.setattr(improving, "compile_program", functools.partial(diverging, searching(most=10)))
    monkeypatch.setattr(improving, "train", functools.partial(diverging, searching("val", most=8, cached=False)))
    write_rows("data.jsonl", sums(60))
    grpo = {**WEIGHTS, "steps": 1, "prompts_per_step": 1, "num_generations": 4, "evaluate_every": 0}  # 4 calls
    return {**job, "preflight": False, "sizes": {"gate": 4, "test": 4}, "grpo": grpo}


RESERVED = 2 * 4 + 2 * 4  # calls of gate and test


def test_caps_cover_all_steps_and_survive_resume(capped: dict[str, Any], server: ChatServer) -> None:
    order = ("prompts", "grpo", "grpo")
    # starts the job, as there is nothing to resume
    report = improve(capped, *order, max_calls=23 + RESERVED, resume=True)
    assert "step 3 of 3, grpo" in str(report.stopped)
    assert "cap of 5 calls" in str(report.stopped)  # 23 - 10 - 8 are left to the third
    assert len(server.models) == 23
    report = improve(capped, *order, max_calls=25 + RESERVED, resume=True)
    assert "cap of 7 calls" in str(report.stopped)  # of which 5 are spent
    assert len(server.models) == 25
    report = improve(capped, *order, max_calls=40 + RESERVED, resume=True)
    assert (notes(report), report.stopped) == (["far enough"] * 3, None)
    assert 25 + 1 <= len(server.models) <= 40


def test_a_step_that_the_caps_do_not_allow_is_not_started(capped: dict[str, Any], server: ChatServer) -> None:
    report = improve(capped, "prompts", "grpo", "grpo", max_calls=18 + RESERVED)
    spent = "18 of 34 calls of the whole improvement are spent; the rest is kept for its gate and its sealed test"
    assert spent in str(report.stopped)
    assert (len(report.steps), report.test, len(server.models)) == (2, None, 18)
    assert report.artifact is not None  # the program as it was, since no step was kept
    large = {**capped["grpo"], "steps": 20}
    report = improve(capped, "prompts", "grpo", max_calls=60, grpo=large, cache=False, name="large")
    assert report.stopped == (
        "step 2 of 2, grpo: 10 of 60 calls of the whole improvement are spent and 16 are kept for its gate and its "
        "sealed test: 34 are left, and its work takes about 80"
    )
    assert len(server.models) == 18 + 10


@pytest.mark.slow
def test_a_cap_ends_an_improvement_with_the_sealed_test_of_the_adopted_steps(
    gated: Gated, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("after.py", "other.py"):
        answering(file, "number + 2")
    searched: list[int] = []

    def compile_program(program: str, **options: Any) -> Any:
        """The first step results in `after.py`; the second uses all calls that it may make."""
        searched.append(options["max_calls"])
        return made() if len(searched) == 1 else searching()(program, **options)

    monkeypatch.setattr(improving, "compile_program", compile_program)
    gated |= {"order": ["prompts", "prompts"], "sizes": {"gate": 10, "test": 10}}
    report = improve(gated, max_calls=80)
    # half of 80 is reserved for two gates of 6 tasks and a test of 8; the searches share the rest. 60 calls are left
    # for the second step, of which its gate and the test get 20 each
    assert searched == [20, 20]
    assert report.stopped == "step 2 of 2, prompts: the cap of 20 calls is reached"
    assert [step["kept"] for step in report.steps] == [True]
    assert (report.test["gain"]["n"], report.test["after"]["score"]) == (10, 1.0)
    assert len(server.models) == 20 + 20 + 20  # gate, search, test
    text = (report.artifact / "report.md").read_text()
    assert "stopped early: step 2 of 2" in text
    assert re.search(r"\| prompts \| \+\d\.\d{3}.* \| kept \|", text)
    assert "sealed tasks, 10" in text
    assert "{" not in text
    monkeypatch.setattr(improving, "compile_program", lambda *_, **__: made("other.py:Mine"))
    report = improve(gated, max_calls=200, resume=True)  # the second step and its gate, which shows no further gain
    assert (report.stopped, [step["kept"] for step in report.steps]) == (None, [True, False])


@pytest.mark.slow
def test_a_step_at_its_maximum_leaves_later_steps_their_work_and_gate(
    gated: Gated, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("after.py", "other.py"):
        answering(file, "number + 2")

    def compile_program(program: str, **options: Any) -> Any:
        searching(ends=(BudgetExceeded,))(program, **options)
        return made() if program.startswith("mine") else made("other.py:Mine")

    monkeypatch.setattr(improving, "compile_program", compile_program)
    report = improve(gated, "prompts", "prompts", max_calls=120, sizes={"gate": 10, "test": 10})
    assert (report.stopped, [step["gate"]["n"] for step in report.steps]) == (None, [10, 10])
    assert report.test is not None
    assert len(server.models) == 2 * (30 + 20) + 20  # half of 120 is for gates and test, two searches share the rest


@pytest.mark.slow
def test_a_search_that_a_cap_stopped_without_a_gain_is_done_if_the_cap_was_its_own_or_a_later_step_fits(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(winner="baseline", stopped="the cap of 30 calls is reached", notes=["unchanged"])
    monkeypatch.setattr(improving, "compile_program", lambda *_, **__: found)
    for number, (options, is_done) in enumerate([({}, False), ({"optimizer": "copro", "max_search_calls": 5}, True)]):
        report = improve(gated, name=f"one-{number}", **options)
        assert (len(report.steps), report.stopped is None) == (is_done, is_done)
    report = improve(gated, "prompts", "prompts", max_calls=120, sizes={"gate": 10, "test": 10})
    assert notes(report) == ["unchanged"]
    # the last step is unfinished; a higher cap completes it
    assert report.stopped == "step 2 of 2, prompts: the cap of 30 calls is reached"


# -- with the embedded model

TURNING = """
from typing import Literal

import dspy


class Turning(dspy.Module):
    def __init__(self):
        super().__init__()
        fields = {"place": (str, dspy.InputField()), "turn": (Literal["no", "yes"], dspy.OutputField())}
        self.turn = dspy.Predict(dspy.Signature(fields, "Say yes or no."))

    def forward(self, place):
        return self.turn(place=place)
"""


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.model
def test_weights_that_pass_the_gate_are_adopted_and_served(
    embedded: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(0)
    write_rows("turns.jsonl", [{"place": f"{chosen.randint(1, 9999)} Main Street", "turn": "yes"} for _ in range(120)])
    Path("turning.py").write_text(TURNING)
    Path("turn.yaml").write_text("name: turn\ncriteria:\n- {name: turn, check: exact, with: {field: turn}}\n")
    job: dict[str, Any] = {
        "rubric": "turn.yaml", "data": "turns.jsonl", "name": "up", "order": ["sft"], "rollouts": 2, "model": embedded,
        "prompt_format": "lean", "sft": {"epochs": 4, "batch": 4, "learning_rate": 1e-3, "lora_r": 4},
        "parameters": {"temperature": 1.0}, "sizes": {"train": 16, "gate": 14, "test": 8},
    }  # fmt: skip

    def cut_off(*_: Any, **__: Any) -> None:
        raise Cancelled("at the gate")

    with monkeypatch.context() as patch:  # the adapter is there, and nothing says that the step is done
        patch.setattr("assay.evaluation.comparison.compare", cut_off)
        with pytest.raises(Cancelled):
            assay.improve("turning.py:Turning", **job)
    before = list_adapters()
    report = assay.improve("turning.py:Turning", **job, resume=True, max_calls=100_000)
    assert list_adapters() == before
    step = report.steps[0]
    assert step["kept"], report.steps
    assert step["gate"]["low"] > 0
    assert report.model == f"{embedded}+up-1"
    assert report.test is not None
    assert report.test["after"]["score"] > report.test["before"]["score"] + 0.2
    assert [adapter.name for adapter in list_adapters()] == ["up-1"]
    assert report.artifact is not None
    assert not STATE.exists()

    def diverging(*_: Any, **__: Any) -> None:
        raise Diverged("the loss was not a finite number")

    with monkeypatch.context() as patch:
        patch.setattr(improving, "train_sft", diverging)
        down = assay.improve("turning.py:Turning", **{**job, "name": "down"})
    assert down.steps == [
        {"step": "sft", "kept": False, "gate": None, "note": "the loss was not a finite number", "converged": False}
    ]
    assert down.artifact is not None  # of what there was
    words = [sys.executable, "-m", "assay", "run", str(report.artifact), "place=5 Main Street"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert "yes" in done.stdout, done.stderr


def test_resuming_a_finished_improvement_gives_its_report_again(job: dict[str, Any], server: ChatServer) -> None:
    report, said = improve(job), Said()
    asked = list(server.bodies)
    repeated = improve(job, resume=True, progress=said)
    assert (repeated.to_dict(), server.bodies) == (report.to_dict(), asked)
    assert said.lines == ["this run has finished: its report is given again, and nothing is run"]
