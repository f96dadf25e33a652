"""Whatever stops a job leaves the record of a job that ended; what a disk does not take is counted."""

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.commands.init import init_project
from assay.commands.traces import export_rollouts
from assay.errors import BudgetExceeded, Cancelled, ConfigError, StoreError, WriteFailed
from assay.models.meter import NO_PRICE
from assay.runs.ending import advised
from assay.support.places import write_whole, writing
from assay.support.refused import FULL_DISK
from assay.testing import scripted_lm
from assay.traces import Rollout, Store, Transition
from assay.traces.store import store as stores
from rigs.chaos import STOPS, Stop, serving, stopped

PROGRAM = "import dspy\n\np = dspy.Predict('question -> answer')\n"
HANGING = """import time
from pathlib import Path

import dspy

class P(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict('question -> answer')

    def forward(self, question):
        answer = self.ask(question=question)
        Path("hanging").touch()
        time.sleep(20)  # cannot be stopped: the rollout is open when the run ends
        return answer

p = P()
"""
RUBRIC = "name: sums\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:numeric'}\n"


def write_project(folder: Path, tasks: int) -> None:
    (folder / "p.py").write_text(PROGRAM)
    (folder / "r.yaml").write_text(RUBRIC)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "split": "val"} for n in range(tasks)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_disk(disk_kb: int = 1700) -> Stop:
    """A stop by a full disk; skips the test where nothing may be mounted."""
    probe = ["unshare", "-r", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            pytest.skip("nothing may be mounted here")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    return replace(STOPS["full disk"], disk_kb=disk_kb)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked")
@pytest.mark.parametrize("how", list(STOPS))
@pytest.mark.parametrize("job", ["collect", pytest.param("compile", marks=pytest.mark.chaos)])
def test_every_answered_call_of_a_stopped_job_is_stored_and_nothing_is_left_running(
    job: str, how: str, tmp_path: Path
) -> None:
    stop = small_disk() if STOPS[how].disk_kb else STOPS[how]
    with serving(tmp_path / "log", delay_ms=150) as server:
        accounts, problems = stopped(job, tmp_path / "job", server, stop)
    assert problems == []
    assert accounts.answered > 3


def stopped_command(folder: Path, address: str, number: int, *arguments: str, answered: int = 8) -> tuple[int, str]:
    """Exit code and standard error of a command that gets a signal."""
    log = folder / "log"
    job = subprocess.Popen(
        [sys.executable, "-m", "assay", *arguments, "--model", "openai/m", "--api-base", address],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OPENAI_API_KEY": "none"},
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end and job.poll() is None and not (log.exists() and log.stat().st_size >= answered):
        time.sleep(0.02)
    job.send_signal(number)
    _, errors = job.communicate(timeout=120)
    return job.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["evaluate", "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--threads", "16"], signal.SIGINT),
        (["evaluate", "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--threads", "16"], signal.SIGHUP),
        (["run", "p.py:p", "--file", "d.jsonl", "--out", "out.jsonl"], signal.SIGTERM),
    ],
    ids=["evaluate, SIGINT", "evaluate, SIGHUP", "run, SIGTERM"],
)
def test_a_signal_ends_a_command_after_its_calls_in_flight(command: list[str], number: int, tmp_path: Path) -> None:
    write_project(tmp_path, 400)  # enough for a signal that comes late on a busy machine
    with serving(tmp_path / "log", delay_ms=300) as server:
        code, errors = stopped_command(tmp_path, server.address, number, *command)
        answered = server.requests
    assert code == 130, errors
    assert not (tmp_path / "out.jsonl").exists()
    with sqlite3.connect(tmp_path / ".assay" / "assay.db") as db:
        assert db.execute("SELECT count(*) FROM transitions WHERE NOT cached").fetchone() == (answered,)
        assert db.execute("SELECT count(*) FROM rollouts WHERE status = 'running'").fetchone() == (0,)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_counts_the_calls_in_flight(tmp_path: Path) -> None:
    write_project(tmp_path, 40)
    with serving(tmp_path / "log", delay_ms=60_000) as server:
        job = subprocess.Popen(
            [sys.executable, "-m", "assay", "evaluate", "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl",
             "--no-preflight", "--model", "openai/m", "--api-base", server.address, "--threads", "3"],
            cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ, "OPENAI_API_KEY": "none"},
        )  # fmt: skip
        calls = 0
        while calls < 3:
            time.sleep(0.1)
            for ledger in tmp_path.glob(".assay/runs/*/calls.db"):
                with sqlite3.connect(ledger) as db:
                    calls = db.execute("SELECT count(*) FROM calls").fetchone()[0]
        job.send_signal(signal.SIGINT)
        assert job.stderr is not None
        while "in flight" not in job.stderr.readline():
            pass
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=25)
    assert job.returncode == 130
    with sqlite3.connect(tmp_path / ".assay" / "assay.db") as db:
        assert db.execute("SELECT status, unseen FROM runs").fetchall() == [("stopped", 3)]
        run_id = db.execute("SELECT id FROM runs").fetchone()[0]
        assert db.execute("SELECT count(*) FROM rollouts WHERE status = 'running'").fetchone() == (0,)
    store = str(tmp_path / ".assay" / "assay.db")
    run = json.loads(CliRunner().invoke(group, ["runs", "show", run_id, "--store", store, "--json"]).stdout)
    assert (run["status"], run["unrecorded"]) == ("stopped", 3)
    assert run["result"]["stopped"]


