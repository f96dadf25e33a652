"""Tasks that end the process that runs them in threads."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assay.evaluation.failures import Deaths
from assay.testing.scripted_server import running as scripted_server
from assay.traces import Store
from assay.traces.resuming import DeathsInStore

_left: list[ExitStack] = []  # runs of processes that "died"; a context that is collected would end in order


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store(database_url) as opened:
        yield opened
        while _left:
            _left.pop().close()


def of_run(store: Store, running: Sequence[str] = ()) -> Deaths:
    """What a process on any machine knows of the run."""
    return Deaths(DeathsInStore(store, "job-1"), running=running)


def dies(deaths: Deaths, *tasks: str, ended: tuple[str, ...] = ()) -> None:
    """A process that runs tasks at the same time, of which some end, and dies."""
    with ExitStack() as done:
        for task in ended:
            done.enter_context(deaths.running(task))
    _left.append(ExitStack())
    for task in tasks:
        _left[-1].enter_context(deaths.running(task))


def test_a_suspect_that_dies_alone_counts_as_failed_and_others_are_acquitted(store: Store) -> None:
    dies(of_run(store), "a", "b", ended=("c",))
    resumed = of_run(store)
    assert "a, b" in resumed.notes[0]
    assert all(resumed.failure_of(task) is None for task in "abc")
    with resumed.running("a"):
        pass
    dies(resumed, "b")
    third = of_run(store)
    failed = third.failure_of("b")
    assert failed is not None
    assert failed.by_agent
    assert third.failure_of("a") is None
    assert "without `resume`" in third.notes[0]
    third.close()
    assert of_run(store).failure_of("b") is not None  # of all later processes of the run
    assert Deaths(DeathsInStore(store, "job-2")).notes == []


def test_a_task_that_a_cluster_blames_counts_as_failed_on_every_machine(store: Store) -> None:
    of_run(store).blame("a")
    assert of_run(store).failure_of("a") is not None


def test_a_process_that_ends_in_order_leaves_no_suspects(store: Store) -> None:
    deaths = of_run(store)
    with deaths.running("a"):
        deaths.close()  # a cap, Ctrl-C
        assert of_run(store).notes == []
    with deaths.running("b"):  # a thread that goes on
        assert of_run(store).notes == []


def test_tasks_that_ended_are_no_suspects_of_a_process_that_is_killed_between_them(store: Store) -> None:
    dies(of_run(store), ended=("a", "b"))
    assert of_run(store).notes == []


def test_a_death_while_the_store_was_out_of_reach_is_known_from_its_rollouts(store: Store) -> None:
    assert "a, b" in of_run(store, ["a", "b"]).notes[0]
    assert of_run(store, ["a"]).failure_of("a") is None  # nothing tells whether it ran alone
    dies(of_run(store), "a")
    assert of_run(store, ["a"]).failure_of("a") is not None


def test_tasks_run_while_the_store_takes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, tries = of_run(store), list[None]()

    def refuse(_: Store) -> Any:
        tries.append(None)
        raise sa.exc.OperationalError("", {}, Exception("no connection"))

    monkeypatch.setattr(Store, "changing", refuse)
    for task in "abc":
        with deaths.running(task):
            pass
    assert len(tries) == 1  # each try may take long


def test_suspects_run_alone(store: Store) -> None:
    dies(of_run(store), "a", "b")
    deaths, at_once, most = of_run(store), 0, dict[str, int]()
    lock = threading.Lock()

    def run(task: str) -> None:
        nonlocal at_once
        with deaths.running(task):
            with lock:
                at_once += 1
                most[task] = at_once
            pause.wait(0.02)
            with lock:
                most[task] = max(most[task], at_once)
                at_once -= 1

    pause = threading.Event()
    threads = [threading.Thread(target=run, args=(task,)) for task in "cdaebfg"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most["a"], most["b"]) == (1, 1)
    assert len(most) == 7


PROGRAM = """
import os, time
import dspy

class Exits(dspy.Module):
    def forward(self, question):
        time.sleep(0.3)
        if question == "2":
            os._exit(7)
        return dspy.Prediction(answer=question)
"""

COMMAND = """
import json, sys
import assay
from assay.evaluation import SilentProgress

class Said(SilentProgress):
    def say(self, line):
        print(line, file=sys.stderr)

report = assay.evaluate(
    "exits.py:Exits", rubric="exact", data="d.jsonl", split="val", store="s.db", model="openai/m", api_base=sys.argv[1],
    threads=4, preflight=False, resume=len(sys.argv) > 2, progress=Said(),
)
print(json.dumps(report.evaluation.scores))
"""


@pytest.mark.chaos
@pytest.mark.slow
def test_a_task_that_exits_the_process_fails_after_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "exits.py").write_text(PROGRAM)
    rows = [{"id": f"t{at}", "question": str(at), "answer": str(at), "split": "val"} for at in range(8)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(url: str, *resume: str) -> Any:
        command = [sys.executable, "-c", COMMAND, url, *resume]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    with scripted_server() as url:
        assert run(url).returncode == 7
        second = run(url, "--resume")
        assert (second.returncode, "runs alone" in second.stderr, "t2" in second.stderr) == (7, True, True)
        third = run(url, "--resume")
    assert third.returncode == 0, third.stderr
    assert "failed, and not run again: task t2" in third.stderr
    assert json.loads(third.stdout) == {f"t{at}": float(at != 2) for at in range(8)}
    with Store(tmp_path / "s.db") as store:
        assert sorted(r.status for r in store.rollouts()) == ["done"] * 7 + ["failed"]
