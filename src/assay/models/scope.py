"""Context of LM calls in a block of code: sample, output field that is read, collected prices. Imports no model."""

import hashlib
import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, TypeVar

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


# -- Propagates the context of a run into the threads and thread pools that its program creates.
#
# These are assay's own context variables, such as the place of the recorder and the sample, and DSPy's settings as the
# run configures them (`settings_for_threads`), in place of those of `dspy.configure`. A program's own context
# variables, and what it sets with `dspy.context`, have the same values in a thread as without assay.


accounted_calls: ContextVar[int] = ContextVar("assay_accounted", default=0)
_place: ContextVar[Any] = ContextVar("assay_place", default=None)
# marks a job that was submitted outside of any place, whatever the pool's thread was started for
_NOWHERE = object()
_settings: ContextVar[Mapping[str, Any] | None] = ContextVar("assay_settings", default=None)
_CARRIED: tuple[ContextVar[Any], ...] = (accounted_calls, current_sample, current_repeats, _settings)
_OF_THREAD = "_assay_place"
_JOBS = (  # methods of `ThreadPool` whose first argument is `func`
    "apply_async",
    "map",
    "map_async",
    "starmap",
    "starmap_async",
    "imap",
    "imap_unordered",
)
_lock = threading.Lock()
_following = False


def open_place(place: object) -> Token[Any]:
    """Set the value of `current_place` for this thread or task, and for what it starts."""
    return _place.set(place)


def leave_place(token: Token[Any]) -> None:
    """Undo `open_place`."""
    _place.reset(token)


def current_place() -> Any:
    """Place of this thread or task, or else the one that its thread was started in; None if neither is known."""
    place = _place.get()
    if place is None:
        place = getattr(threading.current_thread(), _OF_THREAD, None)
    return None if place is _NOWHERE else place


def pin_place() -> None:
    """Keep the current place, also that there is none, in this context, for a thread that outlives the place in which
    it was started."""
    _place.set(_place_or_nowhere())


def _place_or_nowhere() -> object:
    current = current_place()
    return _NOWHERE if current is None else current


def settings_for_threads() -> AbstractContextManager[object]:
    """Inside, threads start with DSPy's current settings, as they would with those of `dspy.configure`."""
    import dspy

    return having(_settings, dict(dspy.settings.config))


def follow() -> None:
    """Install the propagation for threads started and jobs submitted from now on; once per process."""
    global _following
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.pool import ThreadPool

    with _lock:
        if _following:
            return
        _following = True
        _wrap_start()
        _wrap_job(ThreadPoolExecutor, "submit")
        for name in _JOBS:
            _wrap_job(ThreadPool, name)


def _wrap_start() -> None:
    original = threading.Thread.start

    @wraps(original)
    def start(thread: threading.Thread) -> None:
        setattr(thread, _OF_THREAD, current_place())
        if _settings.get() is not None:
            setattr(thread, "run", _carrying(thread.run))  # noqa: B010
        original(thread)

    setattr(threading.Thread, "start", start)  # noqa: B010


def _wrap_job(owner: type, name: str) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def submit(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_carrying(args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = _carrying(kwargs["func"])
        return original(pool, *args, **kwargs)

    setattr(owner, name, submit)


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    values = [(_place, _place_or_nowhere()), *((variable, variable.get()) for variable in _CARRIED)]
    if (settings := _settings.get()) is not None:
        function = _with_settings(function, settings)

    def job(*args: Any, **kwargs: Any) -> Any:
        tokens = [(variable, variable.set(value)) for variable, value in values]
        try:
            return function(*args, **kwargs)
        finally:
            for variable, token in tokens:
                variable.reset(token)

    return job


def _with_settings(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    import dspy

    def job(*args: Any, **kwargs: Any) -> Any:
        with dspy.context(**settings):
            return function(*args, **kwargs)

    return job
