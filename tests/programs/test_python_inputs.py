"""Inputs from Python: examples, mappings, data frames, paths, functions, agents, the model of DSPy's settings."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import assay
from assay.datasets import load_splits
from assay.datasets.memory import data_spec
from assay.errors import ConfigError, DataError, ParameterError, ProgramError
from assay.testing import scripted_lm

SPLITS = ("train", "val", "gate", "test")
ROWS = [{"question": f"What is {i} + 0?", "answer": str(i), "split": SPLITS[i % 4]} for i in range(8)]


def rubric() -> Any:
    from assay.rubrics import Criterion, Rubric

    return Rubric(
        "r",
        [
            Criterion(
                name="right",
                check=lambda task, prediction, rollout: float(prediction["answer"] == task.expected["answer"]),
            )
        ],
    )


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


def test_equal_rows_are_the_same_job() -> None:
    assert data_spec(ROWS) == data_spec([dict(row) for row in ROWS]) != data_spec(ROWS[:-1])


def test_values_of_numpy_pandas_and_times_become_json() -> None:
    frame = pd.DataFrame({"question": ["a", "b"], "answer": [1, np.nan], "on": pd.to_datetime(["2026-01-02", None])})
    from assay.datasets import iter_rows

    rows = [row for _, row in iter_rows(data_spec(frame))]
    assert rows == [
        {"question": "a", "answer": 1.0, "on": "2026-01-02T00:00:00"},
        {"question": "b", "answer": None, "on": None},
    ]
    assert [row for _, row in iter_rows(data_spec([{"n": np.int64(3), "v": np.array([1.5, math.nan])}]))] == [
        {"n": 3, "v": [1.5, None]}
    ]


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


def test_functions_agents_classes_and_modules_are_evaluated(tmp_path: Path) -> None:
    agent = Adder()
    for program in (adds, agent, Adder):
        report = assay.evaluate(
            program,
            rubric=rubric(),
            data=ROWS,
            lm=scripted_lm(as_answer),
            parameters={} if program is adds else {"max_steps": 7},
        )
        assert report.to_dict()["result"]["score"] == 1.0
    assert agent.seen["max_steps"] == 7
    assert (
        assay.evaluate(
            dspy.Predict("question -> answer"), rubric=rubric(), data=EXAMPLES, lm=scripted_lm(as_answer)
        ).to_dict()["result"]["score"]
        == 1
    )


def test_unsupported_programs_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no prompts to compile"):
        assay.compile(adds, rubric=rubric(), data=ROWS, lm=scripted_lm(as_answer))
    with pytest.raises(ConfigError):
        assay.evaluate(3, rubric=rubric(), data=ROWS)

    class Half:
        def execute(self, task: Any) -> Any: ...

    with pytest.raises(ProgramError, match="no set_parameters"):
        assay.evaluate(Half(), rubric=rubric(), data=ROWS)


def test_export_and_training_reports_have_a_one_line_repr(tmp_path: Path) -> None:
    from assay.optimizers.finetuning import PolicySettings, SFTSettings
    from assay.optimizers.finetuning.policy_gradient import PolicyReport
    from assay.optimizers.finetuning.sft import SFTReport
    from assay.traces.export.settings import Gates

    store = tmp_path / "s.db"
    assay.collect(
        dspy.Predict("question -> answer"), rubric=rubric(), data=ROWS, lm=scripted_lm(as_answer), n=2, store=store
    )
    exported = assay.export("sft", tmp_path / "<b>rows", store=store, gates=Gates(min_clean=0))
    trained = SFTReport(
        "embedded/m+<b>a",
        tmp_path / "<b>",
        SFTSettings(),
        rows=40,
        held_out_rows=4,
        tasks=20,
        left_out=Counter(),
        steps=15,
        loss={1: 2.0},
        best_step=10,
        agreement=1.0,
    )
    curves = {"reward": dict.fromkeys(range(500), 0.5)}
    policy = PolicyReport(
        "embedded/m+<b>p", tmp_path / "<b>", PolicySettings(), curves=curves, steps=500, best_step=400, converged=True
    )
    output = {type(report).__name__: (repr(report), report._repr_html_()) for report in (exported, trained, policy)}
    assert all(
        text.startswith(f"{name}(") and len(text) < 300 and "\n" not in text for name, (text, _) in output.items()
    )
    assert f"rows={exported.rows}, passed={exported.manifest['passed']}" in output["ExportReport"][0]
    assert "name=embedded/m+<b>a, rows=40, steps=15, best_step=10, agreement=1)" in output["SFTReport"][0].replace(
        f"path={tmp_path / '<b>'}, ", ""
    )
    assert "steps=500, best_step=400, converged=True" in output["PolicyReport"][0]
    for name, (_, table) in output.items():
        assert f"<caption>{name}</caption>" in table
        assert "&lt;b&gt;" in table
        assert "<b>" not in table


def test_the_documented_example_runs() -> None:
    import re

    text = (Path(__file__).parents[2] / "docs" / "how-to" / "programs.md").read_text()
    match = re.search(r"<!-- run -->\n```python\n(.*?)```", text, re.DOTALL)
    assert match
    with dspy.context(lm=scripted_lm(as_answer)):
        exec(match[1], {"__name__": "documentation"})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"sizes": 20}, ConfigError, r"sizes=20 must map splits to numbers of tasks, such as sizes=\{'val': 20\}"),
        ({"sizes": {"vall": 20}}, ConfigError, r"sizes names \['vall'\]; the splits are train, val"),
        ({"sizes": {"val": "20"}}, ConfigError, r"sizes \{'val': '20'\} must be integers >= 1"),
        ({"parameters": {"temprature": 0.2}}, ParameterError, "not an agent parameter.*Did you mean 'temperature'"),
        (
            {"parameters": {"max_steps": 2}},
            ConfigError,
            "a plain dspy.Module, which has a temperature alone.* to have context_length, max_steps",
        ),
    ],
)
def test_misspelt_sizes_and_parameters_name_the_nearest(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        assay.evaluate(
            dspy.Predict("question -> answer"), rubric=rubric(), data=ROWS, lm=scripted_lm(as_answer), **wrong
        )


def test_numpy_integers_are_valid_sizes() -> None:
    report = assay.evaluate(
        adds, rubric=rubric(), data=ROWS, lm=scripted_lm(as_answer), sizes={"val": np.int64(1)}
    ).to_dict()
    assert report["result"]["n"] == 1


def test_a_program_that_changes_its_inputs_does_not_change_the_task(tmp_path: Path) -> None:
    seen: list[Any] = []

    def appends(numbers: list[int], form: dict[str, list[str]]) -> str:
        seen.append((list(numbers), list(form["fields"])))
        numbers.append(9)
        form["fields"].append("more")
        return "1"

    rows = [{"inputs": {"numbers": [1], "form": {"fields": ["day"]}}, "expected": {"answer": "1"}, "split": "val"}]
    report = assay.evaluate(appends, rubric=rubric(), data=rows, samples=2, threads=1, store=tmp_path / "s.db")
    assert seen == [([1], ["day"])] * 3  # the preflight is one of them
    with assay.traces.Store(tmp_path / "s.db") as store:
        assert [rollout.inputs["numbers"] for rollout in store.rollouts()] == [[1]] * 3
    assert report.evaluation.mean == 1.0
