"""What never ends, and what ends the process, is one run's failure: of an agent, a tool, a check, a judge."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.api import run
from assay.errors import ConfigError, FailureKind, ProgramFailed
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm
from assay.traces import Store

DATA = [{"id": str(at), "question": f"{at}", "answer": f"{at}"} for at in range(4)]
RIGHT = Rubric("r", [Criterion(name="right", check=lambda task, prediction, rollout: prediction["answer"] == task.expected["answer"])])


def scored(program: Any, rubric: Any = RIGHT, **options: Any) -> Any:
    given = {"lm": scripted_lm(lambda r: "yes"), "split": "val", "rename": {}, "preflight": False, "threads": 2, "salt": "s"}
    rows = [{**row, "split": "val"} for row in DATA]
    return assay.evaluate(program, rubric=rubric, data=rows, **{**given, **options}).evaluation


def by_question(evaluation: Any) -> dict[str, Any]:
    return dict(sorted(evaluation.results.items()))


@pytest.mark.parametrize("ends", [lambda: sys.exit(0), lambda: sys.exit("bye"), lambda: (_ for _ in ()).throw(GeneratorExit())])
def test_a_program_that_ends_the_process_has_failed_and_the_others_go_on(ends: Any) -> None:
    def agent(question: str) -> str:
        if question == "2":
            ends()
        return question

    found = scored(agent)
    assert [result.value for result in by_question(found).values()] == [1.0, 1.0, 0.0, 1.0]
    assert by_question(found)["2"].failure is FailureKind.AGENT


def test_a_tool_that_ends_the_process_is_the_runs_failure() -> None:
    tool = dspy.Tool(lambda number: sys.exit(number), name="stop", desc="Stops.", args={"number": {"type": "integer"}})

    def agent(question: str) -> str:
        return question if question != "1" else str(tool(number=1))

    assert [result.value for result in by_question(scored(agent)).values()] == [1.0, 0.0, 1.0, 1.0]


def test_a_run_that_never_ends_fails_with_its_reason_and_the_others_go_on() -> None:
    def agent(question: str) -> str:
        if question == "0":
            time.sleep(30)
        while question == "1":
            pass
        return question

    began = time.monotonic()
    found = by_question(scored(agent, task_timeout=1.0))
    assert time.monotonic() - began < 15
    assert [result.value for result in found.values()] == [0.0, 0.0, 1.0, 1.0]
    assert found["0"].failure is FailureKind.TIMEOUT
    assert "limit of 1 s" in found["0"].failed
    with Store() as store:
        assert sorted(r.status for r in store.rollouts()) == ["done", "done", "failed", "failed"]


def test_a_run_that_waits_for_its_model_is_unscored() -> None:
    def slow(request: Any) -> str:
        if "0" in json.dumps(str(request)):
            time.sleep(30)
        return "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"

    class Asks(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.answer = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            return self.answer(question=question) if question == "0" else dspy.Prediction(answer=question)

    found = by_question(scored(Asks(), lm=scripted_lm(slow), task_timeout=2.0, adapter="chat"))
    assert math.isnan(found["0"].value)
    assert found["0"].failure is FailureKind.TIMEOUT
    assert [found[name].value for name in "123"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_a_check_that_ends_the_process_or_never_ends_leaves_its_criterion_unscored(how: str) -> None:
    def check(task: Any, prediction: Any, rollout: Any) -> float:
        if task.inputs["question"] == "3":
            sys.exit(1) if how == "exits" else time.sleep(30)
        return 1.0

    began = time.monotonic()
    found = by_question(scored(lambda question: question, Rubric("r", [Criterion(name="odd", check=check)]), task_timeout=0.5))
    assert time.monotonic() - began < 10
    assert [result.value for name, result in found.items() if name != "3"] == [1.0, 1.0, 1.0]
    assert math.isnan(found["3"].value)
    assert ("SystemExit" if how == "exits" else "the check of 'odd' took longer than the limit of 0.5 s") in found["3"].verdicts[0].reason


def test_a_judge_that_never_answers_leaves_its_criterion_unscored() -> None:
    def answer(request: Any) -> str:
        time.sleep(30)
        return "yes"

    rubric = Rubric("r", [Criterion(name="fine", check=lambda *_: 1.0), Criterion(name="good", judge=JudgeSpec(text="Is it good?"))])
    began = time.monotonic()
    found = by_question(scored(lambda question: question, rubric, lm=scripted_lm(answer), task_timeout=0.5))
    assert time.monotonic() - began < 15
    assert [result.value for result in found.values()] == [1.0] * 4
    assert {result.coverage for result in found.values()} == {0.5}
    assert "the judge of 'good' took longer" in found["0"].verdicts[1].reason


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="task_timeout"):
        scored(lambda question: question, task_timeout=wrong)


def test_one_prediction_has_the_limit_too(own_folder: Path) -> None:
    Path("agent.py").write_text(
        "import sys, time, dspy\n\n\nclass A(dspy.Module):\n    def forward(self, question):\n"
        "        if question == 'sleep':\n            time.sleep(30)\n        if question == 'exit':\n            sys.exit(0)\n"
        "        return dspy.Prediction(answer=question)\n"
    )
    with pytest.raises(ProgramFailed, match=r"limit of 0\.5 s"):
        run("agent.py:A", {"question": "sleep"}, model="openai/m", task_timeout=0.5)
    Path("rows.jsonl").write_text('{"question": "exit"}\n{"question": "4"}\n{"question": "sleep"}\n')
    words = [sys.executable, "-m", "assay", "run", "agent.py:A", "--file", "rows.jsonl", "--model", "openai/m", "--task-timeout", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert "sys.exit(0)" in rows[0]["error"]
    assert rows[1] == {"answer": "4"}
    assert "limit of 1 s" in rows[2]["error"]
