"""The part of a job's session that a host of a cluster shares with the driver: the meter, and the records.

A call on a host is counted by the driver's meter before it is sent, so a cap holds for all hosts together, and the
ledger of the job knows every call. Host and driver exchange messages in order: `Exchange` waits on the host for what it
has to say, and brings it the answers to what it had asked before. It dies with either of them.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from assay.evaluation.session import Session
from assay.models.ledger import Sent
from assay.models.limits import innermost, leave_if_abandoned
from assay.models.meter import CHECK_S, Caps, Flight, Meter, Reservation, nested
from assay.models.unrecorded import Unrecorded
from assay.traces import Rollout, Transition

# -- Messages of a host, about calls by their number.


@dataclass(frozen=True)
class Asked:
    """A call would like to be sent. `inside`: numbers of the calls that it is a part of."""

    number: int
    key: str
    owner: str
    reserved: Reservation
    inside: tuple[int, ...]


@dataclass(frozen=True)
class Settled:
    """A call was answered or failed; the fields of `Meter.settle`."""

    number: int
    outcome: Mapping[str, Any]


@dataclass(frozen=True)
class Landed:
    """A call is no longer in flight."""

    number: int


@dataclass(frozen=True)
class GivenUp:
    """The run of a call has exceeded its time limit: nobody waits for its end."""

    number: int


@dataclass(frozen=True)
class Replayed:
    """A call was answered by the host's response cache."""

    key: str
    owner: str


@dataclass(frozen=True)
class Recorded:
    """News since the last message: rollouts that have ended, transitions by the id of their rollout, unrecorded calls,
    and files that the program asked for in vain. `at`: time of the host's clock."""

    rollouts: list[Rollout]
    transitions: list[tuple[str, Transition]]
    unrecorded: Unrecorded
    asked_in_vain: Sequence[str] = ()
    at: float = field(default_factory=time.time)


Message = Asked | Settled | Landed | GivenUp | Replayed | Recorded
Answers = Mapping[int, Sent | BaseException | None]  # by the number of what was asked; None: to be asked again


# -- On the host.


class Mail:
    """Messages of a host that wait for the driver, and answers that calls wait for. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()
        self._answers: dict[int, Sent | BaseException | None] = {}
        self._unwanted: set[int] = set()  # numbers of calls that nobody waits for any more
        self._put = self._delivered = self._taken = 0  # numbers of messages

    def put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._put += 1
            self._changed.notify_all()

    def exchange(self, answers: Answers, timeout_s: float) -> list[Message]:
        """Takes the driver's answers to the messages of the last exchange, and returns the next ones."""
        with self._changed:
            self._answers.update(answers)
            self._drop_unwanted()
            self._delivered = self._taken
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._messages), timeout_s)
            messages, self._messages = list(self._messages), deque()
            self._taken = self._put
            return messages

    def ask(self, message: Asked) -> Sent | BaseException | None:
        """The driver's answer. Raises `Abandoned` in a call that nobody waits for any more."""
        self.put(message)
        with self._changed:
            try:
                while message.number not in self._answers:
                    self._changed.wait(CHECK_S)
                    leave_if_abandoned()
            except BaseException:
                self._unwanted.add(message.number)
                self._drop_unwanted()
                raise
            return self._answers.pop(message.number)

    def _drop_unwanted(self) -> None:
        for number in self._unwanted & self._answers.keys():
            self._unwanted.discard(number)
            if isinstance(self._answers.pop(number), Sent):  # the call is not sent
                self.put(Landed(number))

    def delivered(self) -> None:
        """Waits until the driver has dealt with all messages so far."""
        with self._changed:
            put = self._put
            self._changed.wait_for(lambda: self._delivered >= put)


class HostMeter(Meter):
    """The meter of a session on a host: the driver's decides.

    Args:
        caps: of the job; whether there are any decides what a call reserves.
    """

    def __init__(self, caps: Caps, mail: Mail) -> None:
        super().__init__(caps)
        self.mail = mail
        self.owner: Callable[[], str] = str
        self.after_call: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._number_of: dict[Flight, int] = {}

    @contextmanager
    def sending(self, key: str = "", reserved: Reservation | None = None) -> Iterator[Sent]:
        flight, number = Flight(reserved or Reservation(), innermost()), next(self._numbers)
        inside = tuple(self._number_of[outer] for outer in nested.get() if outer in self._number_of)
        asked = Asked(number, key, self.owner(), flight.reserved, inside)
        while not isinstance(answer := self.mail.ask(asked), Sent):
            if answer is not None:
                raise answer
            time.sleep(CHECK_S)
            leave_if_abandoned()
        with self._lock:
            self._flights.append(flight)
            self._number_of[flight] = number
        token = nested.set((*nested.get(), flight))
        try:
            yield answer
        finally:
            nested.reset(token)
            with self._lock:
                self._flights.remove(flight)
                del self._number_of[flight]
            self.after_call()
            self.mail.put(Landed(number))

    def settle(self, sent: Sent, **outcome: Any) -> None:
        with self._lock:
            self.longest_answer = max(self.longest_answer, outcome["completion_tokens"] or 0)
            number = self._number_of[nested.get()[-1]]
        self.mail.put(Settled(number, outcome))

    def replayed(self, key: str, *, owner: str | None = None) -> Sent | None:
        self.mail.put(Replayed(key, self.owner() if owner is None else owner))
        return None

    def check(self, *, counted: bool = False, failed: bool = False, reserved: Reservation | None = None) -> None:
        """The driver checks each call."""

    def give_up(self) -> None:
        """Tells the driver which calls it need not wait for."""
        with self._lock:
            overdue = [flight for flight in self._number_of if flight.overdue and not flight.given_up]
            for flight in overdue:
                flight.given_up = True
                self.mail.put(GivenUp(self._number_of[flight]))


