"""Fitting when a `Refine` program halts, on val: what is tried, what is chosen, and what the artifact has."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.errors import ConfigError, ProgramError
from assay.optimizers.prompts.thinking import haltings, refinement_in, with_halting
from assay.programs import Refine, program_state, restore_program
from assay.programs.compose import NearestDemos
from assay.programs.refinement import Halting
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm

SIZES = {"train": 4, "val": 60, "gate": 5, "test": 5}  # 60 tasks without a loss show a margin of 0.05


def rounds(*probabilities: float | None) -> list[dict[str, Any]]:
    return [{"probability": probability} for probability in probabilities]


def test_no_halting_is_fitted_if_no_round_could_be_skipped() -> None:
    assert haltings(Halting(), []) == {}
    assert haltings(Halting(), [rounds(None), rounds(1.0), rounds(0.1)]) == {}


def test_thresholds_are_part_of_the_state() -> None:
    refine = Refine(dspy.Predict("question -> answer"), lambda *_: 1.0, halt_at=0.8, min_gain=0.2)
    fitted = with_halting(refine, Halting(0.5, 0.1, [[0.3] * 5]))
    restored = restore_program("", {}, program_state(fitted), fresh=refine)
    assert vars(restored.halting) == vars(fitted.halting)
    assert (refine.halting.halt_at, refine.halting.gains) == (0.8, [])
    with pytest.raises(ConfigError, match="halt_at=nan must be above 0"):
        Halting(halt_at=math.nan)


def test_the_refined_program_may_get_nearest_demonstrations() -> None:
    refine = Refine(dspy.Predict("question -> answer"), lambda *_: 1.0)
    assert refinement_in(NearestDemos(refine, [{"key": "2", "demos": {}}], k=1)) is refine
    assert refinement_in(dspy.Predict("question -> answer")) is None
    with pytest.raises(ProgramError, match="not a Refine program"):
        with_halting(dspy.Predict("question -> answer"), Halting())


def draft_of(request: Any) -> str:
    """Counts upwards: an answer is one more than its draft, the first is 0."""
    drafts = re.findall(r"answer: (\d+)", str(request.messages[-1]))
    return json.dumps({"answer": str(int(drafts[-1]) + 1 if drafts else 0)})


def by_number(task: Any, prediction: dict[str, Any], rollout: Any) -> Grade:
    """0.2, then 0.6, then no better: the second round is right, later ones are worth nothing."""
    return Grade(value=0.6 if int(prediction["answer"]) else 0.2, reason="count")


def raising(*_: Any) -> float:
    raise RuntimeError("the tests cannot run")


def compiled(tmp_path: Path, verifier: Callable[..., Any], depth: int = 10, val: int = 60) -> Any:
    refine = Refine(dspy.Predict("question -> answer"), verifier)
    refine.set_parameters({"reasoning_depth": depth})
    rows = [{"question": f"q{at}", "answer": "1"} for at in range(400)]
    lm = scripted_lm(draft_of)
    report = assay.compile(
        refine, rubric=Rubric(name="r", criteria=[Criterion(name="right", check=exact)]), data=rows, lm=lm,
        out=tmp_path / "a", store=tmp_path / "s.db", optimizer="labeled", sizes={**SIZES, "val": val}, preflight=False,
        thinking_margin=0.05, gate=False,
    )  # fmt: skip
    return report, next(note for note in report.outcome.notes if "halting" in note), refine


@pytest.mark.slow
def test_compile_fits_the_halting_and_stores_it_in_the_artifact(tmp_path: Path) -> None:
    report, note, refine = compiled(tmp_path, by_number)
    assert "halting fitted on val: halts at 0.9, or below a gain of 0.01; tokens -" in note
    assert "score +0.000 on " in note  # the answer of the second round is right, and was the best before
    loaded = assay.load(report.artifact, program=refine)
    assert len(loaded.halting.gains) == 3
    assert refine.halting.gains == []
    with dspy.context(lm=scripted_lm(draft_of)):
        assert len(loaded(question="q").rounds) == 2
        assert len(refine(question="q").rounds) == 4


@pytest.mark.parametrize(
    ("verifier", "chosen"),
    [
        (lambda *_: 0.0, "below a gain of 0.01"),  # always no: further rounds are never kept
        (lambda *_: 1.0, "no halting was fitted"),  # always yes: there is one round
        (lambda *_: math.nan, "no halting was fitted"),
        (raising, "no halting was fitted"),
    ],
)
@pytest.mark.slow
def test_a_verifier_that_is_always_undecided_loses_no_answer(tmp_path: Path, verifier: Any, chosen: str) -> None:
    report, note, _ = compiled(tmp_path, verifier)
    assert chosen in note
    assert report.outcome.stopped is None


def test_too_few_tasks_keep_all_rounds_and_say_how_many_are_needed(tmp_path: Path) -> None:
    report, note, refine = compiled(tmp_path, by_number, val=12)
    assert "halting stays 'all rounds': none that saves tokens is shown to lose at most 0.05" in note
    assert "on 12 val tasks; about 60 are needed" in note
    with dspy.context(lm=scripted_lm(draft_of)):
        assert len(assay.load(report.artifact, program=refine)(question="q").rounds) == 4


def test_a_note_names_the_reasoning_depth_if_it_allows_no_round(tmp_path: Path) -> None:
    assert "'reasoning_depth': 6" in compiled(tmp_path, by_number, depth=3)[1]


def test_a_margin_without_effect_is_said_before_the_search_and_once(tmp_path: Path) -> None:
    lines: list[str] = []

    class Heard(assay.evaluation.SilentProgress):
        def say(self, text: str) -> None:
            lines.append(text)

    rows = [{"question": f"q{at}", "answer": "1"} for at in range(40)]
    report = assay.compile(
        dspy.Predict("question -> answer"), rubric=Rubric(name="r", criteria=[Criterion(name="right", check=exact)]),
        data=rows, lm=scripted_lm(draft_of), out=tmp_path / "a", store=tmp_path / "s.db", optimizer="labeled",
        sizes=SIZES, preflight=False, thinking_margin=0.05, progress=Heard(),
    )  # fmt: skip
    assert sum("thinking_margin" in note for note in report.outcome.notes) == 1
    first = next(at for at, text in enumerate(lines) if "`thinking_margin` has no effect" in text)
    assert first < next(at for at, text in enumerate(lines) if text.startswith("estimate"))
