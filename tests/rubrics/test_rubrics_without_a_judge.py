"""A rubric with a judge and no model to decide it does not score."""

from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.errors import ConfigError
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from tests.rubrics.test_metrics_as_rubrics import Echo

JUDGED = "name: r\ncriteria:\n- {name: same, check: exact}\n- {name: clear, judge: 'Is it clear?'}\n"
TASK = {"inputs": {"question": "1+1"}, "expected": {"answer": "2"}}
ROWS = [{"question": f"{n}", "answer": f"{n}"} for n in range(20)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(JUDGED)
    return tmp_path


@pytest.mark.parametrize("judging", ["each", "together", "overall"])
@pytest.mark.parametrize("more", [{}, {"when": "same"}, {"weight": -1}])
def test_no_path_scores_without_its_judge(judging: str, more: dict[str, Any]) -> None:
    if judging == "overall" and more:
        pytest.skip("overall merges judges, which have no condition and a weight above 0")
    clear = Criterion(name="clear", judge=JudgeSpec(text="Is it clear?"), **more)
    resolver = assay.load_rubric("r.yaml").resolver if judging == "together" else None
    rubric = Rubric("r", [Criterion(name="same", check=exact), clear], judging=judging, resolver=resolver)
    example = dspy.Example(question="1+1", answer="2").with_inputs("question")
    for score in (
        lambda: rubric.score(TASK, {"answer": "2"}),
        lambda: rubric.score(TASK, None),
        lambda: rubric.score_group(TASK, [{"answer": "2"}, {"answer": "3"}]),
        lambda: rubric.metric()(example, dspy.Prediction(answer="2")),
    ):
        with pytest.raises(ConfigError, match="overall" if judging == "overall" else "clear"):
            score()


def test_a_rubric_that_was_loaded_without_a_model_does_not_score() -> None:
    with pytest.raises(ConfigError, match="judge_model"):
        assay.load_rubric("r.yaml").score(TASK, {"answer": "2"})


def test_a_model_that_is_named_later_decides() -> None:
    rubric = assay.load_rubric(assay.load_rubric("r.yaml"), judge_model=scripted_lm(lambda _: "yes"))
    assert rubric.score(TASK, {"answer": "2"}).grades == {"same": 1.0, "clear": 1.0}


def test_a_recording_is_refused_before_it_begins() -> None:
    began = False
    with pytest.raises(ConfigError, match="clear"), assay.record({"question": "1+1"}, rubric="r.yaml"):
        began = True
    assert not began


@pytest.mark.parametrize("command", [assay.evaluate, assay.collect, assay.compile, assay.tune])
def test_the_default_model_of_a_run_does_not_judge(command: Any) -> None:
    with pytest.raises(ConfigError, match="clear"):
        command(Echo(), rubric="r.yaml", data=ROWS)


def test_a_judge_that_names_its_model_needs_no_other(folder: Path) -> None:
    (folder / "judge.yaml").write_text("text: Is it clear?\nscale: ['no', 'yes']\nmodel: openai/m\n")
    (folder / "r.yaml").write_text(JUDGED.replace("'Is it clear?'", "{use: judge.yaml}"))
    assay.load_rubric("r.yaml").require_judges()
