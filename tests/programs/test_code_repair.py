"""The shipped program `code_repair`: edits by line, tested in the sandbox, by models that are weak or hostile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from click.testing import CliRunner

import assay
from assay.cli import group
from assay.datasets.tasks import make_task
from assay.errors import FailureKind, SandboxError
from assay.models.calls import failure_of_program, is_agent_failure
from assay.programs import CodeRepair, load_program
from assay.programs.sandbox import available
from assay.rubrics import load_rubric
from assay.shipped.programs.code_repair.edits import Edit, applied
from assay.testing import scripted_lm
from assay.traces.recorder import Recorder
from assay.traces.records import Rollout
from assay.traces.store import Store

CODE = "def total(values):\n    result = 1\n    for value in values:\n        result -= value\n    return result\n"
FIXED = CODE.replace("= 1", "= 0").replace("-=", "+=")
TESTS = [["total([])", "0"], ["total([1, 2])", "3"], ["total([5])", "5"]]


@pytest.fixture(autouse=True)
def sandboxed() -> None:
    if all(available(name) for name in ("bubblewrap", "landlock")):
        pytest.skip("no isolation works here")


def editing(*edits: Any, seen: list[dict[str, str]] | None = None) -> Any:
    """A model that makes these edits (line, text) in turn, the last one for ever. A text answers another question."""
    queue = list(edits)
    replacement: list[str] = []

    def script(request: Any) -> Any:
        asked = list(request.config.response_format["schema"]["properties"])
        if seen is not None:
            seen.append({"asked": asked[-1], "prompt": request.messages[-1].parts[0].text})
        if asked == ["new_line"]:
            return json.dumps({"new_line": replacement.pop()})
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(answer, str | BaseException):
            return answer if isinstance(answer, BaseException) else json.dumps({"thought": "", asked[-1]: answer})
        replacement.append(answer[1])
        return json.dumps({"thought": "", "line": answer[0]})

    return scripted_lm(script)


def repaired(lm: Any, code: str = CODE, tests: Any = TESTS, *, program: CodeRepair | None = None, **set_to: Any) -> Any:
    program = program or CodeRepair()
    program.set_parameters(set_to)
    with dspy.context(lm=lm):
        return program(code=code, visible_tests=tests)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[Recorder, Store, Rollout]]:
    with Store(tmp_path / "assay.db") as store:
        yield Recorder(store), store, Rollout(task_id="t")


def run_recorded(recorded: tuple[Recorder, Store, Rollout], lm: Any, **options: Any) -> tuple[Any, Rollout]:
    recorder, store, rollout = recorded
    lm = assay.models.with_recording(lm, observers=[recorder.observe])
    with recorder.active(), recorder.rollout(rollout):
        result = repaired(lm, **options)
    store.flush()
    return result, store.rollout(rollout.id)


@pytest.mark.slow
def test_edits_that_help_are_kept_and_others_undone() -> None:
    seen: list[dict[str, str]] = []
    lm = editing((2, "result = 0"), (5, "return None"), (4, "result += value"), seen=seen)
    result = repaired(lm)
    assert result.code == FIXED
    assert [step["arguments"].get("line") for step in result.steps] == [None, 2, 5, 4]
    assert [step["result"].split(".")[0] for step in result.steps] == [
        "0 of 3 tests passed",
        "1 of 3 tests passed",
        "0 of 3 tests passed",
        "3 of 3 tests passed",
    ]
    last = seen[-2]["prompt"]
    assert "total([1, 2]): expected 3, found -3" in last, "the report is that of the best version"
    assert "2:     result = 0" in last
    assert "5:     return result" in last
    assert "line 5 as `return None`: 0 of 3" in last


def test_code_that_works_is_returned_without_a_call() -> None:
    lm = editing("never")
    assert repaired(lm, FIXED).code == FIXED
    assert lm.scripted.calls == 0


@pytest.mark.parametrize(
    ("edits", "runs"),
    [
        ([(2, "result = 7"), (2, "result = 7")], 2),  # the same edit again
        ([(2, "result = 7"), (3, "for value in values:")], 2),  # no change after a failed attempt
        ([(2, "result = 1"), (2, "result = 1")], 1),  # the first edit without effect is only fed back
        ([(2, "result = 0"), (2, "result = 1")], 2),  # back to where it began
    ],
)
@pytest.mark.slow
def test_a_repeated_edit_ends_the_run_as_a_loop(recorded: Any, edits: Any, runs: int) -> None:
    result, rollout = run_recorded(recorded, editing(*edits), max_steps=20)
    assert len(result.steps) == runs
    assert [call.failure for call in rollout.transitions] == [None, None, None, FailureKind.LOOP]


@pytest.mark.slow
def test_each_run_of_the_tests_is_a_recorded_tool_call_with_its_isolation(recorded: Any, tmp_path: Path) -> None:
    result, rollout = run_recorded(recorded, editing((2, "result = 0"), (4, "result += value")))
    assert result.code == FIXED
    (first,) = rollout.early_tools
    later = [tool for call in rollout.transitions for tool in call.tools]
    assert (first.name, first.arguments) == ("run_tests", {})
    assert [tool.arguments for tool in later] == [
        {"line": 2, "replacement": "result = 0"},
        {"line": 4, "replacement": "result += value"},
    ]
    assert all(tool.isolation in ("bubblewrap", "landlock") for tool in [first, *later])
    assert recorded[0].unrecorded.reason is None, "a sandbox calls no model"
    result = CliRunner().invoke(group, ["traces", "show", rollout.id, "--store", str(tmp_path / "assay.db")])
    assert result.output.count(f") [isolation {first.isolation}] = ") == 3


@pytest.mark.slow
def test_max_steps_limits_the_edits_and_depth_reviews_them() -> None:
    hack = (2, "return 3")
    assert len(repaired(editing((2, "return 1"), (2, "return 2"), (2, "return 4")), max_steps=1).steps) == 2
    tests = TESTS[1:2]
    right = "def total(values):\n    return sum(values)\n"
    wrong = right.replace("sum(values)", "0")
    fix = (2, "return sum(values)")
    assert repaired(editing(hack, fix), wrong, tests, reasoning_depth=5).code == wrong.replace("0", "3")
    assert repaired(editing(hack, "keep"), wrong, tests, reasoning_depth=6).code == wrong.replace("0", "3")
    assert repaired(editing(hack, "revise", fix, "keep"), wrong, tests, reasoning_depth=6).code == right
    worse = repaired(editing(fix, "revise", (2, "return 9")), wrong, tests, reasoning_depth=6)
    assert worse.code == right, "an accepted version is not lost to a worse one"


@pytest.mark.parametrize(
    "hack",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "print('x' * 10_000_000)",
        "open('tests.py', 'w').write('def test_total(): pass')",
        "import builtins; builtins.sum = lambda *_: 3",
    ],
)
@pytest.mark.slow
def test_hostile_edits_fail_their_tests_and_are_undone(hack: str) -> None:
    program = CodeRepair(timeout_s=2)
    result = repaired(editing((2, f"{hack}\nresult = 1")), program=program, max_steps=1)
    assert result.code == CODE
    assert "0 of 3 tests passed" in result.steps[-1]["result"]
    assert len(result.steps[-1]["result"]) < 5000


def test_a_long_source_is_repaired_function_by_function() -> None:
    filler = "".join(f"def f{i}(x):\n    '''Doc.'''\n    return x + {i}\n\n\n" for i in range(60))
    seen: list[dict[str, str]] = []
    line = filler.count("\n") + 2
    lm = editing("total", (line, "result = 0"), seen=seen)
    code = filler + CODE.replace("-=", "+=")
    result = repaired(lm, code, context_length=300)
    assert result.code == filler + FIXED
    assert [entry["asked"] for entry in seen] == ["function", "line", "new_line"]
    assert f"{line}:     result = 1" in seen[1]["prompt"]
    assert "return x + 59" not in seen[1]["prompt"]


def test_without_a_sandbox_the_run_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.programs.sandbox.process.available", lambda name: "not here")
    with pytest.raises(SandboxError) as raised:
        repaired(editing("never"))
    kind = failure_of_program(raised.value)
    assert kind is FailureKind.SANDBOX
    assert not is_agent_failure(kind)


@pytest.mark.slow
def test_the_rubric_scores_a_mutant_without_configuration() -> None:
    row = {
        "inputs": {"function": "total", "code": CODE, "visible_tests": TESTS[:2]},
        "expected": {"reference": FIXED},
        "metadata": {"hidden_tests": [["total([1])", "1"], ["total([4, 4])", "8"]]},
    }
    task, rubric = make_task(row), load_rubric("code_repair")
    program = load_program("code_repair")
    with dspy.context(lm=editing((2, "result = 0"), (4, "result += value"))):
        prediction = program(**task.inputs)
    assert rubric.score(task, prediction).value == 1.0
    assert rubric.score(task, dspy.Prediction(code=CODE)).value <= 0.2
    hack = CODE.replace("result = 1", "if values == [1, 2]: return 3\n    return 0")
    assert rubric.score(task, dspy.Prediction(code=hack)).value == 0.0
    longer = FIXED.replace("    return", "    values = list(values)\n    return")
    # tests 3 of 3, no hacks 1 of 1, and the diff has 3 changed statements where 2 are needed: (3 + 1 + 2/3) / 5
    assert rubric.score(task, dspy.Prediction(code=longer)).value == pytest.approx((3 + 1 + 2 / 3) / 5)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Edit(2, "return 2"), "def f():\n    return 2\n"),
        (Edit(2, "        return 2"), "def f():\n    return 2\n"),
        (Edit(2, "x = 2\nreturn x"), "def f():\n    x = 2\n    return x\n"),
        (Edit(2, "if 1:\n    return 2\nreturn 3"), "def f():\n    if 1:\n        return 2\n    return 3\n"),
        (
            Edit(2, "if 1:\n        return 2\n    return 3"),
            "def f():\n    if 1:\n        return 2\n    return 3\n",
        ),
        (Edit(2, "if 1:\n    return 2"), "def f():\n    if 1:\n        return 2\n"),
        (Edit(1, "def g():"), "def g():\n    return 1\n"),
        (Edit(2, "return ("), "def f():\n    return (\n"),
    ],
)
def test_an_edit_gets_the_indentation_of_its_line(edit: Edit, expected: str) -> None:
    assert applied("def f():\n    return 1\n", edit) == expected
