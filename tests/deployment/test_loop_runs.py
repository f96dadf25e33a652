"""`assay loop`: cycles from production to a deployment, killed in every step, on a read-only store, over budget."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from production import artifact

import assay
from assay.cli import group
from assay.commands.loop import start_loop
from assay.deployment.deployments import Deployments
from assay.deployment.loops import STEPS, Loops
from assay.deployment.registry import Registry
from assay.errors import AssayError, DeploymentError
from assay.traces import Store
from assay.traces.store.leases import LostLease

FILE = """
rubric: right.yaml
method: mine.py:improve
min_new_tasks: {new}
every_days: {days}
max_calls: {calls}
lease_s: 1
attempts: {attempts}
pool: {{privacy: "off", min_points: 20, min_clean: 0.9, min_task_types: 1}}
deploy: {{plan: plan.yaml}}
events:
- {{command: [sh, -c, "cat >> events; echo >> events"]}}
"""
PLAN = """
steps:
- {weight: 50, decides: true, requests: 20, max_requests: 2000}
- {weight: 90, requests: 10}
metrics:
- {success_gain: 0.1}
"""
RUBRIC = "name: right\ncriteria:\n- {name: right, weight: 1, check: checks.py:right}\n"
CHECKS = """
def right(task, prediction, rollout):
    return prediction['answer'] == 'no' or int(task.inputs['question']) % 3 == 0
"""
# The trainer of a user: makes a candidate that always answers "no", and counts its calls.
MINE = """
import os, pathlib, sys
sys.path.insert(0, {tests!r})
from production import artifact

def improve(champion, *, rubric, data, out, max_calls=None, **options):
    with open("improved", "a") as file:
        file.write("x")
    if os.path.exists("nothing-better"):
        return None
    if os.path.exists("fails"):
        raise ValueError("the trainer is broken")
    place = pathlib.Path(out)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        artifact(place, "return dspy.Prediction(answer='no')")
    return {{"artifact": out, "calls": 60, "cost_usd": 0.5}}
