"""Whatever stops a job leaves the record of a job that ended; what a disk does not take is counted."""

import json
import re
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

import assay
from assay.commands.init import init_project
from assay.commands.traces import export_rollouts
from assay.errors import Cancelled, ConfigError, StoreError, WriteFailed
from assay.jobs.ending import advised
from assay.models.meter import NO_PRICE
from assay.support.places import write_whole, writing
from assay.support.report import FULL_DISK
from assay.testing import scripted_lm
from assay.traces import Rollout, Store, Transition
from assay.traces.store import store as stores
from assay.traces.store.listing import list_runs
from rigs.chaos import RUBRIC, STOPS, Stop, serving, stopped
from rigs.command_line import assay_command
from rigs.projects import write_rows

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


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def write_project(tasks: int, **more: Any) -> None:
    Path("p.py").write_text(PROGRAM)
    Path("r.yaml").write_text(RUBRIC)
    write_rows("d.jsonl", [{"question": f"What is {n} + 1?", "answer": str(n + 1), **more} for n in range(tasks)])


def job(lm: Any, **more: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"rubric": "r.yaml", "data": "d.jsonl", "preflight": False, "prompt_format": "json"}
    return {"program": "p.py:p", "lm": lm, **shared, **more}


def one(request: Any) -> str:
    return '{"answer": "1"}'


def counted(query: str) -> int:
    """The number that a query of the store gives."""
    with sqlite3.connect(".assay/assay.db") as db:
        return int(db.execute(query).fetchone()[0])


OTHER_STOPS = sorted(STOPS.keys() - {"calls", "SIGINT", "full disk"})
RUNNING = "SELECT count(*) FROM rollouts WHERE status = 'running'"


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
@pytest.mark.parametrize(
    "how", ["calls", "SIGINT", "full disk", *(pytest.param(how, marks=pytest.mark.chaos) for how in OTHER_STOPS)]
)
@pytest.mark.parametrize("job", ["collect", pytest.param("compile", marks=pytest.mark.chaos)])
def test_every_answered_call_of_a_stopped_job_is_stored_and_nothing_is_left_running(
    job: str, how: str, tmp_path: Path
) -> None:
    stop = small_disk() if STOPS[how].disk_kb else STOPS[how]
    with serving(tmp_path / "log", delay_ms=150) as server:
        accounts, problems = stopped(job, tmp_path / "job", server, stop)
    assert problems == []
    assert accounts.answered > 3


def started_command(address: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "assay", *arguments, "--model", "openai/m", "--api-base", address]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


EVALUATE = ["evaluate", "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--split", "val"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ([*EVALUATE, "--threads", "16"], signal.SIGHUP),
        (["run", "p.py:p", "--file", "d.jsonl", "--out", "out.jsonl"], signal.SIGTERM),
    ],
    ids=["evaluate, SIGHUP", "run, SIGTERM"],
)
def test_a_signal_ends_a_command_after_its_calls_in_flight(command: list[str], number: int) -> None:
    write_project(400, split="val")  # enough for a signal that comes late on a busy machine
    with serving(Path("log"), delay_ms=300) as server:
        process = started_command(server.address, *command)
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None and server.requests < 8:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        answered = server.requests
    assert process.returncode == 130, errors
    assert re.search(rf"^assay: stopped: (?:cancelled )?by {signal.Signals(number).name}\. ", errors, re.M)
    assert not Path("out.jsonl").exists()
    assert counted("SELECT count(*) FROM transitions WHERE NOT cached") == answered
    assert counted(RUNNING) == 0


@pytest.mark.chaos
@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_counts_the_calls_in_flight() -> None:
    write_project(40, split="val")
    with serving(Path("log"), delay_ms=60_000) as server:
        process = started_command(server.address, *EVALUATE, "--no-preflight", "--threads", "3")
        calls = 0
        while calls < 3:
            time.sleep(0.1)
            for ledger in Path().glob(".assay/runs/*/calls.db"):
                with sqlite3.connect(ledger) as db:
                    calls = db.execute("SELECT count(*) FROM calls").fetchone()[0]
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "in flight" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=25)
    assert process.returncode == 130
    assert counted(RUNNING) == 0
    (run,) = assay_command("runs", "list", "--json").report["runs"]
    shown = assay_command("runs", "show", run["id"], "--json").report
    assert (shown["status"], shown["unrecorded"]) == ("stopped", 3)
    assert shown["result"]["stopped"]


@pytest.mark.parametrize("hangs", [False, True], ids=["in a call", "in a program that hangs"])
def test_ctrl_c_in_python_keeps_the_calls_in_flight_and_leaves_no_rollout_running(hangs: bool) -> None:
    write_project(30, split="val")
    begun = threading.Event()
    if hangs:
        Path("p.py").write_text(HANGING)

    def answer(request: Any) -> str:
        begun.set()
        time.sleep(0.2)
        return one(request)

    def interrupt() -> None:
        begun.wait(60)
        while hangs and not Path("hanging").exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    lm, main = scripted_lm(answer), threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises((Cancelled, KeyboardInterrupt)):
            assay.evaluate(**job(lm, threads=4))
    finally:
        signal.signal(signal.SIGINT, before)
    with Store() as store:
        stats, rollouts = store.stats(), list(store.rollouts())
        assert [run["status"] for run in list_runs(store)] == ["stopped"]
    assert stats["transitions"] == lm.scripted.calls > 0
    assert {rollout.status for rollout in rollouts} <= {"done", "error"}


