"""The search of `auto` on the scripted in-context learner: candidates, proposals, the whole job."""

import json
import math
import random
from pathlib import Path
from typing import Any

import dspy
import pytest
from searched_tasks import demonstration, searched

import assay
from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session, SilentProgress
from assay.models import Caps, Meter
from assay.optimizers.prompts.candidates import EXISTING, Candidate, SearchSpace
from assay.optimizers.prompts.demonstrations import SELECTIONS
from assay.optimizers.prompts.proposals import InstructionCheck, propose_instruction
from assay.optimizers.prompts.search import AutoSearch
from assay.rubrics import Criterion, Rubric, load_rubric
from assay.shipped.programs.classify.program import Classify
from assay.testing import scripted_lm
from assay.traces import Recorder
from rigs.learner import InContextLearner

# -- candidates


def test_candidates_respect_the_demonstration_limit_and_vary_temperature() -> None:
    space = searched(calls=30).space
    assert max(space.counts) == 16
    mutants = space.mutants(space.first(), 200, random.Random(0))
    assert {name for spec in mutants for name, _ in spec.parameters} == {"temperature"}  # a plain module has no other
    assert {spec.selection for spec in mutants} == {*SELECTIONS, "nearest", EXISTING}
    assert len({spec.prompt_format for spec in mutants}) == 3


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Look for the main topic.", None), ("", "truncated"), ("Look for the", "truncated"),
        ("Use ```this.", "unclosed"),
        ("Look for the topic (or the main one.", "unclosed"), ("x" * 2000 + ".", "long"),
        ("For example: my card has not arrived after two weeks.", "copied"),
    ],
)  # fmt: skip
def test_auto_proposals_are_validated_like_those_of_dspy_optimizers(text: str, rule: str | None) -> None:
    task = Task(id="1", inputs={"text": "my card has not arrived after two weeks"}, expected={"label": "a"})
    lm = scripted_lm(lambda request: f"[[ ## improved_instruction ## ]]\n{text}\n\n[[ ## completed ## ]]")
    session = Session(lm, load_rubric("classify"), Recorder(), Meter())
    program, instruction_check = (
        RecordedProgram(dspy.Predict("text -> label"), session),
        InstructionCheck(dspy.Predict("text -> label"), lm),
    )
    proposal = propose_instruction(
        program, [demonstration(task)], session, number=0, instruction_check=instruction_check
    )
    assert (proposal, instruction_check.rejected) == (({"self": text}, []) if rule is None else (None, [(0, rule)]))


def test_a_round_of_unscored_runs_is_reported_without_a_number() -> None:
    lines, progress = list[str](), SilentProgress()
    progress.say = lines.append  # type: ignore[method-assign]
    meter, learner = Meter(Caps(search_calls=60)), InContextLearner("intents")
    unscored = Rubric("r", [Criterion(name="x", check=lambda *_: math.nan)])
    session = Session(scripted_lm(learner, meter=meter), unscored, Recorder(), meter, progress=progress)
    program = RecordedProgram(learner.program(), session)
    tasks = learner.tasks(20, seed=1)
    search = AutoSearch(
        SearchSpace(program, [], [None], most=16, seed=0), Candidate("baseline", program), tasks, session
    )
    search.begin()
    search.report_round()
    assert "best: baseline, not scored on 2 tasks" in lines[-1]


def test_rejected_proposals_are_reported() -> None:
    class CutOff(InContextLearner):
        def __call__(self, request: Any) -> Any:
            if "improved_instruction" in str(request):
                return "[[ ## improved_instruction ## ]]\nLook for the topic and\n\n[[ ## completed ## ]]"
            return super().__call__(request)

    learner, recorder, meter = CutOff("intents"), Recorder(), Meter(Caps(search_calls=60))
    tasks = learner.tasks(60, seed=1)
    session = Session(
        scripted_lm(learner, meter=meter, observers=[recorder.observe]), load_rubric("classify"), recorder, meter
    )
    program = RecordedProgram(learner.program(), session)
    search = AutoSearch(
        SearchSpace(program, [], [None], most=16, seed=0), Candidate("baseline", program), tasks, session
    )
    with session.context():
        search.run()
    assert search.space.instructions == [{}]
    count = len(search.instruction_check.rejected)
    assert count > 0
    assert search.rejections() == [f"{count} of {count} proposed instructions were rejected: {count} truncated"]


# -- the job


@pytest.mark.slow
def test_compile_stores_the_best_temperature_in_the_artifact(tmp_path: Path) -> None:
    learner = InContextLearner("intents", seed=3)
    lines = [json.dumps({"inputs": dict(t.inputs), "expected": dict(t.expected)}) for t in learner.tasks(150, seed=1)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    lm = scripted_lm(learner).copy(temperature=0.7)
    report = assay.compile(
        learner.program(),
        rubric="classify",
        data=str(tmp_path / "d.jsonl"),
        lm=lm,
        max_search_calls=100,
        out=tmp_path / "a",
    )
    settings = json.loads((tmp_path / "a" / "manifest.json").read_text())["settings"]
    assert settings["parameters"]["temperature"] < 0.7
    data = report.to_dict()
    assert data["test"]["gain"]["mean"] > 0.1
    assert data["unrecorded"] == 0


@pytest.mark.slow
def test_perfect_baseline_wins_and_ends_the_search() -> None:
    recorder, meter = Recorder(), Meter(Caps(search_calls=300))
    tasks = [Task(id=str(n), inputs={"text": f"text {n}"}, expected={"label": "ab"[n % 2]}) for n in range(70)]
    labels = {str(task.inputs["text"]): str(task.expected["label"]) for task in tasks}

    def right(request: Any) -> str:
        prompt = request.messages[-1].text or ""
        return json.dumps(
            {
                "label": next(
                    label for text, label in labels.items() if text in prompt.split("\n") or f"{text}\n" in prompt
                )
            }
        )

    lm = scripted_lm(right, meter=meter, observers=[recorder.observe])
    session = Session(lm, load_rubric("classify"), recorder, meter, threads=1)
    program = RecordedProgram(Classify(["a", "b"]), session)
    space = SearchSpace(program, [demonstration(t) for t in tasks[:40]], ["json"], most=16, seed=0)
    search = AutoSearch(space, Candidate("baseline", program), tasks[40:], session)
    session.register(tasks)
    with session.context():
        search.run()
    assert search.candidates[0].mean == 1.0, search.candidates[0].evaluation.results
    assert search.best() is search.candidates[0]
    assert meter.calls_of("search") < 150