@dataclass
class Outbox:
    """Takes the place of the store on a host without one: holds the records until they are sent."""

    rollouts: dict[str, Rollout] = field(default_factory=dict)
    transitions: dict[tuple[str, int], tuple[str, Transition]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put_rollout(self, rollout: Rollout, *, interim: bool = False) -> None:
        with self._lock:
            self.rollouts[rollout.id] = rollout

    def put_transition(self, rollout_id: str, transition: Transition) -> None:
        with self._lock:
            self.transitions[rollout_id, transition.t] = (rollout_id, transition)

    def emptied(self, *, loose: bool = False) -> tuple[list[Rollout], list[tuple[str, Transition]]]:
        """Takes out the rollouts that have ended, with their transitions; those that still change stay.

        Args:
            loose: only transitions whose rollout was taken out before.
        """
        with self._lock:
            ended = [name for name, rollout in self.rollouts.items() if rollout.status != "running" and not loose]
            rollouts = [self.rollouts.pop(name) for name in ended]
            sent = [key for key in self.transitions if key[0] not in self.rollouts]
            return rollouts, [self.transitions.pop(key) for key in sent]


# -- On the driver.


class HostGone(Exception):
    """A host's process has ended, or its node."""


class Exchange:
    """Deals with the messages of one host, in a thread of its own.

    Args:
        exchange: brings answers to the host and returns its next messages; raises `HostGone` once the host is gone.
        check: is called with records before they are stored.
    """

    def __init__(
        self,
        exchange: Callable[[Answers], list[Message]],
        session: Session,
        *,
        check: Callable[[Recorded], None] = lambda recorded: None,
    ) -> None:
        self._exchange, self.session, self._check = exchange, session, check
        self._flights: dict[int, tuple[Flight, Sent]] = {}
        self._closed = threading.Event()
        self._behind = float("inf")  # seconds of the host's clock; the message that took least time tells them best
        self.fault: BaseException | None = None  # ends the evaluation
        self._thread = threading.Thread(target=self._work, name="assay-host", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float, *, lost: bool = False) -> None:
        """Waits for the messages so far. `lost`: the host has died, and calls of it may have no row."""
        self.session.recorder.may_lack_rows |= lost
        self._closed.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        answers: Answers = {}
        while not self._closed.is_set():
            try:
                answers = self._answered(self._exchange(answers))
            except HostGone:  # the executor finds it out by itself
                break
            except BaseException as error:  # such as a store that takes no rows; the calls of the host wait for ever
                self.fault = error
                break
        self._lose()

    def _answered(self, messages: list[Message]) -> Answers:
        meter, answers = self.session.meter, dict[int, Sent | BaseException | None]()
        for message in messages:
            match message:
                case Asked():
                    answers[message.number] = self._begun(message)
                case Settled(number, outcome):
                    meter.settle(self._flights[number][1], **outcome)
                case Landed(number):
                    meter.ended(self._flights.pop(number)[0])
                case GivenUp(number):
                    self._flights[number][0].given_up = True
                case Replayed(key, owner):
                    meter.replayed(key, owner=owner)
                case Recorded():
                    self._record(message)
        return answers

    def _begun(self, asked: Asked) -> Sent | BaseException | None:
        meter, flight, sent = self.session.meter, Flight(asked.reserved), None
        inside = [self._flights[number][0] for number in asked.inside if number in self._flights]
        try:
            sent = meter.begun(flight, asked.key, inside=inside, owner=asked.owner)
            if sent is not None:
                meter.await_count(sent)
        except BaseException as error:  # a cap, a cancelled run: raised in the host's call
            if sent is not None:
                meter.ended(flight)
            return error
        if sent is not None:
            self._flights[asked.number] = (flight, sent)
        return sent

    def _record(self, recorded: Recorded) -> None:
        self._check(recorded)
        self._behind = min(self._behind, self.session.recorder.by_store(time.time()) - recorded.at)
        for rollout in recorded.rollouts:
            rollout.started_at += self._behind
            rollout.ended_at = None if rollout.ended_at is None else rollout.ended_at + self._behind
        for _, transition in recorded.transitions:
            transition.started_at += self._behind
        self.session.recorder.take_in(recorded.rollouts, recorded.transitions, unrecorded=recorded.unrecorded)

    def _lose(self) -> None:
        """The host says nothing any more: its calls in flight have ended, and its calls may have no row."""
        self.session.recorder.may_lack_rows |= not self._closed.is_set() or bool(self._flights)
        for flight, _ in self._flights.values():
            self.session.meter.lose(flight)
        self._flights = {}
