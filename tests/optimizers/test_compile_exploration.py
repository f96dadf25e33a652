"""`assay compile`: exploration of tasks that the plain program fails, and demonstrations from it."""

import json
from typing import Any

import dspy
from compile_scripted import DATA, scripted_session, student_of_examples

from assay.datasets import load_splits, load_tasks
from assay.evaluation import RecordedProgram
from assay.optimizers.prompts.demonstrations import explore
from assay.programs import Converse, MathQA
from assay.programs.agent import GUIDE
from assay.testing import scripted_lm


def explored(script: Any, target: int) -> Any:
    session = scripted_session(script)
    with session.context():
        program, tasks = RecordedProgram(MathQA(), session), load_splits(DATA).train[:20]
        return explore(program, tasks, session, prompt_formats=["json"], target=target)


def test_exploration_makes_tool_calls_happen() -> None:
    exploration = explored(student_of_examples, 5)
    assert len(exploration.demonstrations) >= 5
    assert exploration.teacher is not None
    assert exploration.teacher.settings["parameters"]["tool_usage_threshold"] == 0
    actions = [output["action"] for d in exploration.demonstrations for name, _, output in d.steps if name == "decide"]
    assert set(actions) == {"calculator", "answer"}


def test_run_wrong_only_in_its_last_step_is_corrected_by_the_label() -> None:
    def loses_signs(request: Any) -> str:
        reply = json.loads(student_of_examples(request))
        return json.dumps({name: value.lstrip("-") if name == "answer" else value for name, value in reply.items()})

    def guesses(request: Any) -> str:
        reply = json.loads(student_of_examples(request))
        return json.dumps({name: "1 + 1" if name == "expression" else value for name, value in reply.items()})

    hard = [d for d in explored(loses_signs, 20).demonstrations if d.failures]
    assert hard
    for demonstration in hard:
        label = str(demonstration.task.expected["answer"])
        assert (demonstration.steps[-1][2]["answer"], label[0]) == (label, "-")
    # the label occurs nowhere in the inputs of these runs: a demonstration of it would teach guessing
    assert explored(guesses, 20).demonstrations == []


def test_labels_guide_no_run_outside_of_the_search() -> None:
    def helpless(request: Any) -> str:
        return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "none"))

    task = load_tasks("conversations:?size=1&facts=4-4&changes=0")[0]
    with dspy.context(lm=scripted_lm(helpless)):
        assert dspy.settings.get(GUIDE) is None
        try:
            ended = Converse().execute(task).ended
        except Exception:  # the model writes no valid choice
            ended = "failed"
    assert ended != "done"
