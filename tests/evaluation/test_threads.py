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

from assay.errors import BudgetExceeded, Cancelled
from assay.evaluation.executors import in_background, in_order


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
