"""Demonstrations of an agent that follows the labels of train tasks (`Agent.guided`)."""

import json
from typing import Any

import dspy

from assay.datasets import load_tasks
from assay.evaluation import RecordedProgram, Session
from assay.models import Caps, Meter
from assay.optimizers.prompts.demonstrations import explore, with_demos
from assay.programs import Converse
from assay.programs.agent import GUIDE
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder


def helpless(request: Any) -> str:
    return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "none"))


def test_guided_runs_succeed_without_a_call_where_the_program_itself_never_does() -> None:
    recorder, meter = Recorder(), Meter(Caps(search_calls=100))
    lm = scripted_lm(helpless, meter=meter, observers=[recorder.observe])
    session = Session(lm, load_rubric("converse"), recorder, meter, threads=1, seed=0)
    program = RecordedProgram(Converse(), session)
    tasks = load_tasks("conversations:?size=6&facts=4-4&changes=1")
    with session.context():
        exploration = explore(program, tasks, session, prompt_formats=["json"], target=4)
    assert len(exploration.demonstrations) >= 4
    assert all(demonstration.score >= 0.8 for demonstration in exploration.demonstrations)
    assert meter.usage.calls == 0
    predictors = dict(with_demos(program.program, exploration.demonstrations).named_predictors())
    notes = predictors["note"].demos
    assert {note.field == "none" for note in notes} == {True, False}  # a delayed fact has no value yet
    assert all(note.field == "none" or note.value.casefold() in note.message.casefold() for note in notes)
    assert "history" not in predictors["choose"].demos[0]


def test_labels_guide_no_run_outside_of_the_search() -> None:
    task = load_tasks("conversations:?size=1&facts=4-4&changes=0")[0]
    with dspy.context(lm=scripted_lm(helpless)):
        assert dspy.settings.get(GUIDE) is None
        try:
            ended = Converse().execute(task).ended
        except Exception:  # the model writes no valid choice
            ended = "failed"
    assert ended != "done"
