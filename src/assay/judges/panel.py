"""Judges made of judges: a jury that votes, and a cascade that asks the stronger judge where the cheap one is unsure."""

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
from assay.sourcecode import attribute_of, qualified_name

__all__ = ["Cascade", "Jury", "reliability_weights"]

RULES = ("majority", "median", "mean")
_MOST = 4.0  # weight of a member that is never wrong


class Jury(Judge):
    """Several judges of one scale decide together. Members without a verdict do not vote; under half of them, nothing is said.

    Args:
        members: judges of the same scale, or their configs from an artifact. Each may have a `model` of its own.
        how: `majority` of the verdicts (level votes go to the higher mean probability, then to the worse word), `median` of
            the places on an ordered scale, or `mean` of the probabilities.
        weights: of each member's vote, at least 0; all alike where empty. `reliability_weights` gives them from labels.
    """

    def __init__(
        self,
        members: Sequence[Judge | Mapping[str, Any]],
        *,
        how: str = "majority",
        weights: Sequence[float] = (),
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        built = _distinct([_built(member) for member in members])
        if how not in RULES:
            raise ConfigError(f"how={how!r} must be one of {', '.join(RULES)}")
        if not built or any(member.labels != built[0].labels for member in built):
            raise ConfigError(f"a jury needs members of one scale; got {[list(member.labels) for member in built]}")
        if how == "median" and built[0].spec.kind == "nominal":
            raise ConfigError("how='median' needs a scale with an order; this one is nominal")
        if weights and (len(weights) != len(built) or min(weights) < 0 or not sum(weights) > 0):
            raise ConfigError(f"weights={list(weights)} must be one number of at least 0 for each of {len(built)} members, one of them above 0")
        super().__init__(built[0].spec, shows=_all_shown(built), calibration=calibration)
        self.members, self.how, self.weights = built, how, tuple(weights)

    @property
    def config(self) -> dict[str, Any]:
        calibration = super().config["calibration"]
        return {"members": [_named(m) for m in self.members], "how": self.how, "weights": list(self.weights), "calibration": calibration}

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        votes, reasons = [], []
        for member, weight in zip(self.members, self.weights or [1.0] * len(self.members), strict=True):
            found, reason = attempt(member, given)
            if found is None:
                reasons.append(reason)
            else:
                votes.append((found, weight))
        if len(votes) * 2 < len(self.members) or not sum(weight for _, weight in votes) > 0:
            raise NoGrade(f"{len(votes)} of {len(self.members)} members of the jury gave a verdict: {reasons[0] if reasons else 'their weight is 0'}")
        total = math.fsum(weight for _, weight in votes)
        shares = {label: math.fsum(w for found, w in votes if found.verdict == label) / total for label in self.labels}
        beliefs = [(found.probabilities or {label: float(label == found.verdict) for label in self.labels}, w) for found, w in votes]
        means = {label: math.fsum(p[label] * w for p, w in beliefs) / total for label in self.labels}
        whole = {**(means if self.how == "mean" else shares), "verdict": self._decided(shares, means)}
        if all(found.get("orders") for found, _ in votes):  # judges of pairs: what each place got
            whole["orders"] = [max(self.labels, key=lambda label: sum(w for found, w in votes if found.orders[at] == label)) for at in (0, 1)]
        return whole, None

    def _decided(self, shares: Mapping[str, float], means: Mapping[str, float]) -> str:
        if self.how == "median":
            return self.labels[int(np.searchsorted(np.cumsum([shares[label] for label in self.labels]), 0.5 - 1e-9))]
        level = (lambda label: (means[label],)) if self.how == "mean" else (lambda label: (round(shares[label], 9), means[label]))
        return max(self.labels, key=level)

    def judged(self, reading: Reading | None, verdict: str | None = None) -> Any:
        said = super().judged(reading, verdict)
        if reading is not None and not self.calibration:
            said.verdict = reading["verdict"]
            said.confidence = said.probabilities[said.verdict]
        return said


class Cascade(Judge):
    """The first judge decides where it is confident; the second is asked about the rest.

    Args:
        first, second: judges of the same scale; the second is the stronger and dearer.
        least: confidence in [0, 1] under which, or without any, the second is asked. Its failure falls back on nothing: a
            case that the first was unsure of and the second cannot decide has no verdict.
    """

    def __init__(
        self,
        first: Judge | Mapping[str, Any],
        second: Judge | Mapping[str, Any],
        *,
        least: float = 0.7,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        cheap, strong = _distinct([_built(first), _built(second)])
        if cheap.labels != strong.labels:
            raise ConfigError(f"a cascade needs judges of one scale; got {list(cheap.labels)} and {list(strong.labels)}")
        if not 0 <= least <= 1:
            raise ConfigError(f"least={least!r} must be between 0 and 1")
        super().__init__(cheap.spec, shows=_all_shown([cheap, strong]), calibration=calibration)
        self.first, self.second, self.least = cheap, strong, least

    @property
    def config(self) -> dict[str, Any]:
        calibration = super().config["calibration"]
        return {"first": _named(self.first), "second": _named(self.second), "least": self.least, "calibration": calibration}

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        found, _ = attempt(self.first, given)
        if found is None or found.confidence is None or found.confidence < self.least:
            found = self.second(**{name: given[name] for name in self.second.shows})
        orders = found.get("orders")
        if found.probabilities is None:
            return {"written": found.verdict, "orders": orders}, None
        return {**found.probabilities, "orders": orders}, None

    def judged(self, reading: Reading | None, verdict: str | None = None) -> Any:
        if reading is None or "written" not in reading:
            return super().judged(reading, verdict)
        said = super().judged(None, reading["written"])
        if reading["orders"]:
            said.orders = tuple(reading["orders"])
        return said


def reliability_weights(verdicts: Sequence[Sequence[str | None]], items: Sequence[Item], labels: int) -> list[float]:
    """Votes worth what each member's agreement with people says: log(a·(K-1)/(1-a)) for agreement a on K labels, 0 at chance
    and below (Nitzan and Paroush 1982, International Economic Review 23:289); a is smoothed by one item.

    Args:
        verdicts: one sequence a member, in the order of the items; None where it gave none.
    """
    weights = []
    for given in verdicts:
        pairs = [item.shares.get(verdict, 0.0) for verdict, item in zip(given, items, strict=True) if verdict is not None]
        agreed = (math.fsum(pairs) + 1 / labels) / (len(pairs) + 1)
        weights.append(min(_MOST, max(0.0, math.log(agreed * (labels - 1) / max(1e-9, 1 - agreed)))))
    return weights if sum(weights) > 0 else [1.0] * len(verdicts)


def _distinct(judges: Sequence[Judge]) -> list[Judge]:
    """Each one an object of its own, so that a judge that is there twice is saved and loaded as two."""
    return [copy.deepcopy(judge) if any(judge is other for other in judges[:at]) else judge for at, judge in enumerate(judges)]


def _all_shown(judges: Sequence[Judge]) -> list[str]:
    return list(dict.fromkeys(name for judge in judges for name in judge.shows))


def _named(judge: Judge) -> dict[str, Any]:
    return {"program": qualified_name(judge), "config": judge.config}


def _built(judge: Judge | Mapping[str, Any]) -> Judge:
    """A judge, or one from its name and config."""
    if isinstance(judge, Judge):
        return judge
    found = attribute_of(str(judge["program"]))
    if not (isinstance(found, type) and issubclass(found, Judge)):
        raise ConfigError(f"{judge['program']} is no judge")
    return rebuilt(found, judge["config"])
