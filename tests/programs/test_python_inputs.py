"""Inputs from Python: examples, mappings, data frames, paths, functions, agents, the model of DSPy's settings."""

import json
from pathlib import Path
from typing import Any

import dspy
import pandas as pd
import pyarrow as pa
import pytest

import assay
from assay.datasets import load_splits
from assay.datasets.memory import data_spec
from assay.errors import DataError
from assay.testing import scripted_lm

SPLITS = ("train", "val", "gate", "test")
ROWS = [{"question": f"What is {i} + 0?", "answer": str(i), "split": SPLITS[i % 4]} for i in range(8)]


def adds(question: str) -> str:
    return question.split()[2]


def as_answer(request: Any) -> str:
    number = (request.messages[-1].text or "").split("What is ")[-1].split()[0]
    return (
        f"[[ ## answer ## ]]\n{number}\n\n[[ ## completed ## ]]"
        if request.config.response_format is None
        else json.dumps({"answer": number})
    )


EXAMPLES = [dspy.Example(**row).with_inputs("question") for row in ROWS]


@pytest.mark.parametrize(
    "data",
    [ROWS, tuple(ROWS), iter(ROWS), EXAMPLES, pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS)],
    ids=["list", "tuple", "generator", "examples", "pandas", "arrow"],
)
def test_rows_in_memory_give_the_same_tasks_as_a_file(data: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    of_file, options = (
        load_splits(data_spec(source), inputs=["question"], need=()) for source in (tmp_path / "rows.jsonl", data)
    )
    assert options.train == of_file.train
    assert options.sizes() == of_file.sizes() == {"train": 2, "val": 2, "gate": 2, "test": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], r"data\[0\] is a int"),
        ({"question": "?"}, "a dict"),
        (7, "a int"),
        ([dspy.Example(a=1).with_inputs("b")], "with_inputs names"),
    ],
)
def test_invalid_data_objects_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        data_spec(data)


class Adder:
    """Somebody's agent."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def set_parameters(self, parameters: Any) -> None:
        self.seen = dict(parameters)

    def execute(self, task: Any) -> Any:
        return {"answer": adds(task["question"]), "steps_allowed": self.seen["max_steps"]}


def test_functions_agents_classes_and_modules_are_evaluated() -> None:
    agent, module = Adder(), dspy.Predict("question -> answer")
    for program, data in ((adds, ROWS), (agent, ROWS), (Adder, ROWS), (module, EXAMPLES)):
        options = {"parameters": {"max_steps": 7}} if program in (agent, Adder) else {}
        report = assay.evaluate(program, rubric="exact", data=data, lm=scripted_lm(as_answer), **options)
        assert report.to_dict()["result"]["score"] == 1.0
    assert agent.seen["max_steps"] == 7


def test_a_program_that_changes_its_inputs_does_not_change_the_task(tmp_path: Path) -> None:
    seen: list[Any] = []

    def appends(numbers: list[int], form: dict[str, list[str]]) -> str:
        seen.append((list(numbers), list(form["fields"])))
        numbers.append(9)
        form["fields"].append("more")
        return "1"

    rows = [{"inputs": {"numbers": [1], "form": {"fields": ["day"]}}, "expected": {"answer": "1"}, "split": "val"}]
    report = assay.evaluate(appends, rubric="exact", data=rows, samples=2, threads=1, store=tmp_path / "s.db")
    assert seen == [([1], ["day"])] * 3  # the preflight is one of them
    with assay.traces.Store(tmp_path / "s.db") as store:
        assert [rollout.inputs["numbers"] for rollout in store.rollouts()] == [[1]] * 3
    assert report.evaluation.mean == 1.0
