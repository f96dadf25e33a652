"""Rows with the same inputs and other expected outputs are scored each by their own."""

import json

import dspy

from assay.datasets import Task
from assay.datasets.tasks import TaskIndex
from assay.evaluation.evaluation import evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from assay.traces import Recorder

ROWS = [
    Task(id="a", inputs={"question": "1 + 1?"}, expected={"answer": "2"}),
    Task(id="a-2", inputs={"question": "1 + 1?"}, expected={"answer": "3"}),
    Task(id="a-3", inputs={"question": "1 +  1? "}, expected={"answer": "3"}),
]


def session() -> Session:
    return Session(
        scripted_lm(lambda _: json.dumps({"answer": "2"})),
        Rubric("r", [Criterion(name="right", check=exact)]),
        Recorder(),
        Meter(),
    )


def test_an_evaluation_scores_each_row_by_its_own_expected_output() -> None:
    running = session()
    evaluation = evaluate(RecordedProgram(dspy.Predict("question -> answer"), running), ROWS, running)
    assert evaluation.scores == {"a": 1.0, "a-2": 0.0, "a-3": 0.0}


def test_a_task_is_found_by_its_inputs_in_any_spelling() -> None:
    index = TaskIndex()
    for task in ROWS:
        index.add(task)
    assert index.find({"question": "1 + 1?"}, {"answer": "3"}) == ROWS[1]
    assert index.find({"question": "1 +  1? "}) == ROWS[2]
    assert index.find({"question": "1 + 1?\n"}) in ROWS
    assert index.find({"question": "1 + 2?"}) is None