@pytest.mark.parametrize("hangs", [False, True], ids=["in a call", "in a program that hangs"])
def test_ctrl_c_in_python_keeps_the_calls_in_flight_and_leaves_no_rollout_running(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, 30)
    begun = threading.Event()
    if hangs:
        (tmp_path / "p.py").write_text(HANGING)

    def answer(request: Any) -> str:
        begun.set()
        time.sleep(0.2)
        return '{"answer": "1"}'

    lm = scripted_lm(answer)

    def interrupt() -> None:
        begun.wait(60)
        while hangs and not Path("hanging").exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises((Cancelled, KeyboardInterrupt)):
            assay.evaluate(
                "p.py:p", rubric="r.yaml", data="d.jsonl", lm=lm, threads=4, preflight=False, prompt_format="json"
            )
    finally:
        signal.signal(signal.SIGINT, before)
    with Store() as store:
        stats, rollouts = store.stats(), list(store.rollouts())
        with store.engine.connect() as connection:
            assert connection.execute(sa.text("SELECT status FROM runs")).fetchall() == [("stopped",)]
    assert stats["transitions"] == lm.scripted.calls > 0
    assert {rollout.status for rollout in rollouts} <= {"done", "error"}


def test_cached_answers_that_a_killed_job_did_not_settle_are_paid_for_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, 6)
    lm = scripted_lm(lambda request: '{"answer": "1"}')

    def tokens(max_calls: int, *, resume: bool) -> int:
        report = assay.evaluate(
            "p.py:p", rubric="r.yaml", data="d.jsonl", lm=lm, preflight=False, prompt_format="json",
            max_calls=max_calls, resume=resume,
        )  # fmt: skip
        return int(report.to_dict()["tokens"])

    spent = tokens(3, resume=False)
    (ledger,) = Path(".assay/runs").glob("*/calls.db")
    with sqlite3.connect(ledger) as db:  # as if it was killed before it settled the calls
        db.execute("UPDATE calls SET settled = 0, prompt_tokens = 0, completion_tokens = 0, cost_usd = 0")
    assert tokens(6, resume=True) == 2 * spent > 0
    assert lm.scripted.calls == 6


