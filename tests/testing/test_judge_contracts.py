"""The contract suites of judges: ours meet them, and each fails on a judge that is broken in a known way."""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import dspy
import pytest

from assay.judges import Judge, ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.testing import AnswerKeyJudge, PairKeyJudge, scripted_lm
from assay.testing.contracts import (
    JudgeContract,
    ListwiseJudgeContract,
    PairwiseJudgeContract,
)


def _judges_well(request: Any) -> Any:
    """Finds `4` in its inputs, in every prompt format."""
    text = request.messages[-1].text
    inputs = dict(re.findall(r'\b(\w{1,20}): ("(?:[^"\\]|\\.)*")', text))
    first, second = (str(inputs.get(name, "")) == '"4"' for name in ("output_a", "output_b"))
    if "output_a" in text:
        return json.dumps({"verdict": "tie" if first == second else "a" if first else "b"})
    if "outputs" in text:
        lines = re.findall(r"\b([A-Z]): (.*)", text.encode().decode("unicode_escape", "replace"))
        return json.dumps(
            {"grades": [{"id": letter, "grade": "yes" if line.strip(' "') == "4" else "no"} for letter, line in lines]}
        )
    return json.dumps({"verdict": "yes" if '"4"' in text else "no"})


class _Asks:
    def context(self) -> AbstractContextManager[Any]:
        return dspy.context(lm=scripted_lm(_judges_well))


class TestPointwiseJudge(_Asks, JudgeContract):
    def make(self) -> Judge:
        return PointwiseJudge("Is the output right?", reading="text")


class TestPairwiseJudge(_Asks, PairwiseJudgeContract):
    def make(self) -> Judge:
        return PairwiseJudge(reading="text")


class TestListwiseJudge(_Asks, ListwiseJudgeContract):
    def make(self) -> ListwiseJudge:
        return ListwiseJudge(reading="text")


class TestAnswerKeyJudge(JudgeContract):
    def make(self) -> Judge:
        return Keyed()


class TestPairKeyJudge(PairwiseJudgeContract):
    def make(self) -> Judge:
        return PairKeyed()


class Keyed(AnswerKeyJudge):
    def __init__(self) -> None:
        super().__init__("Is it right?", key={"How much is 2 + 2?": "4"})


class PairKeyed(PairKeyJudge):
    def __init__(self) -> None:
        super().__init__(key={"How much is 2 + 2?": "4"})


class OffScale(Keyed):
    def judged(self, reading: Any, verdict: Any = None) -> Any:
        judgement = super().judged(reading, verdict)
        judgement.verdict = "perhaps"
        return judgement


class ValueTooHigh(Keyed):
    def judged(self, reading: Any, verdict: Any = None) -> Any:
        judgement = super().judged(reading, verdict)
        judgement.value = 10.0
        return judgement


class NanValue(Keyed):
    def judged(self, reading: Any, verdict: Any = None) -> Any:
        judgement = super().judged(reading, verdict)
        judgement.value = float("nan")
        return judgement


class Half(Keyed):
    def judged(self, reading: Any, verdict: Any = None) -> Any:
        judgement = super().judged(reading, verdict)
        judgement.probabilities = dict.fromkeys(self.labels, 0.25)
        return judgement


class Backwards(Keyed):
    def read(self, inputs: Mapping[str, Any]) -> Any:
        reading, verdict = super().read(inputs)
        return reading, self.labels[1 - self.labels.index(str(verdict))]


class Raises(Keyed):
    def read(self, inputs: Mapping[str, Any]) -> Any:
        return None, self.labels[-1 if inputs["output"].strip() == "4" else 0]


class Alternates(Keyed):
    count = 0

    def read(self, inputs: Mapping[str, Any]) -> Any:
        Alternates.count += 1
        return None, self.labels[Alternates.count % 2]


class Lenient(Keyed):
    """Gives verdicts on items that it did not receive."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**{"task_input": "How much is 2 + 2?", "output": "", **inputs})


class NoConfig(Keyed):
    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "shows": {"task_input", "output"}}


RANGES = "test_verdict_probabilities_confidence_and_value_are_in_range"


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Keyed, set()),
        (OffScale, {RANGES}),
        (ValueTooHigh, {RANGES}),
        (NanValue, {RANGES}),
        (Half, {RANGES}),
        (Backwards, {"test_the_better_output_has_no_lower_value"}),
        (Raises, {"test_hostile_inputs_give_a_verdict_or_none"}),
        (Alternates, {"test_the_same_inputs_get_the_same_verdict_and_are_not_changed"}),
        (Lenient, {"test_a_missing_input_is_named"}),
        (NoConfig, {"test_a_judge_built_from_its_config_gives_the_same_verdict"}),
    ],
)
def test_a_broken_judge_fails(kind: Any, fails: set[str]) -> None:
    failures = type("Suite", (JudgeContract,), {"make": lambda self: kind()}).failures()
    assert failures.keys() >= fails
    assert bool(failures) == bool(fails)


def test_a_judge_that_breaks_on_a_models_nonsense_fails() -> None:
    class Trusting(PointwiseJudge):
        def read(self, inputs: Any) -> Any:
            lm = dspy.settings.lm
            return None, json.loads(lm(str(inputs))[0])["verdict"]

    class Suite(_Asks, JudgeContract):
        def make(self) -> Judge:
            return Trusting("Is it right?")

    assert "test_a_model_that_answers_nonsense_gives_a_verdict_or_none" in Suite.failures()


def test_a_pairwise_judge_that_prefers_the_first_place_fails() -> None:
    class First(PairKeyed):
        def judged(self, reading: Any, verdict: Any = None) -> Any:
            judgement = super().judged(reading, verdict)
            judgement.verdict, judgement.value, judgement.probabilities = self.labels[0], 0.0, None
            return judgement

    failures = type("Suite", (PairwiseJudgeContract,), {"make": lambda self: First()}).failures()
    assert failures.keys() == {"test_swapped_outputs_swap_the_verdict"}


@pytest.mark.parametrize(
    ("grades", "fails"),
    [
        ({0: 1.0, 2: 2.0}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
        ({0: float("nan")}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
        ({0: 0.1, 2: 0.9}, "test_the_best_output_is_not_graded_below_the_worst"),
        ({0: 0.9, 7: 0.1}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
    ],
)
def test_a_broken_listwise_judge_fails(grades: Any, fails: str) -> None:
    class Fixed(ListwiseJudge):
        def forward(self, **inputs: Any) -> Any:
            return dspy.Prediction(grades=grades, ranking=sorted(grades, key=lambda key: -grades[key]))

    failures = type("Suite", (ListwiseJudgeContract,), {"make": lambda self: Fixed()}).failures()
    assert {fails, "test_fewer_than_two_outputs_are_not_graded"} <= failures.keys()
