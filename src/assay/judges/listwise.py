"""A judge of a group of outputs at once: shown in seeded orders under names of their own, matched by those names alone."""

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import dspy
import pydantic
from dspy.utils.exceptions import AdapterParseError, LMError

from assay.errors import ConfigError
from assay.judges.base import make_spec
from assay.judges.pairwise import PairwiseJudge
from assay.judges.ranking import win_rates
from assay.judges.reading import EMPTY, GUARD, READINGS, NoProbabilities, VerdictAdapter, gave_no_probabilities, reads_probabilities, shown_as
from assay.models import sibling
from assay.models.roles import Endpoint
from assay.rubrics import JudgeSpec, NoGrade

__all__ = ["GradedOutput", "ListwiseJudge"]

Key = TypeVar("Key", bound=Hashable)
_LETTERS = "ABCDEFGHIJKLMNOPQRST"


class GradedOutput(pydantic.BaseModel):
    """One line of a listwise judge's answer."""

    id: str
    grade: str


class ListwiseJudge(dspy.Module):  # type: ignore[misc]
    """`judge(task_input=…, outputs={id: text, …})` gives `grades`: id -> [0, 1], and `ranking`: ids, best first.

    Outputs stand under letters, drawn anew for each of `orders` seeded orders. Where the engine gives token probabilities,
    each order asks which letter is best; the log-odds of the letters, averaged over orders, are strengths (Luce 1959), and
    a grade is the mean probability of being preferred to one of the others. Otherwise every output is graded on the
    scale under its letter, and its grade is the mean over orders. An answer under a letter that was not shown counts for
    nothing, and an output that no answer names stays without a grade: position never stands in for a name.

    Args:
        spec: the question and the scale of written grades.
        orders: permutations asked about; at least as many as outputs takes each place's pull out.
    Raises, when called:
        NoGrade: no output got a grade.
    """

    compares = True

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str = "Which output is the best answer to the task?",
        *,
        orders: int = 4,
        reading: str = "auto",
        model: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.spec, self.orders, self.reading, self.model, self.seed = make_spec(spec), orders, reading, model, seed
        self.endpoint: Endpoint | None = None  # of `model`; that of the model set in DSPy where None
        if reading not in READINGS or orders < 1:
            raise ConfigError(f"reading={reading!r} must be one of {', '.join(READINGS)}, and orders={orders!r} at least 1")
        if not self.spec.graded:
            raise ConfigError("a listwise judge needs a scale with grades; this one is nominal")
        self.grade = dspy.Predict(
            dspy.Signature(
                {"task_input": (str, dspy.InputField()), "outputs": (str, dspy.InputField()), "grades": (list[GradedOutput], dspy.OutputField())},
                f"{self.spec.text} Grade every output under its own id, worst to best: {', '.join(self.spec.scale)}. {GUARD}",
            )
        )
        self.pick = dspy.Predict(
            dspy.Signature(
                {"task_input": (str, dspy.InputField()), "outputs": (str, dspy.InputField()), "verdict": (Literal["A", "B"], dspy.OutputField())},
                f"{self.spec.text} {GUARD}",
            )
        )

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as JSON."""
        return {
            "spec": {**asdict(self.spec), "scale": list(self.spec.scale)}, "orders": self.orders, "reading": self.reading, "model": self.model,
            "seed": self.seed,
        }  # fmt: skip

    def forward(self, *, task_input: Any = "", outputs: Mapping[Any, Any]) -> dspy.Prediction:
        if not 2 <= len(outputs) <= len(_LETTERS):
            raise NoGrade(f"a listwise judge compares 2 to {len(_LETTERS)} outputs, got {len(outputs)}")
        lm = dspy.settings.lm if self.model is None else sibling(dspy.settings.lm, self.model, self.endpoint)
        if lm is None:
            raise ConfigError("no language model is set: use dspy.configure(lm=assay.get_lm(NAME)), or give the judge a model")
        rng, asked = random.Random(self.seed), {"task_input": shown_as(task_input) or EMPTY}
        by_letter = reads_probabilities(lm, self.reading) and not (self.reading == "auto" and gave_no_probabilities(lm))
        found: dict[Any, list[float]] = defaultdict(list)
        reasons = []
        for _ in range(self.orders):
            shown = dict(zip(_LETTERS, rng.sample(list(outputs), len(outputs)), strict=False))
            lines = "\n".join(f"{letter}: {shown_as(outputs[key]) or EMPTY}" for letter, key in shown.items())
            try:
                with dspy.context(lm=lm):
                    try:
                        values = (self._picked if by_letter else self._graded)({**asked, "outputs": lines}, shown)
                    except NoProbabilities:
                        if self.reading == "probabilities" or found:
                            raise
                        by_letter = not gave_no_probabilities(lm, now=True)
                        values = self._graded({**asked, "outputs": lines}, shown)
            except (NoGrade, LMError) as error:  # the other orders may still be answered
                reasons.append(str(error))
                continue
            for key, value in values.items():
                found[key].append(value)
        if not found:
            raise NoGrade(f"no output got a grade: {reasons[0] if reasons else 'the answers named none of them'}")
        means = {key: math.fsum(values) / len(values) for key, values in found.items()}
        if by_letter:
            means = dict(zip(means, win_rates(list(means.values())), strict=True))
        return dspy.Prediction(grades=means, ranking=sorted(means, key=lambda key: -means[key]))

    def as_pairs(self) -> "PairwiseJudge":
        """A judge of pairs that asks this one about lists of two: what is tried on pairs can be tried on it."""
        return _ListOfTwo(self)

    def _picked(self, given: Mapping[str, str], shown: Mapping[str, Key]) -> dict[Key, float]:
        """Log-odds of each output against the mean of all, by the probability of its letter."""
        with dspy.context(adapter=VerdictAdapter({letter: letter for letter in shown})):
            probabilities = self.pick(**given).probabilities
        logs = {letter: math.log(probabilities[letter]) for letter in shown}
        mean = math.fsum(logs.values()) / len(logs)
        return {key: logs[letter] - mean for letter, key in shown.items()}

    def _graded(self, given: Mapping[str, str], shown: Mapping[str, Key]) -> dict[Key, float]:
        try:
            with dspy.context(adapter=dspy.JSONAdapter()):
                answers: Sequence[GradedOutput] = self.grade(**given).grades
        except AdapterParseError as error:
            raise NoGrade(f"the judge answered {error.lm_response[:200]!r}, no list of ids and grades") from error
        named = [answer.id.strip() for answer in answers]
        return {
            shown[name]: self.spec.grade(answer.grade)
            for name, answer in zip(named, answers, strict=True)
            if name in shown and named.count(name) == 1 and answer.grade in self.spec.scale
        }


class _ListOfTwo(PairwiseJudge):
    """See `ListwiseJudge.as_pairs`. The output with the higher grade wins; equal grades are a tie."""

    def __init__(self, judge: ListwiseJudge) -> None:
        super().__init__(judge.spec.text, model=judge.model)
        self.of_lists = judge

    def read_once(self, given: Mapping[str, Any]) -> tuple[dict[str, float] | None, str | None]:
        first, tie, second = self.labels
        outputs = {first: given["output_a"], second: given["output_b"]}
        grades = self.of_lists(task_input=given.get("task_input", ""), outputs=outputs).grades
        if set(grades) != set(outputs):
            raise NoGrade("the judge graded only one of two outputs")
        return None, tie if grades[first] == grades[second] else max(grades, key=grades.__getitem__)
