"""An agent, tool, check or judge that never returns fails one run only."""

import asyncio
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dspy
import pytest
from endless_programs import by_question, scored

from assay.commands.run import run
from assay.errors import ConfigError, FailureKind, ProgramFailed
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm
from assay.traces import Store


def hanging(question: str) -> str:
    while question == "1":
        time.sleep(0.01)
    return question


def hanging_in_c_code(question: str) -> str:
    """As a socket without a timeout does: no line of Python is reached until it returns."""
    if question == "1":
        time.sleep(300)
    return question


async def hanging_async(question: str) -> str:
    if question == "1":
        await asyncio.sleep(300)
    return question


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["called", "awaited", "awaited, of a plain function", "awaited, of a lambda that gives a coroutine"]
)
@pytest.mark.timeout(120)
def test_a_hanging_tool_is_an_error_for_the_agent_and_the_run_continues(how: str) -> None:
    functions = {"called": hanging, "awaited": hanging_async, "awaited, of a plain function": hanging}
    function = functions.get(how, lambda question: hanging_async(question))
    tool = dspy.Tool(
        function, name="search", desc="Searches.", args={"question": {"type": "string"}}, arg_types={"question": str}
    )

    async def searched(question: str) -> Any:
        return await tool.acall(question=question)

    def agent(question: str) -> str:
        try:
            result: str = tool(question=question) if how == "called" else asyncio.run(searched(question))
            return result
        except Exception as error:
            return f"instead: {error}"

    results = by_question(scored(agent, task_timeout=4.0))
    assert [result.value for result in results.values()] == [1.0, 0.0, 1.0, 1.0]
    assert results["1"].failure is None
    with Store() as store:
        (run,) = [r for r in store.rollouts() if r.inputs["question"] == "1"]
    assert run.prediction == {"answer": "instead: the tool 'search' gave no result after 1 s"}
    assert run.status == "done"


@pytest.mark.parametrize(("function", "wraps"), [(hanging, False), (hanging, True), (hanging_in_c_code, False)])
@pytest.mark.timeout(120)
def test_a_hanging_tool_that_ends_the_run_scores_0_as_a_tool_failure(function: Any, wraps: bool) -> None:
    tool = dspy.Tool(function, name="search", desc="Searches.")

    def agent(question: str) -> str:
        try:
            return str(tool(question=question))
        except TimeoutError as error:
            if wraps:
                raise ValueError("no search") from error
            raise

    results = by_question(scored(agent, task_timeout=2.0))
    assert [result.value for result in results.values()] == [1.0, 0.0, 1.0, 1.0]
    assert results["1"].failure is FailureKind.TOOL


@pytest.mark.timeout(120)
def test_a_run_that_waits_for_its_model_is_unscored() -> None:
    def slow(request: Any) -> str:
        if "0" in json.dumps(str(request)):
            time.sleep(300)
        return "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"

    class Asks(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.answer = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            return self.answer(question=question) if question == "0" else dspy.Prediction(answer=question)

    results = by_question(scored(Asks(), lm=scripted_lm(slow), task_timeout=2.0, prompt_format="chat"))
    assert math.isnan(results["0"].value)
    assert results["0"].failure is FailureKind.TIMEOUT
    assert [results[name].value for name in "123"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("how", ["exits", "hangs"])
@pytest.mark.timeout(120)
def test_a_check_that_exits_or_never_ends_is_unscored(how: str) -> None:
    def check(task: Any, prediction: Any, rollout: Any) -> float:
        if task.inputs["question"] == "3":
            sys.exit(1) if how == "exits" else time.sleep(300)
        return 1.0

    results = by_question(
        scored(lambda question: question, Rubric("r", [Criterion(name="odd", check=check)]), task_timeout=0.5)
    )
    assert [result.value for name, result in results.items() if name != "3"] == [1.0, 1.0, 1.0]
    assert math.isnan(results["3"].value)
    assert ("SystemExit" if how == "exits" else "the check of 'odd' took longer than the limit of 0.5 s") in results[
        "3"
    ].verdicts[0].reason


@pytest.mark.timeout(120)
def test_an_endless_judge_call_is_unscored() -> None:
    def answer(request: Any) -> str:
        time.sleep(300)
        return "yes"

    rubric = Rubric(
        "r", [Criterion(name="fine", check=lambda *_: 1.0), Criterion(name="good", judge=JudgeSpec(text="Is it good?"))]
    )
    results = by_question(scored(lambda question: question, rubric, lm=scripted_lm(answer), task_timeout=0.5))
    assert [result.value for result in results.values()] == [1.0] * 4
    assert {result.coverage for result in results.values()} == {0.5}
    assert "the judge of 'good' took longer" in results["0"].verdicts[1].reason


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan])
def test_an_invalid_limit_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="task_timeout"):
        scored(lambda question: question, task_timeout=wrong)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_single_prediction_has_the_limit(own_folder: Path) -> None:
    Path("agent.py").write_text(
        "import sys, time, dspy\n\n\nclass A(dspy.Module):\n    def forward(self, question):\n"
        "        if question == 'sleep':\n            time.sleep(300)\n        if question == 'exit':\n"
        "            sys.exit(0)\n"
        "        return dspy.Prediction(answer=question)\n"
    )
    with pytest.raises(ProgramFailed, match=r"limit of 0\.5 s"):
        run("agent.py:A", {"question": "sleep"}, model="openai/m", task_timeout=0.5)
    Path("rows.jsonl").write_text('{"question": "exit"}\n{"question": "4"}\n{"question": "sleep"}\n')
    words = [
        sys.executable,
        "-m",
        "assay",
        "run",
        "agent.py:A",
        "--file",
        "rows.jsonl",
        "--model",
        "openai/m",
        "--task-timeout",
        "1",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert "sys.exit(0)" in rows[0]["error"]
    assert rows[1] == {"answer": "4"}
    assert "limit of 1 s" in rows[2]["error"]
