"""Counts calls, tokens and dollars by phase, and stops a run at its caps.

The check stands before each call to a model, so a cap is never passed by more than the calls then in flight.
Answers from the response cache cost nothing and are counted apart.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from assay.errors import BudgetExceeded, Cancelled, ConfigError

__all__ = ["Caps", "Meter", "Usage"]


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Upper limits; None is no limit. `search_calls` counts only the phase named `search`."""

    calls: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    search_calls: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value >= 0:  # NaN fails this too
                raise ConfigError(f"cap {name}={value!r} must be 0 or more")


@dataclass
class Usage:
    """What was spent. `unpriced` calls have no known price and are missing from `cost_usd`."""

    calls: int = 0
    cached: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    unpriced: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def ignore(count: int) -> None:
    """Hears of a call and does nothing."""


class Meter:
    """Thread-safe. One per run; phases are whatever the caller names (`search`, `gate`, `test`)."""

    def __init__(self, caps: Caps | None = None, spent: Mapping[str, Usage] | None = None) -> None:
        self.caps = caps or Caps()
        self.phases: dict[str, Usage] = dict(spent or {})
        self.phase = "search"
        self._lock = threading.RLock()
        self._in_flight = 0
        self._cancelled = False
        self._asked: dict[str, int] = {}
        self.on_call: Callable[[int], None] = ignore  # told of each call, answered by a model or by the cache

    def __deepcopy__(self, memo: object) -> "Meter":
        return self

    @property
    def usage(self) -> Usage:
        """The sum over all phases."""
        total = Usage()
        with self._lock:
            for part in self.phases.values():
                for name, value in vars(part).items():
                    setattr(total, name, getattr(total, name) + value)
        return total

    def of(self, phase: str) -> Usage:
        """What one phase spent (a live object)."""
        with self._lock:
            return self.phases.setdefault(phase, Usage())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the calls inside under `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def cancel(self) -> None:
        """Every later call to a model raises `Cancelled`, in whichever thread."""
        self._cancelled = True

    def search_calls_left(self) -> float:
        """Calls that the search may still make, cached ones included; infinite without a cap."""
        left = float("inf")
        if self.caps.search_calls is not None:
            left = min(left, self.caps.search_calls - self.asked("search"))
        if self.caps.calls is not None:
            left = min(left, self.caps.calls - sum(self._asked.values()))
        return left

    def asked(self, phase: str) -> int:
        """Calls that a phase made in this process, answered by the model or by the cache.

        A search decides by this, not by what it was billed: so it takes the same turns when it is replayed.
        """
        return self._asked.get(phase, 0)

    def reserve(self) -> None:
        """Called before each call to a model.

        Raises:
            BudgetExceeded: the call would pass a cap.
            Cancelled: the run was told to stop.
        """
        with self._lock:  # from reading what was used to counting the call, or two threads would both take the last one
            self.check()
            self._in_flight += 1
            self._asked[self.phase] = self._asked.get(self.phase, 0) + 1

    def check(self) -> None:
        """Raises what `reserve` would raise, and reserves nothing: for calls that are made and metered elsewhere, and then added."""
        if self._cancelled:
            raise Cancelled("the run was stopped")
        with self._lock:
            used, pending = self.usage, self._in_flight
            search = self.of("search").calls if self.phase == "search" else 0
            if self.caps.cost_usd is not None and used.unpriced:
                raise BudgetExceeded(
                    f"the cap of ${self.caps.cost_usd:g} cannot be kept: {used.unpriced} calls had no known price. Cap calls or tokens instead",
                    what="dollars",
                )
            for what, value, cap in (
                ("calls", used.calls + pending, self.caps.calls),
                ("tokens", used.tokens, self.caps.tokens),
                ("dollars", used.cost_usd, self.caps.cost_usd),
                ("search calls", search + pending, self.caps.search_calls if self.phase == "search" else None),
            ):
                if cap is not None and value >= cap:
                    raise BudgetExceeded(f"the cap of {cap:g} {what} is reached", what=what)

    def add(self, spent: Usage) -> None:
        """Counts what another meter counted, under the phase of now."""
        usage = self.of(self.phase)
        self.on_call(spent.calls + spent.cached)
        with self._lock:
            for name, value in vars(spent).items():
                setattr(usage, name, getattr(usage, name) + value)
            self._asked[self.phase] = self._asked.get(self.phase, 0) + spent.calls + spent.cached

    def settle(self, *, prompt_tokens: int | None, completion_tokens: int | None, cost_usd: float | None, failed: bool) -> None:
        """Called once after each reserved call, whether it answered or failed."""
        usage = self.of(self.phase)
        self.on_call(1)
        with self._lock:
            self._in_flight -= 1
            usage.calls += 1
            usage.errors += failed
            usage.prompt_tokens += prompt_tokens or 0
            usage.completion_tokens += completion_tokens or 0
            if cost_usd is None:
                usage.unpriced += not failed
            else:
                usage.cost_usd += cost_usd

    def hit(self) -> None:
        """Called for each answer from the response cache."""
        usage = self.of(self.phase)
        self.on_call(1)
        with self._lock:
            usage.cached += 1
            self._asked[self.phase] = self._asked.get(self.phase, 0) + 1
