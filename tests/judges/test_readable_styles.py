"""A judge whose model puts little probability on the words of the scale is asked for letters."""

from pathlib import Path
from typing import Any

import dspy
import pytest
from labelled_items import labels_file

import assay
from assay.commands.judge_score import score_rows
from assay.judges import PointwiseJudge, resolver
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm

GOOD = {"text": "Is it good?", "scale": ["no", "yes"]}


def lettered(request: Any) -> bool:
    return "Answer with one letter" in str(request.system)


def knows_letters(request: Any) -> dict[str, float]:
    """A small model: asked for words it begins a sentence, asked for letters it answers."""
    good = '"good' in str(request.messages[-1].text)
    if lettered(request):
        return {"B": 0.7, "A": 0.1} if good else {"A": 0.7, "B": 0.1}
    return {"The": 0.7, "yes": 0.03, "no": 0.02}


def counted(script: Any, calls: list[bool]) -> Any:
    return scripted_lm(lambda request: calls.append(lettered(request)) or script(request), logprobs=True)


def test_a_rubrics_judge_is_read_by_letters_where_words_are_improbable() -> None:
    calls = list[bool]()
    rubric = Rubric("r", [Criterion(name="good", judge=JudgeSpec(text="Good?"))])
    rubric = rubric.with_resolver(resolver(counted(knows_letters, calls)))
    values = [rubric.score({"question": "q"}, {"answer": answer}).value for answer in ("good", "bad", "bad", "good")]
    assert values == pytest.approx([7 / 8, 1 / 8, 1 / 8, 7 / 8])
    assert calls == [False, True, True, True, True]  # the first item decides


def test_the_preflight_chooses_the_reading_for_the_whole_run(tmp_path: Path) -> None:
    calls = list[bool]()
    judge = PointwiseJudge(GOOD)
    report = score_rows(
        judge, data=labels_file(tmp_path), lm=counted(knows_letters, calls), store=tmp_path / "s.db"
    )  # fmt: skip
    assert report.verdicts == {"no": 30, "yes": 30}
    assert calls.count(False) == 1
    assert judge.config["style"] == "letters"


@pytest.mark.slow
@pytest.mark.parametrize("style", ["auto", "words"])
def test_a_compile_tries_letters_before_it_gives_up(tmp_path: Path, style: str) -> None:
    report = assay.compile_judge(
        PointwiseJudge(GOOD, style=style), labels=labels_file(tmp_path), lm=scripted_lm(knows_letters, logprobs=True),
        store=tmp_path / "s.db", out=tmp_path / "judge",
    )  # fmt: skip
    assert report.judge.config["style"] == "letters"
    assert report.outcome.agreement is not None
    assert report.outcome.agreement.values["kappa"] == 1.0
    loaded = assay.load_judge(tmp_path / "judge")
    with dspy.context(lm=scripted_lm(knows_letters, logprobs=True)):
        assert loaded(task_input="q", output="good").verdict == "yes"
