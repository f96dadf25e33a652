"""Ensembles of judges: a jury that votes, and a cascade that calls a second judge if the first is not confident."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.errors import ConfigError
from assay.judges.base import Judge, Reading, attempt, rebuilt
from assay.judges.calibration import Calibration
from assay.judges.labels import Item
from assay.rubrics import NoGrade
from assay.sources.modules import attribute_of, qualified_name
from assay.support.names import one_of

RULES = ("majority", "median", "mean")
_MAX_WEIGHT = 4.0  # of a member that is never wrong


class Jury(Judge):
    """Several judges of one scale vote. Members without a verdict do not vote; at least half must have one.

    Args:
        members: judges of the same scale, or their configs from an artifact. Each may have its own `model`.
        how: `majority` of the verdicts (ties go to the higher mean probability, then to the worse label), `median` of
            the positions on an ordered scale, or `mean` of the probabilities.
        weights: weight of each member's vote, >= 0; equal if empty. `reliability_weights` computes them from labels.
    """

    def __init__(
        self,
        members: Sequence[Judge | Mapping[str, Any]],
        *,
        how: str = "majority",
        weights: Sequence[float] = (),
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        built = _distinct([_load_member(member) for member in members])
        if how not in RULES:
            raise ConfigError(f"how={how!r} {one_of(how, RULES)}")
        if not built or any(member.labels != built[0].labels for member in built):
            raise ConfigError(f"a jury needs members of one scale; got {[list(member.labels) for member in built]}")
        if how == "median" and built[0].spec.kind == "nominal":
            raise ConfigError("how='median' needs a scale with an order; this one is nominal")
        if weights and (len(weights) != len(built) or min(weights) < 0 or not sum(weights) > 0):
            raise ConfigError(
                f"weights={list(weights)} must be one number >= 0 for each of {len(built)} members, one of them above 0"
            )
        super().__init__(built[0].spec, shows=_all_fields(built), calibration=calibration)
        self.members, self.how, self.weights = built, how, tuple(weights)

    @property
    def config(self) -> dict[str, Any]:
        calibration = super().config["calibration"]
        return {
            "members": [_member_config(m) for m in self.members],
            "how": self.how,
            "weights": list(self.weights),
            "calibration": calibration,
        }

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        votes, reasons = [], []
        for member, weight in zip(self.members, self.weights or [1.0] * len(self.members), strict=True):
            vote, reason = attempt(member, inputs)
            if vote is None:
                reasons.append(reason)
            else:
                votes.append((vote, weight))
        if len(votes) * 2 < len(self.members) or not sum(weight for _, weight in votes) > 0:
            raise NoGrade(
                f"{len(votes)} of {len(self.members)} members of the jury gave a verdict: "
                f"{reasons[0] if reasons else 'their weight is 0'}"
            )
        total = math.fsum(weight for _, weight in votes)
        shares = {label: math.fsum(w for vote, w in votes if vote.verdict == label) / total for label in self.labels}
        probabilities = [
            (vote.probabilities or {label: float(label == vote.verdict) for label in self.labels}, w)
            for vote, w in votes
        ]
        means = {label: math.fsum(p[label] * w for p, w in probabilities) / total for label in self.labels}
        reading = {**(means if self.how == "mean" else shares), "verdict": self._verdict(shares, means)}
        if all(vote.get("orders") for vote, _ in votes):  # pairwise judges: combine each position separately
            reading["orders"] = [
                max(self.labels, key=lambda label: sum(w for vote, w in votes if vote.orders[at] == label))
                for at in (0, 1)
            ]
        return reading, None

    def _verdict(self, shares: Mapping[str, float], means: Mapping[str, float]) -> str:
        if self.how == "median":
            return self.labels[int(np.searchsorted(np.cumsum([shares[label] for label in self.labels]), 0.5 - 1e-9))]
        if self.how == "mean":
            return max(self.labels, key=lambda label: means[label])
        return max(self.labels, key=lambda label: (round(shares[label], 9), means[label]))

    def judged(self, reading: Reading | None, verdict: str | None = None) -> Any:
        prediction = super().judged(reading, verdict)
        if reading is not None and not self.calibration:
            prediction.verdict = reading["verdict"]
            prediction.confidence = prediction.probabilities[prediction.verdict]
        return prediction


class Cascade(Judge):
    """Calls a second judge for the items on which the first is not confident.

    Args:
        first: the judge that is called for every item.
        second: a judge of the same scale, usually stronger and more expensive.
        least: confidence threshold in [0, 1]. Below it, or if the first judge gives no confidence, `second` is called.
            If `second` cannot decide either, the item is unscored.
    """

    def __init__(
        self,
        first: Judge | Mapping[str, Any],
        second: Judge | Mapping[str, Any],
        *,
        least: float = 0.7,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        cheap, strong = _distinct([_load_member(first), _load_member(second)])
        if cheap.labels != strong.labels:
            raise ConfigError(
                f"a cascade needs judges of one scale; got {list(cheap.labels)} and {list(strong.labels)}"
            )
        if not 0 <= least <= 1:
            raise ConfigError(f"least={least!r} must be between 0 and 1")
        super().__init__(cheap.spec, shows=_all_fields([cheap, strong]), calibration=calibration)
        self.first, self.second, self.least = cheap, strong, least

    @property
    def config(self) -> dict[str, Any]:
        calibration = super().config["calibration"]
        return {
            "first": _member_config(self.first),
            "second": _member_config(self.second),
            "least": self.least,
            "calibration": calibration,
        }

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        result, _ = attempt(self.first, inputs)
        if result is None or result.confidence is None or result.confidence < self.least:
            result = self.second(**{name: inputs[name] for name in self.second.shows})
        orders = result.get("orders")
        if result.probabilities is None:
            return {"written": result.verdict, "orders": orders}, None
        return {**result.probabilities, "orders": orders}, None

    def judged(self, reading: Reading | None, verdict: str | None = None) -> Any:
        if reading is None or "written" not in reading:
            return super().judged(reading, verdict)
        prediction = super().judged(None, reading["written"])
        if reading["orders"]:
            prediction.orders = tuple(reading["orders"])
        return prediction


def reliability_weights(verdicts: Sequence[Sequence[str | None]], items: Sequence[Item], labels: int) -> list[float]:
    """Computes a jury's weights from each member's agreement with raters.

    The weight is log(a·(K-1)/(1-a)) for agreement a on K labels, clipped to [0, 4]; it is 0 at chance level. a is
    smoothed with one item at chance. Source: Nitzan and Paroush 1982, International Economic Review 23:289.

    Args:
        verdicts: one sequence per member, in the order of the items; None for an unscored item.
        labels: number of labels K.
    """
    weights = []
    for member in verdicts:
        pairs = [
            item.shares.get(verdict, 0.0) for verdict, item in zip(member, items, strict=True) if verdict is not None
        ]
        agreed = (math.fsum(pairs) + 1 / labels) / (len(pairs) + 1)
        weights.append(min(_MAX_WEIGHT, max(0.0, math.log(agreed * (labels - 1) / max(1e-9, 1 - agreed)))))
    return weights if sum(weights) > 0 else [1.0] * len(verdicts)


def _distinct(judges: Sequence[Judge]) -> list[Judge]:
    """Copies repeated objects, so that a judge listed twice is saved and loaded as two."""
    return [
        copy.deepcopy(judge) if any(judge is other for other in judges[:at]) else judge
        for at, judge in enumerate(judges)
    ]


def _all_fields(judges: Sequence[Judge]) -> list[str]:
    return list(dict.fromkeys(name for judge in judges for name in judge.shows))


def _member_config(judge: Judge) -> dict[str, Any]:
    return {"program": qualified_name(judge), "config": judge.config}


def _load_member(judge: Judge | Mapping[str, Any]) -> Judge:
    """The judge itself, or one created from its class name and config."""
    if isinstance(judge, Judge):
        return judge
    kind = attribute_of(str(judge["program"]))
    if not (isinstance(kind, type) and issubclass(kind, Judge)):
        raise ConfigError(f"{judge['program']} is not a judge class")
    return rebuilt(kind, judge["config"])
