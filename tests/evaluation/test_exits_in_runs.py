"""Code that exits the process, or returns what cannot be stored, fails one run only."""

import subprocess
import sys
from typing import Any

import dspy
import pytest
from endless_programs import by_question, scored

from assay.errors import FailureKind


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
