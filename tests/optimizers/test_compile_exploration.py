"""`assay compile`: exploration of tasks that the plain program fails, and demonstrations from it."""

import json
from pathlib import Path
from typing import Any

import dspy
from compile_scripted import DATA, scripted_session, student_of_examples

import assay
from assay.datasets import load_splits
from assay.evaluation import RecordedProgram
from assay.optimizers.prompts.demonstrations import Demonstration, explore
from assay.programs import MathQA
from assay.rubrics import Criterion, Rubric, checks
from assay.testing import scripted_lm


def test_auto_explores_if_the_data_has_no_labels(tmp_path: Path) -> None:
    data = tmp_path / "unlabelled.jsonl"
    data.write_text("".join(json.dumps({"question": f"say {i}"}) + "\n" for i in range(80)))
    rubric = Rubric(
        "yes", [Criterion(name="yes", check=checks.one_of, arguments={"values": ["yes"], "field": "answer"})]
    )
    report = assay.compile(
        dspy.Predict("question -> answer"), rubric=rubric, data=str(data),
        lm=scripted_lm(lambda request: '{"answer": "yes"}'),
        store=tmp_path / "a.db", sizes={"train": 12, "val": 6, "gate": 5, "test": 5}, prompt_format="json",
    )  # fmt: skip
    assert sum(row["succeeded"] for row in report.outcome.explored) > 0


def test_exploration_raises_temperature_if_nothing_succeeds() -> None:
    session, heats = scripted_session(lambda request: '{"answer": "no idea"}'), set()
    session.lm.recording.observers += (lambda call: heats.add(call.request["config"]["temperature"]),)
    with session.context():
        explore(
            RecordedProgram(MathQA(), session),
            load_splits(DATA).train,
            session,
            prompt_formats=["json"],
            target=5,
            max_calls=300,
        )
    assert 1.0 in heats


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
