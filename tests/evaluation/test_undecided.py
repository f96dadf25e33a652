"""What a report says where no gain is shown: how many tasks would decide it."""

import re

import pytest

from assay.evaluation import Evaluation
from assay.evaluation.comparison import what_would_decide
from assay.evaluation.statistics import tasks_needed
from assay.rubrics import ScoreResult


def scored(*values: float) -> Evaluation:
    results = {str(at): ScoreResult(value=value) for at, value in enumerate(values)}
    return Evaluation(results=results)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_a_small_gain_names_the_tasks_that_would_show_it() -> None:
    before, after = scored(*[0.0] * 40), scored(*[1.0] * 4, *[0.0] * 36)
    said = numbers(what_would_decide(before, after, "gate"))
    assert 0.1 in said
    assert said[-1] == said[-3] - 40  # so many more than these
    assert tasks_needed(0.1, spread=0.3) <= said[-3] <= tasks_needed(0.1, spread=0.5)


@pytest.mark.parametrize("after", [[0.5] * 40, [0.25] * 40])
def test_without_a_gain_it_names_the_gain_that_the_tasks_would_have_shown(after: list[float]) -> None:
    said = numbers(what_would_decide(scored(*[0.5] * 40), scored(*after), "val"))
    assert said[0] == 40
    assert 0 < said[1] < 1
