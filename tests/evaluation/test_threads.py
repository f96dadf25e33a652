"""An evaluation's runs in threads: each result is yielded when complete, also those before a failure."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from assay.datasets import Task
from assay.errors import BudgetExceeded, Cancelled
from assay.evaluation import Session
from assay.evaluation.executors import in_background, in_order, pairs_in_threads
from assay.models import Meter
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Recorder


@pytest.mark.parametrize("threads", [1, 3])
def test_runs_finished_before_a_failure_are_yielded(threads: int) -> None:
    session = Session(
        scripted_lm(lambda _: ""),
        Rubric("r", [Criterion(name="ok", check=lambda *_: True)]),
        Recorder(),
        Meter(),
        threads=threads,
    )

    class Runner:
        def run(self, task: Task) -> str:
            if task.inputs["q"] == 5:
                time.sleep(0.3)
                raise BudgetExceeded("the cap is reached", what="calls")
            return task.key

    tasks = [Task(id=str(at), inputs={"q": at}) for at in range(6)]
    runs = pairs_in_threads([(Runner(), task) for task in tasks], session)  # type: ignore[misc]
    options = [next(runs) for _ in range(5)]
    assert sorted(options) == [(at, tasks[at].key) for at in range(5)]
    with pytest.raises(BudgetExceeded):
        next(runs)


def test_runs_are_yielded_while_others_are_in_progress() -> None:
    session = Session(
        scripted_lm(lambda _: ""),
        Rubric("r", [Criterion(name="ok", check=lambda *_: True)]),
        Recorder(),
        Meter(),
        threads=2,
    )
    go_on = threading.Event()

    class Runner:
        def run(self, task: Task) -> bool:
            return task.inputs["q"] == 0 or go_on.wait(120)

    pairs = [(Runner(), Task(id=str(at), inputs={"q": at})) for at in range(2)]
    runs = pairs_in_threads(pairs, session)  # type: ignore[arg-type]
    assert next(runs) == (0, True)
    go_on.set()
    assert list(runs) == [(1, True)]


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (Cancelled("by the user"), False),
        (KeyboardInterrupt(), False),
        (BudgetExceeded("the cap is reached", what="calls"), True),
    ],
)
def test_a_stop_by_the_user_does_not_wait_for_jobs_in_progress_and_a_cap_does(
    error: BaseException, waits: bool
) -> None:
    ended, go_on = list[int](), threading.Event()

    def job(index: int) -> None:
        if index == 1:
            raise error
        go_on.wait(120)
        ended.append(index)

    release = threading.Timer(1.0, go_on.set)
    release.start()
    with pytest.raises(type(error)):
        in_order(job, 2, threads=2)
    assert bool(ended) == waits
    release.cancel()
    go_on.set()


def test_results_are_in_the_order_of_the_jobs_and_a_job_in_the_background_keeps_its_exception() -> None:
    assert in_order(lambda index: (time.sleep(0.1 if index == 0 else 0), index)[1], 4, threads=4) == [0, 1, 2, 3]
    assert in_order(lambda index: index, 0, threads=4) == []
    assert in_background(lambda: 7)() == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("command", ["compile", "judge score"])
def test_ctrl_c_ends_a_command_that_waits_for_a_slow_server(command: str, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"question": str(n), "answer": "1", "output": "a"}) + "\n" for n in range(40))
    (tmp_path / "d.jsonl").write_text(rows)
    (tmp_path / "p.py").write_text("import dspy\n\np = dspy.Predict('question -> answer')\n")
    arguments = {
        "compile": ["compile", "p.py:p", "--rubric", "math_qa"],
        "judge score": ["judge", "score", "Is it kind?"],
    }[command]
    asked, release = threading.Event(), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.set()
            release.wait(60)

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        job = subprocess.Popen(
            [sys.executable, "-m", "assay", *arguments, "--data", "d.jsonl", "--model", "openai/slow", "--api-base",
             address, "--no-preflight", "--store", "s.db"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert asked.wait(60)
        job.send_signal(signal.SIGINT)
        try:
            _, printed = job.communicate(timeout=120)
        finally:
            release.set()
            job.kill()
            server.shutdown()
    assert job.returncode == 130, printed
    assert "stopped: by the user" in printed
