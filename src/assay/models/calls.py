"""Record of one language-model call. Plain data; does not interpret it."""

import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import EnvironmentFailed, FailureKind, LoopStopped, ModelError, SandboxError, StopRun, Unscored
from assay.models.limits import ToolOverTime


@dataclass(kw_only=True)
class Call:
    """One LM call: answered, failed, or served from a response cache.

    `request` and `response` are as sent and as received: of a model in this process the canonical lm15 dictionaries,
    where the response's `provider_data` holds the provider's message if its parts do not contain the exact text.
    """

    model: str
    weights: str = ""  # sha256 of the weights file; empty if unknown
    adapters: tuple[str, ...] = ()
    request: dict[str, Any]
    response: dict[str, Any] | None = None
    output: str = ""  # text of all parts of the answer
    error: str | None = None
    failure: FailureKind | None = None
    constrained: bool = False  # the output was constrained to a schema or grammar
    cached: bool = False
    prompt_tokens: int | None = None  # None if the engine did not report them, also below
    completion_tokens: int | None = None
    thinking_tokens: int | None = None  # part of the completion tokens
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # of the sampled tokens, natural log
    latency_ms: float = 0.0  # for a cached answer: the latency of the original call
    cost_usd: float | None = None  # None if no price is known
    started_at: float = 0.0  # unix seconds


Observer = Callable[[Call], None]

# -- Failure kind of an exception, by its class. Reads no messages, and imports none of the libraries that it knows.


MODEL_FAILURES = frozenset({FailureKind.MODEL, FailureKind.TIMEOUT})  # failures of the model's server
_AGENTS = frozenset({FailureKind.PARSE, FailureKind.CONTEXT, FailureKind.AGENT, FailureKind.TOOL, FailureKind.LOOP})

_Class = tuple[str, str, FailureKind]  # module, name, kind

# Classes that only a language model's client raises. The first match counts: subclasses come before their bases.
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
# Failed connections, whichever client made them: classes of the standard library, and packages with their own classes.
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


def failure_of_call(error: BaseException) -> FailureKind:
    """Failure kind of a failed LM call: `context`, `timeout` or `cap` by the class of the error, else `model`."""
    return _kind_of_assay_error(error) or _kind(error, _CLIENTS) or _kind(error, _TIMEOUTS) or FailureKind.MODEL


def failure_of_program(error: BaseException) -> FailureKind:
    """Failure kind of an exception that a program raised, by its class and those of its causes, the outermost first.

    A model failure if the class is one of a model's client or of a failed connection: an unreachable server is not the
    program's fault, whichever client was used. In an exception group, model failures come first. `agent` if no class
    is known.
    """
    return _first(error, lines=True)


def _first(error: BaseException, *, lines: bool) -> FailureKind:
    kinds = (_known(link, lines=lines) for link in _chain(error))
    return next((kind for kind in kinds if kind is not None), FailureKind.AGENT)


def failure_of_run(error: BaseException | None, calls: Sequence[Call]) -> FailureKind | None:
    """Failure kind of a run without an answer, by its exception, or else by the call that it ended with.

    A connection that failed inside a recorded tool call is a tool failure, not a model failure.

    Returns:
        None if there is no exception and the last call was answered.
    """
    tool = bool(calls) and calls[-1].failure is FailureKind.TOOL
    kind = None if error is None else _first(error, lines=not tool)
    return (unanswered(calls) or kind) if kind in (None, FailureKind.AGENT) else kind


def unanswered(calls: Sequence[Call]) -> FailureKind | None:
    """Kind of the model failure that ended a run: a failed call, after which no call started and succeeded.

    Calls may overlap.
    """
    began = max((call.started_at for call in calls if call.error is None), default=0.0)
    failed = [
        call.failure or FailureKind.MODEL
        for call in calls
        if call.error is not None and call.started_at + call.latency_ms / 1000 >= began
    ]
    return next((kind for kind in reversed(failed) if not is_agent_failure(kind)), None)


def stop_in(group: BaseException) -> StopRun | None:
    """The `StopRun` in an exception, its causes, or a group: an `asyncio.TaskGroup` wraps every exception."""
    return next((link for link in _chain(group) if isinstance(link, StopRun)), None)


def is_agent_failure(kind: FailureKind) -> bool:
    """Whether this kind is the program's own failure, which scores 0. All other failures are unscored."""
    return kind in _AGENTS


def is_refused(error: BaseException | None) -> bool:
    """Whether an exception was caused by a refused connection: nothing listens at the address."""
    return error is not None and any(isinstance(link, ConnectionRefusedError) for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, its causes and contexts, and the members of groups: model failures before other members."""
    visited: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        before = link.__cause__ or link.__context__  # `from None` only hides the context
        waiting += [before] if before is not None else []
        if isinstance(link, BaseExceptionGroup):
            waiting += sorted(link.exceptions, key=lambda member: not is_agent_failure(failure_of_program(member)))


def _known(error: BaseException, *, lines: bool) -> FailureKind | None:
    """Failure kind of one exception's class; None if unknown. Connection errors are known only with `lines`."""
    kind = _kind_of_assay_error(error) or _kind(error, _CLIENTS)
    if kind is not None or not lines:
        return kind
    unreached = isinstance(error, OSError) and error.errno in _ERRNOS
    packaged = any(cls.__module__.partition(".")[0] in _PACKAGES for cls in type(error).__mro__)
    return _kind(error, _LINES) or (FailureKind.MODEL if unreached or packaged else None)


def _kind_of_assay_error(error: BaseException) -> FailureKind | None:
    if isinstance(error, StopRun | KeyboardInterrupt | SystemExit):
        return FailureKind.CAP
    if isinstance(error, Unscored):
        return FailureKind.JUDGE
    if isinstance(error, ToolOverTime):
        return FailureKind.TOOL
    if isinstance(error, LoopStopped):
        return FailureKind.LOOP
    if isinstance(error, EnvironmentFailed):
        return FailureKind.ENVIRONMENT
    if isinstance(error, SandboxError):
        return FailureKind.SANDBOX
    return FailureKind.MODEL if isinstance(error, ModelError) else None


def _kind(error: BaseException, known: Iterable[_Class]) -> FailureKind | None:
    """Kind of the first listed class that matches. A class whose module is not loaded cannot have been raised."""
    for module, name, kind in known:
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type) and isinstance(error, cls):
            return kind
    return None
