"""A job that is killed and resumed ends as one that was not, and sends no call twice that was answered.

Each kill is a process of its own, which `make quick` leaves out.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from contract_project import Project
from prompt_server import PromptServer

import assay

JOBS = {  # arguments, and the number of requests after which the job is killed
    "evaluate": (["sums.py:Sums"], 12),
    "compile": (["sums.py:Sums", "--max-search-calls", "40"], 45),
    "tune": (["sums.py:Sums", "--trials", "3", "--prompt-format", "chat"], 30),
}
VARYING = {  # timings, paths, and counts that a resumed job divides differently
    "artifact", "page", "pictures", "seconds", "started_at", "ended_at", "importance", "repeated_calls", "calls",
    "cached", "tokens", "cost_usd", "search_calls", "table", "study", "figures", "metrics", "latency_ms", "unrecorded",
}  # fmt: skip


def steady(value: Any) -> Any:
    """A report without what varies."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VARYING}
    return [steady(item) for item in value] if isinstance(value, list) else value


def scores(project: Project) -> dict[tuple[str, str, str, int], float | None]:
    """Scores of all rollouts that ended, by what was run."""
    with contextlib.chdir(project.folder), assay.Store() as store:
        rollouts = [rollout for rollout in store.rollouts() if rollout.status != "running"]
    return {(item.phase, item.task_id, item.program_version, item.sample): item.score for item in rollouts}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_killed_and_resumed_job_ends_as_an_uninterrupted_one(
    job: str, server: PromptServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arguments, requests = JOBS[job]
    whole = Project(tmp_path_factory.mktemp("whole"), server.url)
    killed = Project(tmp_path_factory.mktemp("killed"), server.url)
    expected = whole.report(job, *arguments, "--threads", "1")
    before = server.total
    kill(killed.folder, [job, *arguments, "--threads", "1"], server, before + requests)
    spent = server.total
    report = killed.report(job, *arguments, "--threads", "1", "--resume")
    assert steady(report) == steady(expected)
    assert scores(killed) == scores(whole)
    assert report["unrecorded"] == report["repeated_calls"]  # of a call that is sent twice, one answer is stored
    sent_before, sent_after, at_once = spent - before, server.total - spent, expected["calls"]
    assert sent_before >= requests
    assert sent_before + sent_after <= at_once + 1 + report["repeated_calls"]  # the call in flight is sent again


def kill(folder: Path, arguments: list[str], server: PromptServer, at: int) -> None:
    """Runs a command in a process, which gets SIGKILL when the server has had `at` requests."""
    job = subprocess.Popen(
        [sys.executable, "-m", "assay", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OPENAI_API_KEY": "none"},
    )
    while server.total < at and job.poll() is None:
        time.sleep(0.005)
    job.kill()
    _, errors = job.communicate()
    assert job.returncode == -signal.SIGKILL, errors.decode()


def test_a_repeated_job_sends_nothing_that_was_answered(project: Project, server: PromptServer) -> None:
    first = project.report("evaluate", "sums.py:Sums")
    before = server.total
    again = project.report("evaluate", "sums.py:Sums")
    assert (server.total, again["calls"]) == (before, 0)
    assert steady(again["result"]) == steady(first["result"])


def test_a_job_stopped_at_its_cap_goes_on_from_there(project: Project, server: PromptServer) -> None:
    before = server.total
    stopped = project.report("evaluate", "sums.py:Sums", "--max-calls", "7")
    assert stopped["stopped"] is not None
    resumed = project.report("evaluate", "sums.py:Sums", "--resume")
    assert (resumed["stopped"], resumed["result"]["n"], resumed["result"]["unscored"]) == (None, resumed["tasks"], 0)
    assert server.total - before <= resumed["tasks"] + 2  # and the preflight


def test_every_answered_call_is_stored_and_priced(project: Project, server: PromptServer) -> None:
    before = server.total
    report = project.report("evaluate", "sums.py:Sums", "--price", "1,2")
    stats = project.report("traces stats")
    assert server.total - before == report["calls"] == stats["transitions"] - stats["cached"]
    assert (report["unrecorded"], stats["unrecorded"]) == (0, 0)
    assert stats["cost_usd"] == pytest.approx(report["cost_usd"])


def test_the_same_seed_gives_the_same_report(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    reports = []
    for name in ("first", "second"):
        project = Project(tmp_path_factory.mktemp(name), server.url)
        reports.append(json.dumps(steady(project.report("evaluate", "sums.py:Sums", "--seed", "5")), sort_keys=True))
    assert reports[0] == reports[1]
