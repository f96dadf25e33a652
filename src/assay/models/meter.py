"""Counts calls, tokens and dollars by phase, and stops a run at its caps.

A call is counted before it is sent, and what it may cost at most is reserved. A cap on calls is therefore never
exceeded, whether they are sent again after a kill or not; a cap on tokens or dollars is exceeded by what calls in
flight cost beyond their reservation at most. Where a call does not fit, the calls in flight are waited for first: they
may cost less than was reserved, and their answers are recorded before the run stops. Answers from the response cache
cost nothing and are counted separately. With a ledger the counts survive a kill.
"""

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.models.ledger import Ledger, Sent
from assay.models.limits import LimitedCall, innermost, is_overdue, leave_if_abandoned
from assay.support.numbers import counted


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Upper limits; None is not a limit. `search_calls` limits only the phase named `search`."""

    calls: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    search_calls: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return not (self.calls is None and self.tokens is None and self.cost_usd is None and self.search_calls is None)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value >= 0:  # also refuses NaN
                raise ConfigError(f"cap {name}={value!r} must be >= 0, or None for no cap")


@dataclass
class Usage:
    """Amounts spent.

    `calls` are distinct calls. A call that is sent again because its process was killed counts as `repeated`: its price
    is added to `cost_usd`, but its tokens are not counted twice. `unpriced` calls have no known price, and are missing
    from `cost_usd`.
    """

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

    def add(self, other: "Usage") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def known_cost_usd(self) -> float | None:
        """`cost_usd`; None if the price of any call is unknown, because the sum is then unknown too."""
        return None if self.unpriced else self.cost_usd


@dataclass(frozen=True)
class Reservation:
    """What is reserved for a call before it is sent.

    Attributes:
        exact: the request limits its answer (`max_tokens`). Otherwise the amounts are an estimate.
        least_tokens: tokens of the prompt's texts, which the call takes in any case.
        least_cost_usd: their price, or the fixed price of a call.
    """

    tokens: int = 0
    cost_usd: float = 0.0
    exact: bool = False
    least_tokens: int = 0
    least_cost_usd: float = 0.0


@dataclass(eq=False)
class Flight:
    """A call that was sent and is not recorded yet."""

    reserved: Reservation
    run: LimitedCall | None = None  # limited call that it belongs to
    given_up: bool = False  # by another process, which made it

    @property
    def overdue(self) -> bool:
        """Whether its end is not waited for: its run exceeded its time limit."""
        return self.given_up or is_overdue(self.run)


class SharedCaps(Protocol):
    """Caps that several processes spend from, each of which has a `Meter`."""

    def reserve(self, need: Mapping[str, float], caps: Caps) -> Mapping[str, float]:
        """Reserve amounts for this process, if they fit under the caps beside what the others have reserved.

        Args:
            need: field of `Caps` -> all that this process has spent, keeps for later phases, and may spend next.
        Returns:
            Field of `Caps` -> what the other processes have reserved. Where `need` does not fit beside it, nothing new
            is reserved.
        """


ONCE_BACK = "resume the run once it is back"  # ends the reason of a run that stopped because its database was away
NO_PRICE = "cannot be enforced"  # is in the reason of a run that calls without a known price stopped
_ROUNDING = 1e-9  # share of a cap; sums of prices are not exact
# Refused connections in a row, and seconds since the first of them, after which a server is taken as gone: one that is
# restarted is waited for, by DSPy's retries.
REFUSED, GONE_S = 16, 15.0
UNCOUNTED_S = 90.0  # that calls wait for a database that does not count them; then the run stops
_UNWATCHED_S = 30.0  # longer than a look takes at a database that does not answer
CHECK_S = 0.1  # interval at which a waiting call checks whether it was cancelled, and the meters that share its caps
nested: ContextVar[tuple[Flight, ...]] = ContextVar("assay_flights", default=())  # calls that this code runs inside


def ignore(count: int) -> None:
    """Default of `Meter.on_call`."""


class Meter:
    """Thread-safe counter for one run. The caller names the phases (`search`, `gate`, `test`).

    Args:
        spent: amounts that earlier processes of the run spent, by phase.
        ledger: records each call before it is sent; None: the counts are lost with the process.
    """

    def __init__(
        self, caps: Caps | None = None, spent: Mapping[str, Usage] | None = None, *, ledger: Ledger | None = None
    ) -> None:
        self.caps, self.ledger = caps or Caps(), ledger
        self.phases: dict[str, Usage] = dict(spent or {})
        self.phase = "search"
        self._lock = threading.RLock()
        self._landed = threading.Condition(self._lock)  # a call in flight was recorded
        self._flights: list[Flight] = []
        self._cancelled = False
        self.longest_answer = 0  # completion tokens
        self._again = 0 if ledger is None else ledger.again  # calls sent again after a kill, which count against caps
        self._held = Reservation()  # for calls of processes that have died: what they cost is not known
        self._made_calls: dict[str, int] = {}
        self._later_phases: dict[str, Usage] = {}
        self._aside = Usage()
        self._sharing: list[Meter] = []
        self.shared: SharedCaps | None = None  # with other processes
        self.unrecorded: Callable[[], int] = int  # number of unrecorded calls, which count as `calls` too; 0
        # why no further call can be made; ends the run as a cap does
        self.obstacle: Callable[[], str | None] = lambda: None
        # whether other machines that run the job know of each call before it is sent; with a cap, calls wait until then
        self.is_counting: Callable[[], bool] = lambda: True
        # since when calls wait for that, and when one last looked
        self._uncounted: tuple[float, float] | None = None
        self.on_call: Callable[[int], None] = ignore  # called for each call, answered by a model or by the cache
        self.ends_without_server = False  # whether a run ends once connections are refused for a while
        self._refused, self._refused_since = 0, 0.0

    def __deepcopy__(self, memo: object) -> "Meter":
        return self

    @property
    def usage(self) -> Usage:
        """Sum over all phases."""
        total = Usage()
        with self._lock:
            for part in self.phases.values():
                total.add(part)
        return total

    def _used(self) -> Usage:
        """Amounts that count against the caps, but for `_sent_again`."""
        total = Usage()
        for meter in (self, *self._sharing):
            total.add(meter.usage)
            total.calls += meter.unrecorded()
        return total

    @property
    def _sent_again(self) -> int:
        """Calls sent again after a kill, which count against a cap on calls."""
        return sum(meter._again for meter in (self, *self._sharing))

    def of(self, phase: str) -> Usage:
        """Usage of one phase (a live object)."""
        with self._lock:
            return self.phases.setdefault(phase, Usage())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, calls are counted under `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def share_caps_with(self, other: "Meter") -> None:
        """Count the usage of another meter against the caps of this one too: for runs that share one cap."""
        self._sharing.append(other)

    def hold(self, **phases: Usage) -> None:
        """Reserve part of the caps for later phases, in their order; replaces earlier reservations."""
        self._later_phases = phases

    def _reserved(self, *, spent: bool = False) -> Usage:
        """Amounts that the current phase must leave to later ones.

        Args:
            spent: subtract what those phases have already spent, in an earlier process of this run.
        """
        names, total = list(self._later_phases), Usage(**vars(self._aside))
        for name in names[names.index(self.phase) + 1 :] if self.phase in names else names:
            part, done = self._later_phases[name], self.of(name) if spent else Usage()
            total.calls += max(0, part.calls - done.calls)
            total.prompt_tokens += max(0, part.tokens - done.tokens)
            total.cost_usd += max(0.0, part.cost_usd - done.cost_usd)
        return total

    @contextmanager
    def aside(self, part: Usage) -> Iterator[None]:
        """Inside, this part of the caps is reserved for what follows in the same phase."""
        before, self._aside = self._aside, part
        try:
            yield
        finally:
            self._aside = before

    def _later(self) -> str:
        names = list(self._later_phases)
        later = names[names.index(self.phase) + 1 :] if self.phase in names else names
        parts = [*(["the comparison on val"] if self._aside.calls else []), *later]
        return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])

    def cancel(self) -> None:
        """Make every later model call raise `Cancelled`, in all threads."""
        self._cancelled = True

    def search_calls_left(self) -> float:
        """Number of calls that the search may still make, cached ones included; infinite without a cap."""
        remaining = float("inf")
        if self.caps.search_calls is not None:
            remaining = min(remaining, self.caps.search_calls - self._aside.calls - self.calls_of("search"))
        if self.caps.calls is not None:
            # preflight does not count: its calls are made again by the search
            calls = sum(count for phase, count in self._made_calls.items() if phase != "preflight")
            remaining = min(remaining, self.caps.calls - self._reserved().calls - calls - self.unrecorded())
        return remaining

    def calls_of(self, phase: str) -> int:
        """Number of calls of a phase in this process, answered by the model or by the cache.

        A search decides by this number, not by its cost, so that a replay takes the same decisions.
        """
        return self._made_calls.get(phase, 0)

    @contextmanager
    def sending(self, key: str = "", reserved: Reservation | None = None) -> Iterator[Sent]:
        """The call is in flight inside. Pass the value to `settle`, and record the answer, before leaving.

        Args:
            key: as in `reserve`.
            reserved: what the call may cost.
        Raises:
            BudgetExceeded: the call would exceed a cap; no other call is in flight any more.
            ConfigError: the call alone would exceed a cap, and nothing was spent.
            Cancelled: the run was cancelled.
        """
        flight = Flight(reserved or Reservation(), innermost())
        with self._landed:
            while (sent := self.begun(flight, key, inside=nested.get())) is None:
                leave_if_abandoned()
                self._landed.wait(CHECK_S)
        token = nested.set((*nested.get(), flight))
        try:
            self.await_count(sent)
            yield sent
        finally:
            nested.reset(token)
            self.ended(flight)

    def begun(
        self, flight: Flight, key: str, *, inside: Collection[Flight] = (), owner: str | None = None
    ) -> Sent | None:
        """The reservation of a call, which is in flight from now on; None: it has to wait for others, which may cost
        less than was reserved for them.

        Args:
            inside: calls whose end cannot be waited for, because this one is a part of them.
            owner: id of its rollout, for a call that another process makes.
        Raises: as `sending`.
        """
        with self._lock:
            if not self._counts():
                return None
            try:
                sent = self.reserve(key, flight.reserved, owner=owner)
            except BudgetExceeded:
                if any(other not in inside and not other.overdue for other in self._in_flight()):
                    return None
                raise
            self._flights.append(flight)
            return sent

    def await_count(self, sent: Sent) -> None:
        """Returns once other machines know of a call that has begun, or need not; it may be sent then.

        A call that gives up has failed: its next attempt is no repetition of one that may have been answered.

        Raises: as `_counts`.
        """
        try:
            with self._landed:
                while not self._counts():
                    leave_if_abandoned()
                    self._landed.wait(CHECK_S)
        except BaseException:
            self.settle(sent, prompt_tokens=None, completion_tokens=None, cost_usd=None, failed=True)
            raise

    def _counts(self) -> bool:
        """Whether other machines know of each call so far, or need not.

        Raises:
            BudgetExceeded: no further call can be made, or the database has been away for too long.
            Cancelled: the run was cancelled.
        """
        self._check_can_go_on()
        if not self.caps.any or self.is_counting():
            self._uncounted = None
            return True
        now = time.monotonic()
        since, last = (now, now) if self._uncounted is None else self._uncounted
        since = now if now - last > _UNWATCHED_S else since  # no call has waited meanwhile
        self._uncounted = since, now
        if now - since > UNCOUNTED_S:
            raise BudgetExceeded(
                f"the database of the store has not taken the count of a call for {UNCOUNTED_S:g} s: {ONCE_BACK}",
                what="rows",
            )
        return False

    def ended(self, flight: Flight) -> None:
        """A call is no longer in flight."""
        with self._landed:
            self._flights.remove(flight)
            self._landed.notify_all()

    def lose(self, flight: Flight) -> None:
        """A call is no longer in flight, because its process has died. What was reserved stays reserved."""
        held, reserved = self._held, flight.reserved
        with self._lock:
            self._held = Reservation(held.tokens + reserved.tokens, held.cost_usd + reserved.cost_usd)
        self.ended(flight)

    def _in_flight(self) -> list[Flight]:
        return [flight for meter in (self, *self._sharing) for flight in meter._flights.copy()]

    def land(self, timeout_s: float) -> int:
        """Wait until no call is in flight; return the number of those that are waited for in vain after `timeout_s`.

        A call whose run exceeded its time limit is not waited for.
        """
        end = time.monotonic() + timeout_s
        with self._landed:
            while awaited := sum(not flight.overdue for flight in self._flights):
                if (remaining := end - time.monotonic()) <= 0:
                    return awaited
                self._landed.wait(min(remaining, CHECK_S))
        return 0

    @property
    def reserves(self) -> bool:
        """Whether the cost of a call is reserved before it is sent."""
        return self.caps.tokens is not None or self.caps.cost_usd is not None

    @property
    def in_flight(self) -> int:
        """Number of calls that were sent and are not recorded yet."""
        return len(self._flights)

    def reserve(self, key: str = "", reserved: Reservation | None = None, *, owner: str | None = None) -> Sent:
        """Count a call before it is sent; pass the result to `settle`.

        Args:
            key: key of the request in the response cache; without one, no earlier process can have sent the call.
            reserved: what the call may cost.
            owner: id of its rollout, for a call that another process makes.
        Raises:
            BudgetExceeded: the call would exceed a cap.
            ConfigError: the call alone would exceed a cap, and nothing was spent.
            Cancelled: the run was cancelled.
        """
        with self._lock:  # one lock for check and count, or two threads would both take the last call
            before = self.ledger.known(key) if self.ledger is not None and key else None
            failed = before is not None and before.has_failed
            self.check(counted=before is not None, failed=failed, reserved=reserved)
            sent = (
                self.ledger.send(key or uuid.uuid4().hex, self.phase, owner=owner)
                if self.ledger is not None
                else Sent(b"", 0, "", self.phase)
            )
            usage = self.of(sent.phase)
            if before is None:
                usage.calls += 1
            else:
                usage.repeated += 1
                self._again += not failed
            self._made_calls[self.phase] = self._made_calls.get(self.phase, 0) + 1
        return sent

    def check(self, *, counted: bool = False, failed: bool = False, reserved: Reservation | None = None) -> None:
        """Raise what `reserve` would raise, without reserving: for calls that are metered elsewhere and added later.

        Args:
            counted: the call is already in `calls`, because an earlier process of this run sent it. A cap on calls
                limits how often it is sent, one on those of the search how many there are.
            failed: it is counted and has failed: no cap on calls limits how often it is tried.
            reserved: what the call may cost. An estimate (not `exact`) stops no call that is alone in flight. The first
                call is stopped if what it takes at least does not fit.
        """
        self._check_can_go_on()
        if not self.caps.any and self.shared is None:
            return
        call = reserved or Reservation()
        with self._lock:
            used, flights = self._used(), self._in_flight()
            search = self.of("search").calls
            if self.caps.cost_usd is not None and used.unpriced:
                raise BudgetExceeded(
                    f"the cap of ${self.caps.cost_usd:g} {NO_PRICE}: {used.unpriced} calls had no known price. "
                    "Cap calls or tokens instead",
                    what="dollars",
                )
            later = self._reserved(spent=True)
            searches = None if counted or self.phase != "search" else self.caps.search_calls
            amounts = call if flights or call.exact else Reservation()
            if not flights and not call.exact and not used.tokens and not used.cost_usd:
                amounts = Reservation(call.least_tokens, call.least_cost_usd)
            held = [meter._held for meter in (self, *self._sharing)] + [flight.reserved for flight in flights]
            tokens, usd = sum(part.tokens for part in held), sum(part.cost_usd for part in held)
            spent: dict[str, float] = {
                "calls": used.calls + self._sent_again, "search_calls": search, "tokens": used.tokens,
                "cost_usd": used.cost_usd,
            }  # fmt: skip
            if self.shared is not None:
                need = {
                    "calls": spent["calls"] + later.calls + (not failed),
                    "search_calls": search + (self._aside.calls + (not counted) if self.phase == "search" else 0),
                    "tokens": used.tokens + later.tokens + tokens + amounts.tokens,
                    "cost_usd": used.cost_usd + later.cost_usd + usd + amounts.cost_usd,
                }
                elsewhere = self.shared.reserve(need, self.caps)
                spent = {name: value + elsewhere[name] for name, value in spent.items()}
            self._fit("calls", spent["calls"], None if failed else self.caps.calls, later.calls, again=self._sent_again)
            self._fit("search calls", spent["search_calls"], searches, self._aside.calls)
            self._fit("tokens", spent["tokens"], self.caps.tokens, later.tokens, tokens, amounts.tokens)
            self._fit("dollars", spent["cost_usd"], self.caps.cost_usd, later.cost_usd, usd, amounts.cost_usd)

    def _check_can_go_on(self) -> None:
        if self._cancelled:
            raise Cancelled("the run was cancelled")
        if (reason := self.obstacle()) is not None:
            raise BudgetExceeded(reason, what="rows")

    def _fit(
        self,
        unit: str,
        value: float,
        cap: float | None,
        kept: float,
        held: float = 0,
        amount: float = 0,
        again: int = 0,
    ) -> None:
        """Raise `BudgetExceeded` unless the next call fits under a cap.

        Args:
            value: spent so far.
            kept: part of the cap that is reserved for later phases.
            held: reserved for the calls in flight.
            amount: reserved for the next call.
            again: part of `value` that was sent again after a kill.
        """
        if cap is None or (value + held < cap - kept and value + held + amount <= cap - kept + _ROUNDING * cap):
            return
        if amount > cap and not value and not held:
            raise ConfigError(
                f"`max_{'cost_usd' if unit == 'dollars' else unit}={cap:g}` is less than one call may take: "
                f"{counted(amount, unit)} for its prompt, and for its answer if the request limits its length. "
                "Raise the cap"
            )
        if kept and value < cap:  # the search's part of the cap is spent, the rest is not
            raise BudgetExceeded(
                f"{value:g} of {counted(cap, unit)} are spent; the rest is reserved for {self._later()}",
                what="search calls",
            )
        if value < cap:
            raise BudgetExceeded(
                f"the cap of {counted(cap, unit)} is reached: {value:g} are spent, and the next call may take "
                f"{amount:g}",
                what=unit,
            )
        repeated = f": {counted(again, 'calls')} were sent again" if again else ""
        raise BudgetExceeded(f"the cap of {counted(cap, unit)} is reached{repeated}", what=unit)

    def add(self, spent: Usage) -> None:
        """Add the usage of another meter to the current phase."""
        usage = self.of(self.phase)
        self.on_call(spent.calls + spent.cached)
        with self._lock:
            usage.add(spent)
            self._made_calls[self.phase] = self._made_calls.get(self.phase, 0) + spent.calls + spent.cached

    def settle(
        self,
        sent: Sent,
        *,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        cost_usd: float | None,
        failed: bool,
    ) -> None:
        """Record the outcome of a reserved call, answered or failed; called once per call."""
        usage = self.of(sent.phase)
        self.on_call(1)
        with self._lock:
            before = replace(sent)
            sent.settle(
                prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost_usd=cost_usd, failed=failed
            )
            usage.errors += sent.failed - before.failed
            usage.prompt_tokens += sent.prompt_tokens - before.prompt_tokens
            usage.completion_tokens += sent.completion_tokens - before.completion_tokens
            usage.cost_usd += sent.cost_usd - before.cost_usd
            usage.unpriced += sent.unpriced - before.unpriced
            self.longest_answer = max(self.longest_answer, completion_tokens or 0)
        if self.ledger is not None and sent.key:
            self.ledger.settled(sent, before)

    def connected(self, answered: bool) -> None:
        """Record whether a call was answered, or refused a connection."""
        with self._lock:
            if not answered and not self._refused:
                self._refused_since = time.monotonic()
            self._refused = 0 if answered else self._refused + 1

    @property
    def server_gone(self) -> bool:
        """Whether all latest calls were refused a connection, so many and for so long that the run is to end."""
        lasts = time.monotonic() - self._refused_since >= GONE_S
        return self.ends_without_server and self._refused >= REFUSED and lasts

    @property
    def answered(self) -> int:
        """How often calls were sent, by all processes of the run, and are not in flight."""
        usage = self.usage
        return usage.calls + usage.repeated - self.in_flight

    def replayed(self, key: str, *, owner: str | None = None) -> Sent | None:
        """Record an answer from the response cache; return the call of this rollout that it replays.

        Args:
            owner: id of the rollout, where another process has the cache: it replays no call.

        A replayed call is already counted and paid for. None if the answer is to another rollout's request: it costs
        nothing and is counted as `cached`.
        """
        claimed = self.ledger.claim(key) if self.ledger is not None and owner is None else None
        new = claimed is None and (self.ledger is None or self.ledger.hit(key, self.phase, owner=owner))
        usage = self.of(self.phase)
        self.on_call(1)
        with self._lock:
            usage.cached += new
            self._made_calls[self.phase] = self._made_calls.get(self.phase, 0) + 1
        return claimed


def spent_before(ledger: Ledger) -> dict[str, Usage]:
    """Amounts that a run has spent so far by its ledger, by phase."""
    phases: dict[str, Usage] = {}
    for phase, values in ledger.totals():
        phases.setdefault(phase, Usage()).add(Usage(**values))  # type: ignore[arg-type]  # counts are integers
    return phases
