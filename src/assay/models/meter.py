"""Counts calls, tokens and dollars by phase, and stops a run at its caps.

A call is counted before it is made, so a cap on calls is never passed, and a cap on tokens or dollars only by the calls then in flight.
Answers from the response cache cost nothing and are counted apart. With a ledger the counts outlive a kill.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.models.ledger import Ledger, Sent

__all__ = ["Caps", "Meter", "Usage", "spent_before"]


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Upper limits; None is no limit. `search_calls` counts only the phase named `search`."""

    calls: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    search_calls: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything is capped at all."""
        return not (self.calls is None and self.tokens is None and self.cost_usd is None and self.search_calls is None)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value >= 0:  # NaN fails this too
                raise ConfigError(f"cap {name}={value!r} must be 0 or more")


@dataclass
class Usage:
    """What was spent. `calls` are distinct: one that is sent again because the process that had sent it was killed is `repeated`, and its
    price is part of `cost_usd`, its tokens are not counted twice. `unpriced` calls have no known price and are missing from `cost_usd`."""

    calls: int = 0
    cached: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    unpriced: int = 0
    repeated: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def known_cost_usd(self) -> float | None:
        """`cost_usd`; None where the price of a call is not known, as the sum is then not known either."""
        return None if self.unpriced else self.cost_usd


def ignore(count: int) -> None:
    """Hears of a call and does nothing."""


def none_unrecorded() -> int:
    """Where nothing counts the calls that go past the recorder."""
    return 0


class Meter:
    """Thread-safe. One per run; phases are whatever the caller names (`search`, `gate`, `test`).

    Args:
        spent: what earlier processes of the run spent, by phase.
        ledger: where each call is written before it is made; None: what is spent is forgotten with the process.
    """

    def __init__(self, caps: Caps | None = None, spent: Mapping[str, Usage] | None = None, *, ledger: Ledger | None = None) -> None:
        self.caps, self.ledger = caps or Caps(), ledger
        self.phases: dict[str, Usage] = dict(spent or {})
        self.phase = "search"
        self._lock = threading.RLock()
        self._cancelled = False
        self._asked: dict[str, int] = {}
        self._held: dict[str, Usage] = {}
        self._aside = Usage()
        self._beside: list[Meter] = []
        self.unrecorded: Callable[[], int] = none_unrecorded  # calls that went past the recorder: they count against `calls` too
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

    def _used(self) -> Usage:
        """What counts against the caps."""
        total = self.usage
        for other in self._beside:
            for name, value in vars(other.usage).items():
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

    def beside(self, other: "Meter") -> None:
        """What another meter spends counts against this one's caps as well: for runs that take turns and have one cap."""
        self._beside.append(other)

    def hold(self, **phases: Usage) -> None:
        """Keeps a part of the caps for phases that come later, in their order; it replaces what was held before."""
        self._held = phases

    def _kept(self, *, spent: bool = False) -> Usage:
        """What the phase of now must leave to those after it.

        Args:
            spent: without what they have spent of it: in an earlier process of this run, before it was resumed.
        """
        names, kept = list(self._held), Usage(**vars(self._aside))
        for name in names[names.index(self.phase) + 1 :] if self.phase in names else names:
            held, done = self._held[name], self.of(name) if spent else Usage()
            kept.calls += max(0, held.calls - done.calls)
            kept.prompt_tokens += max(0, held.tokens - done.tokens)
            kept.cost_usd += max(0.0, held.cost_usd - done.cost_usd)
        return kept

    @contextmanager
    def aside(self, part: Usage) -> Iterator[None]:
        """Inside, this part of the caps is kept for what comes right after, in the same phase."""
        before, self._aside = self._aside, part
        try:
            yield
        finally:
            self._aside = before

    def _later(self) -> str:
        names = list(self._held)
        later = names[names.index(self.phase) + 1 :] if self.phase in names else names
        parts = [*(["the comparison on val"] if self._aside.calls else []), *later]
        return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])

    def cancel(self) -> None:
        """Every later call to a model raises `Cancelled`, in whichever thread."""
        self._cancelled = True

    def search_calls_left(self) -> float:
        """Calls that the search may still make, cached ones included; infinite without a cap."""
        left = float("inf")
        if self.caps.search_calls is not None:
            left = min(left, self.caps.search_calls - self._aside.calls - self.asked("search"))
        if self.caps.calls is not None:
            asked = sum(count for phase, count in self._asked.items() if phase != "preflight")  # it asks what is asked again
            left = min(left, self.caps.calls - self._kept().calls - asked - self.unrecorded())
        return left

    def asked(self, phase: str) -> int:
        """Calls that a phase made in this process, answered by the model or by the cache.

        A search decides by this, not by what it was billed: so it takes the same turns when it is replayed.
        """
        return self._asked.get(phase, 0)

    def reserve(self, key: str = "") -> Sent:
        """Called before each call to a model, which it counts; what it returns is handed to `settle`.

        Args:
            key: of the request in the response cache; a call without one is none that an earlier process has sent.
        Raises:
            BudgetExceeded: the call would pass a cap.
            Cancelled: the run was told to stop.
        """
        with self._lock:  # from reading what was used to counting the call, or two threads would both take the last one
            before = self.ledger.known(key) if self.ledger is not None and key else None
            self.check(counted=before is not None)
            sent = self.ledger.send(key or uuid.uuid4().hex, self.phase) if self.ledger is not None else Sent(b"", 0, "", self.phase)
            usage = self.of(sent.phase)
            if before is None:
                usage.calls += 1
            else:
                usage.repeated += 1
            self._asked[self.phase] = self._asked.get(self.phase, 0) + 1
        return sent

    def check(self, *, counted: bool = False) -> None:
        """Raises what `reserve` would raise, and reserves nothing: for calls that are made and metered elsewhere, and then added.

        Args:
            counted: the call is among `calls` already, because an earlier process of this run sent it.
        """
        if self._cancelled:
            raise Cancelled("the run was stopped")
        if not self.caps.any:
            return
        with self._lock:
            used = self._used()
            search = self.of("search").calls if self.phase == "search" else 0
            if self.caps.cost_usd is not None and used.unpriced:
                raise BudgetExceeded(
                    f"the cap of ${self.caps.cost_usd:g} cannot be kept: {used.unpriced} calls had no known price. Cap calls or tokens instead",
                    what="dollars",
                )
            kept = self._kept(spent=True)
            for what, value, cap, later in (
                ("calls", used.calls + self.unrecorded(), None if counted else self.caps.calls, kept.calls),
                ("tokens", used.tokens, self.caps.tokens, kept.tokens),
                ("dollars", used.cost_usd, self.caps.cost_usd, kept.cost_usd),
                ("search calls", search, None if counted or self.phase != "search" else self.caps.search_calls, self._aside.calls),
            ):
                if cap is None or value < cap - later:
                    continue
                if later and value < cap:  # the search's part of the cap is spent, and not the whole of it
                    raise BudgetExceeded(f"{value:g} of {cap:g} {what} are spent; the rest is kept for {self._later()}", what="search calls")
                raise BudgetExceeded(f"the cap of {cap:g} {what} is reached", what=what)

    def add(self, spent: Usage, *, name: str = "") -> None:
        """Counts what another meter counted, under the phase of now.

        Args:
            name: of what was run elsewhere, for the ledger: what is added again under it was repeated.
        """
        new = self.ledger.add(name, self.phase, vars(spent)) if self.ledger is not None and name else True
        usage = self.of(self.phase)
        self.on_call(spent.calls + spent.cached)
        with self._lock:
            for field, value in vars(spent if new else Usage(repeated=spent.calls, cost_usd=spent.cost_usd)).items():
                setattr(usage, field, getattr(usage, field) + value)
            self._asked[self.phase] = self._asked.get(self.phase, 0) + spent.calls + spent.cached

    def settle(
        self, sent: Sent, *, prompt_tokens: int | None, completion_tokens: int | None, cost_usd: float | None, failed: bool
    ) -> None:  # fmt: skip
        """Called once after each reserved call, whether it answered or failed."""
        usage = self.of(sent.phase)
        self.on_call(1)
        with self._lock:
            was_failed, was_prompt, was_completion = sent.failed, sent.prompt_tokens, sent.completion_tokens
            was_cost, was_unpriced = sent.cost_usd, sent.unpriced
            sent.settle(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost_usd=cost_usd, failed=failed)
            usage.errors += sent.failed - was_failed
            usage.prompt_tokens += sent.prompt_tokens - was_prompt
            usage.completion_tokens += sent.completion_tokens - was_completion
            usage.cost_usd += sent.cost_usd - was_cost
            usage.unpriced += sent.unpriced - was_unpriced
        if self.ledger is not None and sent.key:
            self.ledger.settled(sent)

    def replayed(self, key: str) -> Sent | None:
        """Called for each answer from the response cache: the call of this rollout that it replays, which is counted and paid for already.
        None where it answers another rollout's request: it cost nothing, and is counted as `cached`."""
        claimed = self.ledger.claim(key) if self.ledger is not None else None
        new = claimed is None and (self.ledger is None or self.ledger.hit(key, self.phase))
        usage = self.of(self.phase)
        self.on_call(1)
        with self._lock:
            usage.cached += new
            self._asked[self.phase] = self._asked.get(self.phase, 0) + 1
        return claimed


def spent_before(ledger: Ledger) -> dict[str, Usage]:
    """What a run has spent so far by its ledger, by phase."""
    found: dict[str, Usage] = {}
    for phase, values in ledger.totals():
        usage = found.setdefault(phase, Usage())
        for name, value in values.items():
            setattr(usage, name, getattr(usage, name) + value)
    return found
