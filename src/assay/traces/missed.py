"""How many LM calls were not recorded: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING", "Unrecorded"]


@dataclass(frozen=True)
class Unrecorded:
    """How many LM calls were not recorded. `calls` were seen to go by; with a `reason` there may have been more, and the count is unknown."""

    calls: int = 0
    reason: str | None = None

    @property
    def count(self) -> int | None:
        """The number, or None where it is unknown."""
        return self.calls if self.reason is None else None

    def __add__(self, other: "Unrecorded") -> "Unrecorded":
        return Unrecorded(self.calls + other.calls, self.reason or other.reason)

    def __str__(self) -> str:
        least = f", at least {self.calls}" if self.calls else ""
        return str(self.calls) if self.reason is None else f"unknown ({self.reason}{least})"

    def cost(self, recorded_usd: float | None) -> float | None:
        """What a run cost, given the dollars of its recorded calls: None where calls went past, as their price is not known."""
        return recorded_usd if self.count == 0 else None

    def priced(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """An evaluation's report, with its `cost_usd` as `cost` says: whose calls went past is not known, so no part of the run has a cost."""
        return {**report, "cost_usd": self.cost(report["cost_usd"])}

    def to_dict(self) -> dict[str, Any]:
        """`unrecorded` (null where it is unknown), and then `unrecorded_seen` and `unrecorded_reason`."""
        known: dict[str, Any] = {"unrecorded": self.count}
        return known if self.reason is None else {**known, "unrecorded_seen": self.calls, "unrecorded_reason": self.reason}


NOTHING = Unrecorded()
