"""An agent, tool, check or judge that never returns or that exits the process fails one run only."""

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.judge_score import score_rows
from assay.commands.scoring import score_rollouts
from assay.errors import ConfigError, FailureKind, ModelError
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm
from assay.traces import Rollout, Store

ROWS = [{"id": str(at), "question": f"{at}", "answer": f"{at}", "split": "val"} for at in range(4)]
RIGHT = Rubric(
    "r",
    [Criterion(name="right", check=lambda task, prediction, rollout: prediction["answer"] == task.expected["answer"])],
)


def scored(program: Any, rubric: Any = RIGHT, **options: Any) -> Any:
    keywords = {"lm": scripted_lm(lambda r: "yes"), "split": "val", "rename": {}, "preflight": False, "threads": 2}
    return assay.evaluate(program, rubric=rubric, data=ROWS, **{**keywords, "salt": "s", **options}).evaluation


def by_question(evaluation: Any) -> dict[str, Any]:
    return dict(sorted(evaluation.results.items()))


def exit_in_a_group() -> None:
    raise BaseExceptionGroup("tasks", [SystemExit(1), ValueError()])


def exit_before_another_error() -> None:
    try:
        sys.exit(1)
    except SystemExit as error:
        raise RuntimeError("the tool failed") from error


def close_the_generator() -> None:
    raise GeneratorExit


@pytest.mark.parametrize(
    "ends", [sys.exit, lambda: sys.exit("bye"), close_the_generator, exit_in_a_group, exit_before_another_error]
)
def test_a_program_that_exits_the_process_fails_and_other_runs_continue(ends: Any) -> None:
    results = by_question(scored(lambda question: ends() if question == "2" else question))
    assert [result.value for result in results.values()] == [1.0, 1.0, 0.0, 1.0]
    assert results["2"].failure is FailureKind.AGENT


def test_a_tool_that_exits_the_process_fails_its_run() -> None:
    tool = dspy.Tool(lambda number: sys.exit(number), name="stop", desc="Stops.", args={"number": {"type": "integer"}})

    def agent(question: str) -> str:
        return question if question != "1" else str(tool(number=1))

    assert [result.value for result in by_question(scored(agent)).values()] == [1.0, 0.0, 1.0, 1.0]


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


def judged_rows(path: Path) -> str:
    rows = [{"output": f"{'odd' if at % 2 else 'even'} thing {at}"} for at in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_hanging_verdict_is_unscored_in_judge_commands(tmp_path: Path) -> None:
    def hangs_on_odd(request: Any) -> Any:
        if "odd" in str(request.messages[-1]):
            time.sleep(300)
        return {"yes": 0.9, "no": 0.1}

    report = score_rows(
        "Is it fine?", data=judged_rows(tmp_path / "d.jsonl"), lm=scripted_lm(hangs_on_odd, logprobs=True),
        store=tmp_path / "j.db", task_timeout=0.5, threads=4,
    )  # fmt: skip
    assert (report.verdicts, report.unscored) == ({"no": 0, "yes": 2}, 2)
    assert report.why_unscored == [
        "OverTime: the judge took longer than the limit of 0.5 s, while a model was being asked"
    ]
    with Store(tmp_path / "j.db") as store:
        assert {r.failure for r in store.rollouts() if r.status == "error"} == {FailureKind.TIMEOUT}


@pytest.mark.timeout(120)
def test_a_judge_that_never_answers_stops_the_job_in_preflight(tmp_path: Path) -> None:
    def never(request: Any) -> Any:
        time.sleep(300)

    with pytest.raises(ModelError, match=r"did not answer the judge 'Is it fine\?': .*longer than the limit of 0\.3 s"):
        score_rows(
            "Is it fine?",
            data=judged_rows(tmp_path / "d.jsonl"),
            lm=scripted_lm(never),
            store=tmp_path / "j.db",
            task_timeout=0.3,
        )


@pytest.mark.timeout(120)
def test_stored_rollouts_are_scored_within_the_limit(tmp_path: Path) -> None:
    def check(task: Any, prediction: Any, rollout: Any) -> float:
        if prediction["answer"] == "3":
            time.sleep(300)
        return 1.0

    with Store(tmp_path / "s.db") as store:
        for at in range(4):
            store.put_rollout(
                Rollout(task_id=str(at), inputs={"question": str(at)}, prediction={"answer": str(at)}, status="done")
            )
    rubric = Rubric("r", [Criterion(name="odd", check=check)])
    report = score_rollouts(rubric=rubric, store=tmp_path / "s.db", task_timeout=0.5).to_dict()
    assert (report["scored"], report["unscored"]) == (3, 1)
    assert "the check of 'odd' took longer" in report["undecided"]["odd"]["reason"]
    with pytest.raises(ConfigError, match="task_timeout"):
        score_rollouts(rubric=rubric, store=tmp_path / "s.db", task_timeout=0)