"""


def run(*words: str, code: int = 0) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(group, ["loop", *words, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def write(folder: Path, **settings: Any) -> None:
    values = {"new": 1, "days": 0, "calls": 1000, "attempts": 3, **settings}
    (folder / "loop.yaml").write_text(FILE.format(**values))


def serve(start: int, count: int) -> None:
    production = assay.deployed("support", rubric="right.yaml")
    for at in range(start, start + count):
        production(question=str(at), unit=str(at), task_type="sums")
    production.store.flush()


@pytest.fixture
def agent(own_folder: Path) -> Path:
    for name, text in (
        ("right.yaml", RUBRIC), ("checks.py", CHECKS), ("plan.yaml", PLAN),
        ("mine.py", MINE.format(tests=str(Path(__file__).parent))),
    ):  # fmt: skip
        (own_folder / name).write_text(text)
    artifact(own_folder / "one")
    with Store() as store:
        registry = Registry(store.engine)
        registry.register("support", own_folder / "one")
        registry.set_alias("support@1", "champion")
    write(own_folder)
    return own_folder


def steps() -> list[tuple[int, str, str, int]]:
    with Store() as store:
        return [(s.cycle, s.step, s.status, s.attempts) for s in Loops(store.engine).steps("support")]


def events(folder: Path) -> list[str]:
    if not (folder / "events").exists():
        return []
    return [json.loads(line)["event"] for line in (folder / "events").read_text().splitlines() if line]


@pytest.mark.slow
def test_the_loop_runs_from_production_to_promotion_and_starts_again(agent: Path) -> None:
    run("start", "support", "--file", "loop.yaml")
    serve(0, 10)
    assert run("run", "support", "--dry-run")["reason"] == "points is 10, 20 is required"
    assert steps() == []
    waited = run("run", "support")
    assert (waited["action"], waited["reason"]) == ("wait", "points is 10, 20 is required")
    assert run("run", "support")["action"] == "wait"  # and sends no second event
    serve(10, 20)
    dry = run("run", "support", "--dry-run")
    assert dry["reason"] == "would improve support by " + str(agent / "mine.py:improve") + (
        " on 30 tasks (1000 calls, no cap on cost)"
    )
    done = run("run", "support")
    assert (done["action"], [step["step"] for step in done["steps"]]) == ("cycle", list(STEPS)), done
    assert steps() == [
        (1, "pool", "done", 1), (1, "gates", "done", 1), (1, "improve", "done", 1), (1, "register", "done", 1),
        (1, "deploy", "done", 1),
    ]  # fmt: skip
    serve(100, 300)
    assert run("run", "support", "--dry-run")["reason"].startswith("next (success)")
    assert run("run", "support")["reason"].startswith("next (success)")
    serve(400, 40)
    assert run("run", "support")["reason"].startswith("promote (step)")
    assert events(agent) == ["waiting", "next", "promoted"]
    (agent / "nothing-better").touch()
    again = run("run", "support")
    assert again["reason"] == "no better version: the function found nothing better"
    assert (again["cycle"], run("status", "support")["cycle"]) == (2, 3)
    status = run("status", "support")
    figures = {figure["name"]: figure for figure in status["figures"]}
    assert list(figures) == ["convergence", "forgetting", "hacks", "clean", "live", "suite", "deployments"]
    assert (figures["convergence"]["value"], figures["convergence"]["n"]) == (1.0, 2)
    assert (figures["deployments"]["value"], figures["deployments"]["ok"]) == (1.0, True)
    assert figures["live"]["value"] > 0.9 > figures["live"]["limit"]
    assert figures["forgetting"]["value"] < 0
    assert (figures["suite"]["value"], status["alarms"], status["spent"]["calls"]) == (None, [], 60)
    assert "ok     deployments  1.000" in CliRunner().invoke(group, ["loop", "status", "support"]).output


KILLED = """
import os, signal, sys
from unittest import mock
from assay.deployment.loops import Loops
step, moment = sys.argv[1:3]
begin, end = Loops.begin, Loops.end

def dies(kind, original):
    def call(self, lease, agent, cycle, name, *rest):
        if moment == "before" and kind == "end" and name == step:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, lease, agent, cycle, name, *rest)
        if name == step and moment == ("begun" if kind == "begin" else "after"):
            os.kill(os.getpid(), signal.SIGKILL)
    return call

