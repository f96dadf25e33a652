"""`PairwiseJudge`: compares two outputs in both orders, so that position cannot decide; inconsistent pairs are ties."""

from collections.abc import Mapping, Sequence
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.judges.base import Reading
from assay.judges.calibration import Calibration
from assay.judges.pointwise import PointwiseJudge
from assay.judges.reading import MIN_MASS
from assay.rubrics import JudgeSpec

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
