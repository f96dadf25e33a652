"""`PairwiseJudge`: compares two outputs in both orders, so that position cannot decide; inconsistent pairs are ties.

Rankings from pairwise comparisons are Bradley-Terry strengths.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import dspy
import numpy as np
import pydantic
from dspy.utils.exceptions import AdapterParseError, LMError

from assay.errors import ConfigError
from assay.judges.base import Reading, make_spec
from assay.judges.calibration import Calibration
from assay.judges.pointwise import PointwiseJudge
from assay.judges.reading import (
    EMPTY,
    GUARD,
    LETTERS,
    MIN_MASS,
    READINGS,
    NoProbabilities,
    VerdictAdapter,
    WrittenAdapter,
    fenced_text,
    gave_no_probabilities,
    reads_probabilities,
)
from assay.models import sibling
from assay.models.roles import Endpoint
from assay.rubrics import JudgeSpec, NoGrade
from assay.support.names import one_of

Name = TypeVar("Name", bound=Hashable)
_PRIOR = 0.1  # precision of the Gaussian prior; keeps the strength of an output that won or lost everything finite
_ALL = 8  # up to this number of outputs every pair is compared


def pairings(count: int, *, seed: int = 0, rounds: int = 4) -> list[tuple[int, int]]:
    """Returns the pairs of `count` outputs to compare.

    Every pair up to 8 outputs; beyond that, `rounds` rings in a seeded order, with two comparisons per output and ring.
    """
    if count <= _ALL:
        return list(itertools.combinations(range(count), 2))
    rng, chosen = random.Random(seed), set()
    for _ in range(rounds):
        ring = rng.sample(range(count), count)
        chosen |= {(min(a, b), max(a, b)) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
    return sorted(chosen)


def bradley_terry(comparisons: Iterable[tuple[Name, Name, float]], *, names: Sequence[Name] = ()) -> dict[Name, float]:
    """Fits strengths s with P(i beats j) = 1 / (1 + exp(s_j - s_i)) and mean 0.

    Penalized maximum likelihood with a Gaussian prior of precision 0.1, by Newton's method (the loss is convex).

    Example: a beats b in three of four comparisons; without a prior s_a - s_b = log 3.

    Args:
        comparisons: (first, second, outcome): 1 if the first won, 0 if it lost, 0.5 for a tie; values between are soft
            verdicts.
        names: all names, also those without a comparison.
    Returns:
        name -> strength, in the order of `names`, then of first occurrence.
    Raises:
        ConfigError: an outcome outside [0, 1], or a name compared with itself.
    Source: Bradley and Terry 1952, Biometrika 39:324.
    """
    rows = list(comparisons)
    mentioned = dict.fromkeys([*names, *(name for a, b, _ in rows for name in (a, b))])
    index = {name: at for at, name in enumerate(mentioned)}
    for a, b, outcome in rows:
        if a == b or not 0 <= outcome <= 1:
            raise ConfigError(f"a comparison must be (name, other name, outcome in [0, 1]); got {(a, b, outcome)!r}")
    strengths = np.zeros(len(index))
    if not rows:
        return dict.fromkeys(index, 0.0)
    first, second = np.array([index[a] for a, _, _ in rows]), np.array([index[b] for _, b, _ in rows])
    won = np.array([row[2] for row in rows])
    for _ in range(50):
        p = 1 / (1 + np.exp(strengths[second] - strengths[first]))
        gradient, spread = -_PRIOR * strengths, p * (1 - p)
        np.add.at(gradient, first, won - p)
        np.add.at(gradient, second, p - won)
        hessian = _PRIOR * np.eye(len(index))
        for rows_at, columns_at, sign in (
            (first, first, 1),
            (second, second, 1),
            (first, second, -1),
            (second, first, -1),
        ):
            np.add.at(hessian, (rows_at, columns_at), sign * spread)
        step = np.linalg.solve(hessian, gradient)
        strengths += step
        if np.abs(step).max() < 1e-9:
            break
    return dict(zip(index, (strengths - strengths.mean()).tolist(), strict=True))


def win_rates(strengths: Sequence[float]) -> list[float]:
    """Mean probability in [0, 1] of each being preferred to one of the others; 0.5 for a single one."""
    s = np.array(strengths, dtype=float)
    if len(s) < 2:
        return [0.5] * len(s)
    beats = 1 / (1 + np.exp(s[None, :] - s[:, None]))
    rates: list[float] = ((beats.sum(axis=1) - 0.5) / (len(s) - 1)).tolist()
    return rates


PAIR_SCALE = ("a", "tie", "b")
ORDERS = ("given", "swapped")


class PairwiseJudge(PointwiseJudge):
    """`judge(task_input=…, output_a=…, output_b=…)` decides which output is better.

    Each pair is judged in both orders. If the two verdicts name different outputs, the verdict is a tie;
    `probabilities` are the mean of both orders. A calibration is applied to each order separately, before they are
    combined, so that it removes position bias. `value` is 0 if the first output is better, 0.5 for a tie, 1 if the
    second is better. `orders` has the verdicts of both orders by position.

    Args:
        spec: the question. Its scale has three labels: the first output, a tie, the second output.
    """

    default_shows = ("task_input", "output_a", "output_b")

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str = "Which output is the better answer to the task?",
        *,
        shows: Sequence[str] | None = None,
        reading: str = "auto",
        style: str = "auto",
        reasoning: bool = False,
        samples: int = 1,
        min_mass: float = MIN_MASS,
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            {"text": spec, "scale": PAIR_SCALE} if isinstance(spec, str) else spec,
            shows=shows,
            reading=reading,
            style=style,
            reasoning=reasoning,
            samples=samples,
            min_mass=min_mass,
            model=model,
            calibration=calibration,
        )
        if len(self.labels) != 3 or not {"output_a", "output_b"} <= set(self.shows):
            raise ConfigError(
                "a pairwise judge needs output_a and output_b in shows and a scale of three labels (the first, a tie, "
                f"the second); got shows={list(self.shows)} and scale={list(self.labels)}"
            )

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        swapped = {**inputs, "output_a": inputs["output_b"], "output_b": inputs["output_a"]}
        return {"given": self._mass(*self.read_once(inputs)), "swapped": self._mass(*self.read_once(swapped))}, None

    def read_once(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        """Reads one order."""
        return super().read(inputs)

    def _mass(self, probabilities: Reading | None, verdict: str | None) -> Reading:
        """Converts a written verdict to a reading with probability 1 on its label, so that both orders are kept."""
        return probabilities or {label: float(label == verdict) for label in self.labels}

    def judged(self, reading: Reading | None, verdict: str | None = None) -> dspy.Prediction:
        if reading is None:
            return super().judged(None, verdict)
        read = {order: self._calibrated(reading[order]) for order in ORDERS}
        final = {
            label: (read["given"][0][label] + read["swapped"][0][other]) / 2
            for label, other in zip(self.labels, reversed(self.labels), strict=True)
        }
        orders = tuple(label for _, label in read.values())
        verdict = orders[0] if orders[0] == self._swapped(orders[1]) else self.labels[1]
        prediction = self._prediction(reading, final, verdict)
        prediction.orders = orders
        written = all(p in (0.0, 1.0) for order in ORDERS for p in (reading[order][label] for label in self.labels))
        if written and not self.calibration and self.samples == 1:  # a single written verdict has no confidence
            prediction.probabilities = prediction.confidence = None
            prediction.value = self.spec.grade(verdict)
        return prediction

    def _swapped(self, label: str) -> str:
        return self.labels[::-1][self.labels.index(label)]

    def fit_rows(self, reading: Reading, shares: Mapping[str, float]) -> list[tuple[Reading, Mapping[str, float]]]:
        """Both orders, each with the raters' shares for that order."""
        swapped = {self._swapped(label): share for label, share in shares.items()}
        return [(reading["given"], shares), (reading["swapped"], swapped)]


