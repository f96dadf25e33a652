"""A judge of two outputs: asked in both orders, so that where a text stands cannot decide; an inconsistent pair is a tie."""

from collections.abc import Mapping, Sequence
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.judges.base import Reading
from assay.judges.calibration import Calibration
from assay.judges.pointwise import PointwiseJudge
from assay.judges.reading import MIN_MASS
from assay.rubrics import JudgeSpec

__all__ = ["PAIR_SCALE", "PairwiseJudge"]

PAIR_SCALE = ("a", "tie", "b")
ORDERS = ("given", "swapped")


class PairwiseJudge(PointwiseJudge):
    """`judge(task_input=…, output_a=…, output_b=…)` says which output is better: the first of the scale, tie, or the last.

    Each pair is judged as given and swapped. Where the two verdicts name different outputs the verdict is a tie;
    `probabilities` are the mean of both orders. A calibration maps each order's reading by itself, as it is shown, so what
    it learns of a place's pull is taken out before the two are compared. `value` is how far the second output is better:
    0 the first, 0.5 level, 1 the second. `orders` are the two verdicts as shown, the first place being the scale's first.

    Args:
        spec: the question. Its scale has three words: the first output, a tie, the second.
    """

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str = "Which output is the better answer to the task?",
        *,
        shows: Sequence[str] = ("task_input", "output_a", "output_b"),
        reading: str = "auto",
        style: str = "auto",
        reasoning: bool = False,
        samples: int = 1,
        min_mass: float = MIN_MASS,
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        asked = {"text": spec, "scale": PAIR_SCALE} if isinstance(spec, str) else spec
        super().__init__(
            asked, shows=shows, reading=reading, style=style, reasoning=reasoning, samples=samples, min_mass=min_mass, model=model,
            calibration=calibration,
        )  # fmt: skip
        if len(self.labels) != 3 or not {"output_a", "output_b"} <= set(self.shows):
            raise ConfigError(
                "a pairwise judge sees output_a and output_b, and its scale has three words (the first, a tie, the second); "
                f"got shows={list(self.shows)} and scale={list(self.labels)}"
            )

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        swapped = {**given, "output_a": given["output_b"], "output_b": given["output_a"]}
        return {"given": self._mass(*self.read_once(given)), "swapped": self._mass(*self.read_once(swapped))}, None

    def read_once(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        """One order, as a judge of anything reads it."""
        return super().read(given)

    def _mass(self, probabilities: Reading | None, verdict: str | None) -> Reading:
        """A written verdict as a reading: all its mass on one word, so that both orders are kept."""
        return probabilities or {label: float(label == verdict) for label in self.labels}

    def judged(self, reading: Reading | None, verdict: str | None = None) -> dspy.Prediction:
        if reading is None:
            return super().judged(None, verdict)
        read = {order: self._calibrated(reading[order]) for order in ORDERS}
        final = {
            label: (read["given"][0][label] + read["swapped"][0][other]) / 2 for label, other in zip(self.labels, reversed(self.labels), strict=True)
        }
        orders = tuple(verdict for _, verdict in read.values())
        agreed = orders[0] if orders[0] == self._swapped(orders[1]) else self.labels[1]
        said = self._said(reading, final, agreed)
        said.orders = orders
        written = all(p in (0.0, 1.0) for order in ORDERS for p in (reading[order][label] for label in self.labels))
        if written and not self.calibration and self.samples == 1:  # nothing is known of how sure it is
            said.probabilities = said.confidence = None
            said.value = self.spec.grade(agreed)
        return said

    def _swapped(self, label: str) -> str:
        return self.labels[::-1][self.labels.index(label)]

    def fit_rows(self, reading: Reading, shares: Mapping[str, float]) -> list[tuple[Reading, Mapping[str, float]]]:
        """Both orders, each with people's shares as they would stand there."""
        swapped = {self._swapped(label): share for label, share in shares.items()}
        return [(reading["given"], shares), (reading["swapped"], swapped)]
