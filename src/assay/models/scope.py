"""Context of LM calls in a block of code: sample, output field that is read, collected prices. Imports no model."""

import hashlib
import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
current_sample: ContextVar[int | None] = ContextVar("assay_sample", default=None)
current_field: ContextVar[str | None] = ContextVar("assay_field", default=None)
current_prices: ContextVar[list[float] | None] = ContextVar("assay_prices", default=None)
current_answers: ContextVar[list[Callable[[], None]] | None] = ContextVar("assay_answers", default=None)
current_repeats: ContextVar["Repeats | None"] = ContextVar("assay_repeats", default=None)
loops_are_text: ContextVar[bool] = ContextVar("assay_loops", default=False)
waits_for_servers: ContextVar[bool] = ContextVar("assay_waits", default=True)


@contextmanager
def having(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Inside, a context variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def sample_scope(sample: int | None, task_id: str = "") -> AbstractContextManager[int | None]:
    """Inside, calls belong to the `sample`-th rollout of their task, which the response cache keeps apart.

    With a `task_id` also from those of other tasks: where tasks have equal prompts, as at the first step of an
    environment, their samples are independent.
    """
    if sample is not None and task_id:
        sample = int.from_bytes(hashlib.sha256(f"{sample}/{task_id}".encode("utf-8", "surrogatepass")).digest()[:6])
    return having(current_sample, sample)


class Repeats:
    """Numbers the equal calls of one rollout in the order in which they are sent, in all of its threads."""

    def __init__(self) -> None:
        self._sent = Counter[str]()
        self._unanswered = defaultdict[str, list[int]](list)
        self._lock = threading.Lock()

    def next(self, call: str) -> int:
        """0 for the first call, 1 for the first one that is equal to it. The lowest free number is next."""
        with self._lock:
            if unanswered := self._unanswered[call]:
                return heapq.heappop(unanswered)
            self._sent[call] += 1
            return self._sent[call] - 1

    def unanswered(self, call: str, number: int) -> None:
        """Frees the number of a call that failed: if it is sent again, it is the same call."""
        with self._lock:
            heapq.heappush(self._unanswered[call], number)


def repeats_numbered() -> AbstractContextManager[Repeats | None]:
    """Inside is one rollout: each of its equal calls is a sample of its own, which the response cache keeps apart."""
    return having(current_repeats, Repeats())


def looping_answers_as_text(value: bool = True) -> AbstractContextManager[bool]:
    """Inside, an answer that ends in a loop is a text with the finish reason `length`, as other servers return it.

    For calls that propose prompts. The call is recorded with the failure kind `loop` all the same.
    """
    return having(loops_are_text, value)


@contextmanager
def spending() -> Iterator[list[float]]:
    """Collect the price in dollars of every call made inside, in this thread or task, failed calls included."""
    prices: list[float] = []
    with having(current_prices, prices):
        yield prices


def alternatives_of(field: str) -> AbstractContextManager[str | None]:
    """Inside, only the token alternatives of this output field's value are kept, because no others are read."""
    return having(current_field, field)


def refusals_end_at_once() -> AbstractContextManager[bool]:
    """Inside, calls to an address where nothing listens are not retried: a check of a server should not wait."""
    return having(waits_for_servers, False)


@contextmanager
def without_answers_of(error: type[Exception]) -> Iterator[None]:
    """If this error is raised inside, the answers of the calls made inside are removed from the response cache.

    For errors that say that answers could not be used: once the server works again, the requests are sent again.
    """
    removals: list[Callable[[], None]] = []
    try:
        with having(current_answers, removals):
            yield
    except error:
        for remove in removals:
            remove()
        raise