# -- `ListwiseJudge`: judges a group of outputs at once, in several seeded orders.


Key = TypeVar("Key", bound=Hashable)
_LETTERS = LETTERS[:20]


class GradedOutput(pydantic.BaseModel):
    """One line of a listwise judge's answer."""

    id: str
    grade: str


class ListwiseJudge(dspy.Module):  # type: ignore[misc]
    """`judge(task_input=…, outputs={id: text, …})` returns `grades` (id -> [0, 1]) and `ranking` (ids, best first).

    Outputs are labelled with letters, in `orders` seeded random orders. If the engine gives token probabilities, the
    model is asked which letter is best. The log-odds of the letters, averaged over orders, are strengths (Luce 1959); a
    grade is the mean probability of being preferred to one of the others. Otherwise the model grades every output on
    the scale by letter, and a grade is the mean over orders. Answers are matched by letter only, never by position:
    unknown letters are ignored, and an output that is not named gets no grade.

    Args:
        spec: the question and the scale of written grades.
        orders: number of random orders. With at least as many as outputs, position bias averages out.
    Raises:
        NoGrade: when called, if no output gets a grade.
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
        self.endpoint: Endpoint | None = None  # of `model`; None uses that of the model configured in DSPy
        if reading not in READINGS:
            raise ConfigError(f"reading={reading!r} {one_of(reading, READINGS)}")
        if orders < 1:
            raise ConfigError(f"orders={orders!r} must be at least 1")
        if not self.spec.graded:
            raise ConfigError("a listwise judge needs a scale with grades; this one is nominal")
        inputs: dict[str, Any] = {"task_input": (str, dspy.InputField()), "outputs": (str, dspy.InputField())}
        scale = ", ".join(self.spec.scale)
        self.grade = dspy.Predict(
            dspy.Signature(
                {**inputs, "grades": (list[GradedOutput], dspy.OutputField())},
                f"{self.spec.text} Grade every output under its own id, worst to best: {scale}. {GUARD}",
            )
        )
        self.pick = dspy.Predict(
            dspy.Signature({**inputs, "verdict": (Literal["A", "B"], dspy.OutputField())}, f"{self.spec.text} {GUARD}")
        )

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-serializable."""
        return {
            "spec": self.spec.to_dict(),
            "orders": self.orders,
            "reading": self.reading,
            "model": self.model,
            "seed": self.seed,
        }

    def forward(self, *, task_input: Any = "", outputs: Mapping[Any, Any]) -> dspy.Prediction:
        if not 2 <= len(outputs) <= len(_LETTERS):
            raise NoGrade(f"a listwise judge compares 2 to {len(_LETTERS)} outputs, got {len(outputs)}")
        lm = dspy.settings.lm if self.model is None else sibling(dspy.settings.lm, self.model, self.endpoint)
        if lm is None:
            raise ConfigError(
                "no language model is configured: call dspy.configure(lm=assay.get_lm(NAME)), or set the judge's model"
            )
        rng, inputs = random.Random(self.seed), {"task_input": fenced_text(task_input) or EMPTY}
        by_letter = reads_probabilities(lm, self.reading) and not (self.reading == "auto" and gave_no_probabilities(lm))
        values_of: dict[Any, list[float]] = defaultdict(list)
        reasons = []
        for _ in range(self.orders):
            by_name = dict(zip(_LETTERS, rng.sample(list(outputs), len(outputs)), strict=False))
            lines = "\n".join(f"{letter}: {fenced_text(outputs[key]) or EMPTY}" for letter, key in by_name.items())
            try:
                with dspy.context(lm=lm):
                    try:
                        values = (self._picked if by_letter else self._graded)({**inputs, "outputs": lines}, by_name)
                    except NoProbabilities:
                        if self.reading == "probabilities" or values_of:
                            raise
                        by_letter = not gave_no_probabilities(lm, now=True)
                        values = self._graded({**inputs, "outputs": lines}, by_name)
            except (NoGrade, LMError) as error:  # other orders may succeed
                reasons.append(str(error))
                continue
            for key, value in values.items():
                values_of[key].append(value)
        if not values_of:
            raise NoGrade(f"no output got a grade: {reasons[0] if reasons else 'the answers name none of them'}")
        means = {key: math.fsum(values) / len(values) for key, values in values_of.items()}
        if by_letter:
            means = dict(zip(means, win_rates(list(means.values())), strict=True))
        return dspy.Prediction(grades=means, ranking=sorted(means, key=lambda key: -means[key]))

    def as_pairs(self) -> "PairwiseJudge":
        """Returns a pairwise judge that calls this one with two outputs, so that pairwise audits can be used."""
        return _ListOfTwo(self)

    def _picked(self, inputs: Mapping[str, str], by_name: Mapping[str, Key]) -> dict[Key, float]:
        """Log-probability of each output's letter minus the mean over all letters."""
        with dspy.context(adapter=VerdictAdapter({letter: letter for letter in by_name})):
            probabilities = self.pick(**inputs).probabilities
        logs = {letter: math.log(probabilities[letter]) for letter in by_name}
        mean = math.fsum(logs.values()) / len(logs)
        return {key: logs[letter] - mean for letter, key in by_name.items()}

    def _graded(self, inputs: Mapping[str, str], by_name: Mapping[str, Key]) -> dict[Key, float]:
        try:
            with dspy.context(adapter=WrittenAdapter()):
                answers: Sequence[GradedOutput] = self.grade(**inputs).grades
        except AdapterParseError as error:
            raise NoGrade(f"the judge answered {error.lm_response[:200]!r}, not a list of ids and grades") from error
        ids = [answer.id.strip() for answer in answers]
        return {
            by_name[name]: self.spec.grade(answer.grade)
            for name, answer in zip(ids, answers, strict=True)
            if name in by_name and ids.count(name) == 1 and answer.grade in self.spec.scale
        }


class _ListOfTwo(PairwiseJudge):
    """See `ListwiseJudge.as_pairs`. The output with the higher grade wins; equal grades are a tie."""

    def __init__(self, judge: ListwiseJudge) -> None:
        super().__init__(judge.spec.text, model=judge.model)
        self.of_lists = judge

    def read_once(self, inputs: Mapping[str, Any]) -> tuple[dict[str, float] | None, str | None]:
        first, tie, second = self.labels
        outputs = {first: inputs["output_a"], second: inputs["output_b"]}
        grades = self.of_lists(task_input=inputs.get("task_input", ""), outputs=outputs).grades
        if set(grades) != set(outputs):
            raise NoGrade("the judge graded only one of two outputs")
        return None, tie if grades[first] == grades[second] else max(grades, key=grades.__getitem__)