Loops.begin, Loops.end = dies("begin", begin), dies("end", end)
from assay.commands.loop import run_loop
run_loop("support")
"""


@pytest.mark.chaos
@pytest.mark.slow
def test_a_loop_killed_in_any_step_continues_and_repeats_nothing(agent: Path) -> None:
    """15 kills in one cycle: when a step has begun, when its work is done, when it is written."""
    write(agent, attempts=9)
    run("start", "support", "--file", "loop.yaml")
    serve(0, 30)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for step in STEPS:
        for moment in ("begun", "before", "after"):
            done = subprocess.run(
                [sys.executable, "-c", KILLED, step, moment], capture_output=True, text=True, timeout=120,
                env=environment,
            )  # fmt: skip
            assert done.returncode == -9, (step, moment, done.stderr[-2000:])
    assert [(cycle, step, status) for cycle, step, status, _ in steps()] == [(1, step, "done") for step in STEPS]
    with Store() as store:
        deployments = Deployments(store.engine)
        assert [version.name for version in deployments.registry.versions("support")] == ["support@1", "support@2"]
        assert len(deployments.all("support")) == 1
        assert [row["action"] for row in deployments.history("support")] == ["start"]
    assert len((agent / "improved").read_text()) == 2  # the one whose end was not written, and the one that was


@pytest.mark.slow
def test_a_step_that_fails_is_tried_again_and_then_given_up(agent: Path) -> None:
    write(agent, attempts=2)
    run("start", "support", "--file", "loop.yaml")
    serve(0, 30)
    (agent / "fails").touch()
    for _ in range(2):
        failed = run("run", "support", code=1)
        assert failed["reason"] == "improve: ValueError: the trainer is broken"
    (agent / "fails").unlink()
    assert run("run", "support")["cycle"] == 2
    assert [row for row in steps() if row[1] == "improve"] == [(1, "improve", "failed", 2), (2, "improve", "done", 1)]
    assert events(agent) == ["failed", "failed"]
    figures = {figure["name"]: figure for figure in run("status", "support")["figures"]}
    assert (figures["convergence"]["value"], figures["convergence"]["ok"]) == (0.5, False)


@pytest.mark.slow
def test_a_cycle_waits_for_budget_interval_and_new_tasks(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(agent, calls=60, days=7)
    run("start", "support", "--file", "loop.yaml")
    serve(0, 30)
    assert run("run", "support")["action"] == "cycle"
    with Store() as store:
        Deployments(store.engine).order("support", "rollback", reason="test")
    assert "the next cycle is due at" in run("run", "support")["reason"]
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 6.9 * 86400)
    assert "the next cycle is due at" in run("run", "support")["reason"]
    monkeypatch.setattr("time.time", lambda: now() - 86400)  # the clock is set back
    assert run("run", "support")["reason"] == "the budget of seven days is used up (`max_calls`, `max_cost_usd`)"
    monkeypatch.setattr("time.time", lambda: now() + 7.1 * 86400)
    assert run("run", "support")["reason"] == "new tasks are 0, 1 are required"
    serve(30, 1)
    assert run("run", "support")["action"] == "cycle"


def test_a_loop_that_is_stopped_or_was_changed_does_nothing(agent: Path) -> None:
    with pytest.raises(assay.AssayError, match="agent 'support' has no loop"):
        run("run", "support")
    run("start", "support", "--file", "loop.yaml")
    write(agent, calls=1)
    with pytest.raises(assay.AssayError, match="is not the file that the loop of 'support' was started with"):
        run("run", "support")
    assert "is not the file" in run("status", "support")["problem"]
    run("start", "support", "--file", "loop.yaml")
    run("stop", "support")
    assert run("run", "support")["action"] == "stopped"
    assert run("status", "support")["enabled"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rubric: r\nmethod: train", "loop.yaml:2: method: .*'train'"),
        ("rubric: r\noptions: {optimiser: auto}", "'optimizer'"),
        ("rubric: r\npool:\n  min_point: 3", "loop.yaml:3: pool.min_point: .*'min_points'"),
        ("rubric: r\nlimits: {live: 2}", "loop.yaml:2: limits.live: must be .* 1, not 2"),
        ("rubric: r\nlease_s: 0", "loop.yaml:2: lease_s: must be .* 1, not 0"),
        ("rubric: r\nscoring: {judge: x}", "scoring.judge: .*'judge_model'"),
        ("rubric: r\nevents:\n- {url: 'http://h'}\n- {command: []}", "loop.yaml:4: events.1: "),
        ("method: compile", "rubric"),
        ("- 1", "loop.yaml:1: a loop is a mapping"),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(own_folder: Path, text: str, message: str) -> None:
    (own_folder / "loop.yaml").write_text(text)
    with pytest.raises(assay.AssayError, match=message):
        start_loop("support", file="loop.yaml")


WATCH = PLAN + "watch:\n- {name: judge_drift, above: 0.1, judge: judge.yaml, anchors: anchors.jsonl}\n"


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("rubric: r.yaml", {"r.yaml": "name: r"}),
        ("rubric: math_qa\nmethod: 'own.py:improve'", {"own.py": ""}),
        ("rubric: math_qa\ndeploy: {plan: plan.yaml}", {"plan.yaml": PLAN}),
        (
            "rubric: math_qa\ndeploy: {plan: plan.yaml}",
            {"plan.yaml": WATCH, "judge.yaml": "", "anchors.jsonl": ""},
        ),
        (
            "rubric: math_qa\ndeploy: {suite_data: d.jsonl, suite_rubric: s.yaml}",
            {"d.jsonl": "", "s.yaml": ""},
        ),
        ("rubric: math_qa\ndeploy: {replay: 3, replay_rubric: r.yaml}", {"r.yaml": ""}),
        ("rubric: math_qa\npool: {against: d.jsonl}", {"d.jsonl": ""}),
        ("rubric: math_qa\noptions: {monitor: r.yaml}", {"r.yaml": ""}),
    ],
)
def test_each_file_that_a_loop_names_must_be_there(own_folder: Path, lines: str, files: dict[str, str]) -> None:
    Path("loop.yaml").write_text(lines)
    for name, text in files.items():
        Path(name).write_text(text)
    Store().close()
    with pytest.raises(DeploymentError):  # all files are there, and no agent is registered
        start_loop("nobody", file="loop.yaml")
    for name, text in files.items():
        Path(name).unlink()
        with pytest.raises(AssayError) as refused:
            start_loop("nobody", file="loop.yaml")
        assert not isinstance(refused.value, DeploymentError)
        assert name in str(refused.value)
        Path(name).write_text(text)


@pytest.mark.slow
def test_schedules_are_written_and_not_installed(agent: Path) -> None:
    files = run("install", "support", "--out", "units", "--store", "100%/assay.db", "--every", "10")["files"]
    assert sorted(path.name for path in (agent / "units").iterdir()) == sorted(files)
    assert "OnUnitInactiveSec=10min" in files["assay-loop-support.timer"]
    assert f'"--store" "{agent}/100%%/assay.db"' in files["assay-loop-support.service"]
    (line,) = run("install", "support", "--kind", "cron", "--store", "100%/assay.db")["files"].values()
    assert line.startswith("*/5 * * * * cd ")
    shell = line.split("* * * * ", 1)[1].strip().replace("\\%", "%")
    done = subprocess.run(["sh", "-c", shell.replace("loop run", "loop status")], capture_output=True, text=True)
    assert "there is no store at" in done.stderr
    for words in (["--kind", "cron", "--every", "7"], ["--store", "postgresql://u:secret@h/d"]):
        with pytest.raises(assay.AssayError, match=r"divisor of 60|has a password"):
            run("install", "support", *words)


# -- rows of the steps, on both databases


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def loops(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loops]:
    where = request.getfixturevalue("postgres_url") if request.param == "postgresql" else tmp_path / "s.db"
    with Store(where) as opened:
        with opened.engine.begin() as connection:  # the PostgreSQL of all tests is one
            for table in ("loops", "loop_steps", "leases"):
                connection.execute(sa.text(f"DELETE FROM {table}"))
        started = Loops(opened.engine)
        started.enable("support", "loop.yaml", "0" * 64)
        yield started


def test_a_step_that_did_not_end_is_begun_again_by_the_next_holder(loops: Loops) -> None:
    killed = loops.acquire("support", lease_s=0.0)  # ends at once
    assert killed is not None
    loops.begin(killed, "support", 3, "improve")
    assert [(step.step, step.status, step.attempts) for step in loops.steps("support")] == [("improve", "running", 1)]
    lease = loops.acquire("support")
    assert lease is not None
    with lease:
        assert loops.known("support").holder == lease.holder
        assert loops.acquire("support") is None
        loops.begin(lease, "support", 3, "improve")
        with pytest.raises(LostLease):
            loops.end(killed, "support", 3, "improve", "done", {"artifact": "of the killed process"})
        loops.end(lease, "support", 3, "improve", "done", {"artifact": "a"})
    (step,) = loops.steps("support")
    assert (step.attempts, step.status, step.detail) == (2, "done", {"artifact": "a"})
    assert loops.known("support").holder is None
