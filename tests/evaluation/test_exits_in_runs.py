"""Code that exits the process, or returns what cannot be stored, fails one run only."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from endless_programs import by_question, scored

from assay.errors import FailureKind
from assay.traces import Store


@pytest.mark.parametrize(
    "ends", [lambda: sys.exit(0), lambda: sys.exit("bye"), lambda: (_ for _ in ()).throw(GeneratorExit())]
)
def test_a_program_that_exits_the_process_fails_and_other_runs_continue(ends: Any) -> None:
    def agent(question: str) -> str:
        if question == "2":
            ends()
        return question

    results = scored(agent)
    assert [result.value for result in by_question(results).values()] == [1.0, 1.0, 0.0, 1.0]
    assert by_question(results)["2"].failure is FailureKind.AGENT


def exit_in_a_group() -> None:
    raise BaseExceptionGroup("tasks", [SystemExit(1), ValueError()])


def exit_before_another_error() -> None:
    try:
        sys.exit(1)
    except SystemExit as error:
        raise RuntimeError("the tool failed") from error


@pytest.mark.parametrize("ends", [exit_in_a_group, exit_before_another_error])
def test_wrapping_an_exit_in_another_exception_is_still_a_failure(ends: Any) -> None:
    results = by_question(scored(lambda question: ends() if question == "2" else question))
    assert [result.value for result in results.values()] == [1.0, 1.0, 0.0, 1.0]
    assert results["2"].failure is FailureKind.AGENT


class Unwritable:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


def holding_itself() -> list[Any]:
    rows: list[Any] = []
    rows += [rows, rows]
    return rows


def nested(depth: int) -> list[Any]:
    rows: list[Any] = []
    for _ in range(depth):
        rows = [rows]
    return rows


@pytest.mark.parametrize(
    "answer",
    [
        10**5000,
        holding_itself(),
        nested(100_000),
        {(1, 2): 3},
        Unwritable(ValueError),
        Unwritable(SystemExit),
        Unwritable(KeyboardInterrupt),
    ],
    ids=["huge number", "holds itself", "deep", "tuples as names", "ValueError", "SystemExit", "KeyboardInterrupt"],
)
def test_an_answer_that_is_not_json_is_stored_and_the_job_continues(answer: Any, tmp_path: Path) -> None:
    def agent(question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=answer if question == "2" else question)

    results = scored(agent, store=tmp_path / "s.db")
    assert [result.value == 1.0 for result in by_question(results).values()] == [True, True, False, True]
    with Store(tmp_path / "s.db") as store:
        rollouts = [store.rollout(rollout.id) for rollout in store.rollouts()]
    assert {rollout.status for rollout in rollouts} == {"done"}
    assert len(rollouts) == 4


class Unreadable(Exception):
    def __str__(self) -> str:
        sys.exit(5)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt, "it raised KeyboardInterrupt itself"), (Unreadable, "message cannot be read")],
)
def test_a_program_that_raises_a_job_ending_exception_fails_and_other_runs_continue(
    error: type[BaseException], reason: str
) -> None:
    def agent(question: str) -> str:
        if question == "2":
            raise error
        return question

    results = by_question(scored(agent))
    assert [result.value for result in results.values()] == [1.0, 1.0, 0.0, 1.0]
    assert results["2"].failure is FailureKind.AGENT
    assert reason in str(results["2"].failed)


def test_a_tool_that_exits_the_process_fails_its_run() -> None:
    tool = dspy.Tool(lambda number: sys.exit(number), name="stop", desc="Stops.", args={"number": {"type": "integer"}})

    def agent(question: str) -> str:
        return question if question != "1" else str(tool(number=1))

    assert [result.value for result in by_question(scored(agent)).values()] == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.chaos
@pytest.mark.slow
def test_a_process_ends_at_once_after_an_exception_of_a_signal_handler() -> None:
    script = """
import signal, threading, time
import assay
from assay.rubrics import Criterion, Rubric, checks

class Alarm(BaseException):
    pass

def ring(number, frame):
    raise Alarm

signal.signal(signal.SIGALRM, ring)
begun, main = threading.Event(), threading.main_thread().ident

def slow(question):
    begun.set()
    time.sleep(300)

measure = Rubric("r", [Criterion(name="right", check=checks.exact)])
rows = [{"question": "a", "answer": "a", "split": "val"}, {"question": "b", "answer": "b", "split": "val"}]
threading.Thread(target=lambda: (begun.wait(), signal.pthread_kill(main, signal.SIGALRM)), daemon=True).start()
try:
    assay.evaluate(slow, rubric=measure, data=rows, model="openai/x", api_base="http://127.0.0.1:9", preflight=False)
except Alarm:
    print("rung", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "rung\n", done.stderr