def test_an_evaluation_of_all_rows_that_a_cap_ended_says_how_many_of_them_were_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RUBRIC)
    (tmp_path / "p.py").write_text(PROGRAM)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    job: dict[str, Any] = {"rubric": "r.yaml", "data": rows, "split": "all", "preflight": False, "threads": 1}
    lm = scripted_lm(lambda request: '{"answer": "1"}')
    data = assay.evaluate("p.py:p", lm=lm, max_calls=10, prompt_format="json", **job).to_dict()
    assert (data["tasks"], data["result"]["n"]) == (40, 10)
    assert any("10 of 40" in note for note in data["notes"])
    data = assay.evaluate("p.py:p", lm=lm, prompt_format="json", **job).to_dict()
    assert (data["tasks"], data["result"]["n"], data["stopped"]) == (40, 40, None)


@pytest.mark.parametrize("reason", [FULL_DISK, f"{FULL_DISK}: free space", f"the cap of $5 {NO_PRICE}: cap calls"])
def test_only_a_cap_that_was_reached_is_to_be_raised(reason: str) -> None:
    assert advised(reason) == reason
    assert advised("the cap of 20 calls is reached") != "the cap of 20 calls is reached"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stores of this process whose database has no more pages than the value in the list."""
    pages = [1_000_000]
    opened = stores.open_engine

    def open_small(url: str) -> sa.Engine:
        engine = opened(url)

        @sa.event.listens_for(engine, "begin")
        def limit(connection: sa.Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[0]}")

        return engine

    monkeypatch.setattr(stores, "open_engine", open_small)
    return pages


def test_refused_rows_are_counted_in_the_report_of_a_command_and_its_exit_code_is_1(
    tmp_path: Path, full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, 5)
    lm = ["--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1", "--no-preflight", "--json"]
    command = ["collect", "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--split", "val", "-n", "1", *lm]
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    plain = CliRunner().invoke(group, [*command, "--min-coverage", "0"])
    assert json.loads(plain.stdout)["rows_not_stored"] == 0
    full[0] = 1
    refused = CliRunner().invoke(group, [*command, "--min-coverage", "0", "--seed", "1"])
    data = json.loads(refused.stdout.splitlines()[0])
    assert refused.exit_code == 1
    assert data["rows_not_stored"] > 0
    assert data["unrecorded"] == data["calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "audit"])
def test_a_command_that_a_cap_ends_before_its_report_says_so_in_json(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "j.yaml").write_text("text: Is the output right?\nscale: [no, yes]\n")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"input": "?", "output": str(n)}) + "\n" for n in range(9)))
    data = ["--data", "d.jsonl"] if command == "score" else []
    with serving(tmp_path / "log") as server:
        lm = ["--model", "openai/m", "--api-base", server.address, "--max-calls", "3"]
        with pytest.raises(BudgetExceeded):
            group.main(["judge", command, "j.yaml", *data, *lm, "--json"], standalone_mode=False)
    assert "3 calls" in json.loads(capsys.readouterr().out)["stopped"]


def test_a_job_stops_at_a_full_disk_and_its_report_says_what_is_missing(
    tmp_path: Path, full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, 200)
    calls = [0]

    def answer(request: Any) -> str:
        calls[0] += 1
        if calls[0] == 5:
            full[0] = 1
        time.sleep(0.02)
        return '{"answer": "1"}'

    lm = scripted_lm(answer)
    report = assay.collect(
        "p.py:p", rubric="r.yaml", data="d.jsonl", lm=lm, split="val", n=1, threads=4, preflight=False,
        prompt_format="json",
    ).to_dict()  # fmt: skip
    assert "disk" in report["stopped"]
    assert report["calls"] == lm.scripted.calls < 200
    with sqlite3.connect(tmp_path / ".assay" / "assay.db") as db:
        stored = db.execute("SELECT count(*) FROM transitions").fetchone()[0]
    assert report["unrecorded"] == report["calls"] - stored
    assert report["rows_not_stored"] >= report["unrecorded"]


@pytest.mark.chaos
@pytest.mark.slow
def test_a_compile_that_a_full_disk_stopped_continues_once_there_is_space(
    tmp_path: Path, full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, 80)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(80)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = [0]

    def answer(request: Any) -> str:
        calls[0] += 1
        if calls[0] == 5:
            full[0] = 1
        time.sleep(0.3 if full[0] == 1 else 0.0)  # the store has time to notice
        return '{"answer": "1"}'

    def compiled(*, resume: bool) -> dict[str, Any]:
        return assay.compile(
            "p.py:p", rubric="r.yaml", data="d.jsonl", lm=scripted_lm(answer), threads=4, preflight=False,
            prompt_format="json", max_search_calls=60, resume=resume,
        ).to_dict()  # fmt: skip

    assert "disk" in compiled(resume=False)["stopped"]
    made, full[0] = calls[0], 1_000_000
    continued = compiled(resume=True)
    assert continued["stopped"] is None
    assert continued["calls"] == calls[0] > made


def test_a_full_disk_stops_predictions_for_a_file_and_what_was_written_is_named_a_part(
    tmp_path: Path, full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    write_project(tmp_path, 300)
    (tmp_path / "out.jsonl").write_text("before")
    full[0] = 1
    with serving(tmp_path / "log", delay_ms=20) as server:
        command = ["run", "p.py:p", "--file", "d.jsonl", "--out", "out.jsonl", "--model", "openai/m"]
        with pytest.raises(BudgetExceeded, match="disk"):
            CliRunner().invoke(group, [*command, "--api-base", server.address])
        assert 0 < server.requests < 300
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl.part").read_text().splitlines()]
    assert 0 < len(rows) < 300
    assert (tmp_path / "out.jsonl").read_text() == "before"
    assert list((tmp_path / ".assay").glob("*.room*")) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, no file of this process can be larger, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_the_disk_does_not_take_is_not_there_in_part(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    with largest_file(10_000), pytest.raises(WriteFailed, match=r"report\.html cannot be written"):
        write_whole(place, "x" * 50_000)
    assert list(tmp_path.iterdir()) == []
    write_whole(place, "before")
    with largest_file(10_000), pytest.raises(WriteFailed):
        write_whole(place, "x" * 50_000)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "report.html", "x")


def test_a_project_that_the_disk_does_not_take_is_not_there_in_part(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(ConfigError, match="cannot write"):
        init_project(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    assert init_project(tmp_path / "new").files


def test_an_export_of_spans_that_the_disk_does_not_take_is_not_there_in_part(tmp_path: Path) -> None:
    place = tmp_path / "spans.jsonl"
    with Store(tmp_path / "s.db") as store:
        for number in range(200):
            store.put_rollout(Rollout(id=f"r{number:03}", program="p", status="done", started_at=1.0, ended_at=2.0))
    with Store(tmp_path / "s.db") as store:
        with largest_file(40_000), pytest.raises(WriteFailed, match=r"spans\.jsonl cannot be written"):
            export_rollouts("otlp", place, store=store.url)
        assert sorted(path.name for path in tmp_path.glob("*spans*")) == []
        assert export_rollouts("otlp", place, store=store.url).rollouts == 200
    assert place.stat().st_size > 40_000


def test_a_file_is_as_before_if_its_writing_is_interrupted(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    place.write_text("before")

    def interrupted() -> None:
        with writing(place) as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_rows_that_wait_when_the_store_is_closed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PATIENCE_S", 0.0)
    store = Store(tmp_path / "s.db")
    with sqlite3.connect(tmp_path / "s.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        store.put_rollout(Rollout(id="r"))
        store.put_transition("r", Transition(t=0, model="m", request={}))
        with pytest.raises(StoreError):
            store.close(timeout_s=1.0)
        other.execute("ROLLBACK")
    assert (store.not_stored, store.calls_not_stored) == (2, 0)
    with Store(tmp_path / "s.db") as again:
        assert again.stats()["transitions"] == 1