def test_cached_answers_that_a_killed_job_did_not_settle_are_paid_for_when_it_is_resumed() -> None:
    write_project(6, split="val")
    lm = scripted_lm(one)

    def tokens(**more: Any) -> int:
        return int(assay.evaluate(**job(lm, **more)).to_dict()["tokens"])

    spent = tokens(max_calls=3)
    (ledger,) = Path(".assay/runs").glob("*/calls.db")
    with sqlite3.connect(ledger) as db:  # as if it was killed before it settled the calls
        db.execute("UPDATE calls SET settled = 0, prompt_tokens = 0, completion_tokens = 0, cost_usd = 0")
    assert tokens(max_calls=6, resume=True) == 2 * spent > 0
    assert lm.scripted.calls == 6


def test_an_evaluation_of_all_rows_that_a_cap_ended_says_how_many_of_them_were_scored() -> None:
    write_project(40)
    lm = scripted_lm(one)
    data = assay.evaluate(**job(lm, split="all", threads=1, max_calls=10)).to_dict()
    assert (data["tasks"], data["result"]["n"]) == (40, 10)
    assert any("10 of 40" in note for note in data["notes"])
    data = assay.evaluate(**job(lm, split="all", threads=1)).to_dict()
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


def test_refused_rows_are_counted_in_the_report_of_a_command_and_its_exit_code_is_1(full: list[int]) -> None:
    write_project(5, split="val")
    command = ["collect", "p.py:p", *EVALUATE[2:], "-n", "1", "--model", "openai/m", "--no-preflight", "--json"]
    command += ["--api-base", "http://127.0.0.1:9/v1", "--min-coverage", "0"]
    assert assay_command(*command).report["rows_not_stored"] == 0
    full[0] = 1
    refused = assay_command(*command, "--seed", "1")
    data = json.loads(refused.stdout.splitlines()[0])
    assert (refused.code, data["rows_not_stored"] > 0) == (1, True)
    assert data["unrecorded"] == data["calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "audit"])
def test_a_command_that_a_cap_ends_before_its_report_says_so_in_json(command: str) -> None:
    Path("j.yaml").write_text("text: Is the output right?\nscale: [no, yes]\n")
    rows = write_rows("d.jsonl", [{"input": "?", "output": str(n)} for n in range(9)])
    data = ["--data", rows] if command == "score" else []
    with serving(Path("log")) as server:
        lm = ["--model", "openai/m", "--api-base", server.address, "--max-calls", "3"]
        done = assay_command("judge", command, "j.yaml", *data, *lm, "--json")
    assert "3 calls" in done.report["stopped"]


class Filling:
    """A model at whose fifth call the disk is full."""

    def __init__(self, pages: list[int], delay_s: float) -> None:
        self.calls, self.pages, self.delay_s = 0, pages, delay_s

    def __call__(self, request: Any) -> str:
        self.calls += 1
        if self.calls == 5:
            self.pages[0] = 1
        time.sleep(self.delay_s if self.pages[0] == 1 else 0.0)  # the store has time to notice
        return one(request)


def test_a_job_stops_at_a_full_disk_and_its_report_says_what_is_missing(full: list[int]) -> None:
    write_project(200, split="val")
    lm = scripted_lm(Filling(full, 0.02))
    report = assay.collect(**job(lm, split="val", n=1, threads=4)).to_dict()
    assert "disk" in report["stopped"]
    assert report["calls"] == lm.scripted.calls < 200
    assert report["unrecorded"] == report["calls"] - counted("SELECT count(*) FROM transitions")
    assert report["rows_not_stored"] >= report["unrecorded"]


@pytest.mark.chaos
@pytest.mark.slow
def test_a_compile_that_a_full_disk_stopped_continues_once_there_is_space(full: list[int]) -> None:
    write_project(80)
    script = Filling(full, 0.3)

    def compiled(*, resume: bool) -> dict[str, Any]:
        options = job(scripted_lm(script), threads=4, max_search_calls=60, resume=resume)
        return assay.compile(**options).to_dict()

    assert "disk" in compiled(resume=False)["stopped"]
    made, full[0] = script.calls, 1_000_000
    continued = compiled(resume=True)
    assert continued["stopped"] is None
    assert continued["calls"] == script.calls > made


def test_a_full_disk_stops_predictions_for_a_file_and_what_was_written_is_named_a_part(full: list[int]) -> None:
    write_project(300)
    full[0] = 1
    with serving(Path("log"), delay_ms=20) as server:
        command = ["run", "p.py:p", "--file", "d.jsonl", "--out", "out.jsonl", "--model", "openai/m"]
        done = assay_command(*command, "--api-base", server.address)
        assert (done.code, "disk" in done.stderr) == (1, True)
        assert 0 < server.requests < 300
    rows = [json.loads(line) for line in Path("out.jsonl.part").read_text().splitlines()]
    assert 0 < len(rows) < 300
    assert not Path("out.jsonl").exists()
    assert list(Path(".assay").glob("*.room*")) == []


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


def test_a_project_and_an_export_that_the_disk_does_not_take_are_not_there_in_part(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(ConfigError, match="cannot write"):
        init_project(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    assert init_project(tmp_path / "new").files
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


def interrupted(place: Path) -> None:
    with writing(place) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_as_before_if_its_writing_is_interrupted(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    place.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        interrupted(place)
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
