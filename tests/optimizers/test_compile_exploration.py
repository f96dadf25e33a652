"""`assay compile`: exploration of tasks that the plain program fails, and demonstrations from it."""

import json
from typing import Any

from compile_scripted import DATA, scripted_session, student_of_examples

from assay.datasets import load_splits
from assay.evaluation import RecordedProgram
from assay.optimizers.prompts.demonstrations import Demonstration, explore
from assay.programs import MathQA


def test_exploration_makes_tool_calls_happen() -> None:
    session = scripted_session()
    with session.context():
        exploration = explore(
            RecordedProgram(MathQA(), session), load_splits(DATA).train, session, prompt_formats=["json"], target=5
        )
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

    def pool(script: Any) -> list[Demonstration]:
        session = scripted_session(script)
        with session.context():
            return explore(
                RecordedProgram(MathQA(), session),
                load_splits(DATA).train[:20],
                session,
                prompt_formats=["json"],
                target=20,
            ).demonstrations

    hard = [d for d in pool(loses_signs) if d.failures]
    assert hard
    assert all(
        d.steps[-1][2]["answer"] == str(d.task.expected["answer"]) and str(d.task.expected["answer"])[0] == "-"
        for d in hard
    )
    assert (
        pool(guesses) == []
    )  # the label occurs nowhere in the inputs of these runs: a demonstration of it would teach guessing
