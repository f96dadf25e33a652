"""Number of unrecorded LM calls. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unrecorded:
    """Number of unrecorded LM calls.

    Args:
        calls: Calls that were detected.
        reason: Why there may be more, which makes the count unknown; None if it is exact.
        refused: Recorded calls, of known price, whose row the store refused.
    """

    calls: int = 0
    reason: str | None = None
    refused: int = 0

    @property
    def seen(self) -> int:
        """The number of calls that are known."""
        return self.calls + self.refused

    @property
    def count(self) -> int | None:
        """The number of calls; None if unknown."""
        return self.seen if self.reason is None else None

    def __add__(self, other: "Unrecorded") -> "Unrecorded":
        return Unrecorded(self.calls + other.calls, self.reason or other.reason, self.refused + other.refused)

    def __str__(self) -> str:
        least = f", at least {self.seen}" if self.seen else ""
        return str(self.seen) if self.reason is None else f"unknown ({self.reason}{least})"

    def cost(self, recorded_usd: float | None) -> float | None:
        """Cost of a run in dollars; None if it has unrecorded calls, because their price is unknown.

        Args:
            recorded_usd: Cost of the recorded calls.
        """
        return recorded_usd if self.calls == 0 and self.reason is None else None

    def priced(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Report of an evaluation with its `cost_usd` corrected by `cost`.

        Unrecorded calls cannot be assigned to a part of the run, so no part has a known cost.
        """
        return {**report, "cost_usd": self.cost(report["cost_usd"])}

    def to_dict(self) -> dict[str, Any]:
        """`unrecorded` (None if unknown, then also `unrecorded_seen` and `unrecorded_reason`)."""
        known: dict[str, Any] = {"unrecorded": self.count}
        return (
            known if self.reason is None else {**known, "unrecorded_seen": self.seen, "unrecorded_reason": self.reason}
        )


NOTHING = Unrecorded()
