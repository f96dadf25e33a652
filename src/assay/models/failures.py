"""What kind of failure an exception is, by its class. Does not read messages, and imports none of the libraries that it knows."""

import errno
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from assay.errors import FailureKind, ModelError, StopRun, Unscored
from assay.models.toollimits import ToolOverTime

__all__ = ["MODEL_FAILURES", "Made", "failure_of_call", "failure_of_program", "failure_of_run", "is_own", "is_refused", "stop_in", "unanswered"]

MODEL_FAILURES = frozenset({FailureKind.MODEL, FailureKind.TIMEOUT})  # of the model's server: no fault of the program
_OWN = frozenset({FailureKind.PARSE, FailureKind.CONTEXT, FailureKind.AGENT, FailureKind.TOOL, FailureKind.LOOP})

_Class = tuple[str, str, FailureKind]  # module, name, kind

# Classes that only a language model's client raises. The first that fits counts: special ones stand before those they inherit from.
_CLIENTS: tuple[_Class, ...] = (
    ("dspy.utils.exceptions", "AdapterParseError", FailureKind.PARSE),
    ("dspy.utils.exceptions", "ContextWindowExceededError", FailureKind.CONTEXT),
    ("dspy.utils.exceptions", "LMTimeoutError", FailureKind.TIMEOUT),
    ("dspy.utils.exceptions", "LMError", FailureKind.MODEL),
    ("dspy.lm15", "ContextLengthError", FailureKind.CONTEXT),
    ("dspy.lm15", "TimeoutError", FailureKind.TIMEOUT),
    ("dspy.lm15", "LM15Error", FailureKind.MODEL),
    ("litellm.exceptions", "ContextWindowExceededError", FailureKind.CONTEXT),
    ("litellm.exceptions", "Timeout", FailureKind.TIMEOUT),
    ("openai", "APITimeoutError", FailureKind.TIMEOUT),
    ("openai", "OpenAIError", FailureKind.MODEL),  # litellm's errors inherit from it
    ("anthropic", "APITimeoutError", FailureKind.TIMEOUT),
    ("anthropic", "AnthropicError", FailureKind.MODEL),
)
_TIMEOUTS: tuple[_Class, ...] = (
    ("builtins", "TimeoutError", FailureKind.TIMEOUT),
    ("httpx", "TimeoutException", FailureKind.TIMEOUT),
    ("requests", "Timeout", FailureKind.TIMEOUT),
)
# What says that a server was not reached or broke off, whoever called it: of the standard library, and packages whose own exceptions say so.
_LINES: tuple[_Class, ...] = (
    *_TIMEOUTS,
    ("builtins", "ConnectionError", FailureKind.MODEL),
    ("urllib.error", "URLError", FailureKind.MODEL),
    ("http.client", "HTTPException", FailureKind.MODEL),
    ("socket", "gaierror", FailureKind.MODEL),
    ("socket", "herror", FailureKind.MODEL),
    ("ssl", "SSLError", FailureKind.MODEL),
)
_ERRNOS = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT})
_PACKAGES = frozenset({"aiohttp", "botocore", "grpc", "httpcore", "httpx", "requests", "urllib3"})


class Made(Protocol):
    """An LM call that was made, as `assay.traces.Transition` says it."""

    error: str | None
    failure: FailureKind | None
    started_at: float
    latency_ms: float


def failure_of_call(error: BaseException) -> FailureKind:
    """Kind of a failed LM call: `context`, `timeout` or `cap` where the class says so, else `model`."""
    return _own_kind(error) or _kind(error, _CLIENTS) or _kind(error, _TIMEOUTS) or FailureKind.MODEL


def failure_of_program(error: BaseException) -> FailureKind:
    """Kind of an exception that a program raised, by its class and the classes of what it was raised from, the outermost first.

    Its model's failure by the class of the model's client, or of a connection: a server that was not reached is no fault of the program,
    whoever called it. Of the members of a group such a failure counts first. `agent` where nothing is known of any of them.
    """
    return _first(error, lines=True)


def _first(error: BaseException, *, lines: bool) -> FailureKind:
    return next((kind for found in _chain(error) if (kind := _known(found, lines=lines)) is not None), FailureKind.AGENT)


def failure_of_run(error: BaseException | None, calls: Sequence[Made]) -> FailureKind | None:
    """Kind of failure of a run without an answer. Where its exception says nothing, or there is none: that of the call it ended with.

    A connection that a tool of the recorded calls lost is the tool's failure, not the model's.

    Returns:
        None where there is no exception and the last call was answered.
    """
    tool = bool(calls) and calls[-1].failure is FailureKind.TOOL
    kind = None if error is None else _first(error, lines=not tool)
    return (unanswered(calls) or kind) if kind in (None, FailureKind.AGENT) else kind


def unanswered(calls: Sequence[Made]) -> FailureKind | None:
    """Kind of the model's failure that a run ended with: of a failed call after which no other was begun and answered. Calls may overlap."""
    began = max((call.started_at for call in calls if call.error is None), default=0.0)
    failed = [call.failure or FailureKind.MODEL for call in calls if call.error is not None and call.started_at + call.latency_ms / 1000 >= began]
    return next((kind for kind in reversed(failed) if not is_own(kind)), None)


def stop_in(group: BaseException) -> StopRun | None:
    """What ends the run, where a task group holds it: an `asyncio.TaskGroup` wraps everything."""
    return next((found for found in _chain(group) if isinstance(found, StopRun)), None)


def is_own(kind: FailureKind) -> bool:
    """Whether a run that failed so failed by itself: it scores 0. Else the model or the machinery failed, and it is unscored."""
    return kind in _OWN


def is_refused(error: BaseException | None) -> bool:
    """Whether an exception comes from a connection that was refused: nothing listens at the address."""
    return error is not None and any(isinstance(found, ConnectionRefusedError) for found in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from or while handling, and the members of groups: those that are a model's failure first."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        before = found.__cause__ or found.__context__  # also where `from None` hides it
        waiting += [before] if before is not None else []
        if isinstance(found, BaseExceptionGroup):
            waiting += sorted(found.exceptions, key=lambda member: not is_own(failure_of_program(member)))


def _known(error: BaseException, *, lines: bool) -> FailureKind | None:
    """What the class of one exception of a program says; with `lines` also that of a connection."""
    kind = _own_kind(error) or _kind(error, _CLIENTS)
    if kind is not None or not lines:
        return kind
    unreached = isinstance(error, OSError) and error.errno in _ERRNOS
    packaged = any(cls.__module__.partition(".")[0] in _PACKAGES for cls in type(error).__mro__)
    return _kind(error, _LINES) or (FailureKind.MODEL if unreached or packaged else None)


def _own_kind(error: BaseException) -> FailureKind | None:
    if isinstance(error, StopRun | KeyboardInterrupt | SystemExit):
        return FailureKind.CAP
    if isinstance(error, Unscored):
        return FailureKind.JUDGE
    if isinstance(error, ToolOverTime):
        return FailureKind.TOOL
    return FailureKind.MODEL if isinstance(error, ModelError) else None


def _kind(error: BaseException, known: Iterable[_Class]) -> FailureKind | None:
    """An exception's class was imported, so its module is loaded; one that is not loaded need not be asked."""
    for module, name, kind in known:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(error, found):
            return kind
    return None
