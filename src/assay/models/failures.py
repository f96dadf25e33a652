"""What kind of failure an exception is, by its class. Does not read messages, and imports none of the libraries that it knows."""

import sys
from collections.abc import Iterable

from assay.errors import FailureKind, ModelError, StopRun, Unscored

__all__ = ["MODEL_FAILURES", "failure_of_call", "failure_of_program", "is_own", "is_refused"]

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
# Classes that are a timeout where a model was called, and anything else elsewhere: a tool may use the same clients.
_TRANSPORTS: tuple[_Class, ...] = (
    ("builtins", "TimeoutError", FailureKind.TIMEOUT),
    ("httpx", "TimeoutException", FailureKind.TIMEOUT),
    ("requests", "Timeout", FailureKind.TIMEOUT),
)


def failure_of_call(error: BaseException) -> FailureKind:
    """Kind of a failed LM call: `context`, `timeout` or `cap` where the class says so, else `model`."""
    return _own_kind(error) or _kind(error, _CLIENTS) or _kind(error, _TRANSPORTS) or FailureKind.MODEL


def failure_of_program(error: BaseException) -> FailureKind:
    """Kind of an exception that a program raised: its model's failure by the class of the model's client, else `agent`."""
    return _own_kind(error) or _kind(error, _CLIENTS) or FailureKind.AGENT


def is_own(kind: FailureKind) -> bool:
    """Whether a run that failed so failed by itself: it scores 0. Else the model or the machinery failed, and it is unscored."""
    return kind in _OWN


def is_refused(error: BaseException | None) -> bool:
    """Whether an exception comes from a connection that was refused: nothing listens at the address."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ConnectionRefusedError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _own_kind(error: BaseException) -> FailureKind | None:
    if isinstance(error, StopRun | KeyboardInterrupt | SystemExit):
        return FailureKind.CAP
    if isinstance(error, Unscored):
        return FailureKind.JUDGE
    return FailureKind.MODEL if isinstance(error, ModelError) else None


def _kind(error: BaseException, known: Iterable[_Class]) -> FailureKind | None:
    """An exception's class was imported, so its module is loaded; one that is not loaded need not be asked."""
    for module, name, kind in known:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(error, found):
            return kind
    return None
