"""Notifies active recorders of LM calls, tool runs and parse failures in DSPy.

DSPy's callbacks provide the same events, but accounted for half of the cost of recording: they create an id and bind
the arguments for each of five functions per prediction. Here only three methods are wrapped, once per process, at the
cost of a lookup in DSPy's settings. The listeners are stored in those settings, which DSPy copies to its worker threads
and async tasks.
"""

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import dspy

from assay.errors import StopRun
from assay.models.cache import ResponseCache
from assay.models.calls import Observer
from assay.models.dspy_seam import (
    PartMoved,
    guard_bars,
    handed_over,
    keep_converters,
    patch_calls,
    patch_overrides,
    patch_parsing,
)
from assay.models.entries import Opened, wrapped
from assay.models.limits import awaited_within_tool_limit, current_tool_limit, within_tool_limit
from assay.models.meter import Meter
from assay.models.own_lms import arun_recorded, recorded_call, replaced_call, run_recorded
from assay.models.scope import accounted_calls, current_place
from assay.support.values import json_text
from assay.traces.records import ToolCall

_KEY = "assay_listeners"
_REPLACEMENT = "assay_replacement"  # DSPy setting: the model that is called in place of those that a program made
_lock = threading.Lock()
_installed = False
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What records the calls of a model that a program made itself.

    Attributes:
        observer: receives each call.
        meter: counts and caps them.
        cache: answers those that an earlier process of the run made.
    """

    observer: Observer
    meter: Meter
    cache: ResponseCache | None = None


class Listener:
    """Receives events in the thread or task where they happen. Its exceptions are logged and not raised."""

    def recording(self, lm: Any) -> "Recording | None":
        """Called before an LM call: what records it; None if this listener does not, or the model does so itself."""
        return None

    def lm_called(self, lm: Any) -> AbstractContextManager[Any] | None:
        """Called before an LM call that cannot be recorded. May return a context manager for the call."""
        return None

    def tool_began(self, tool: Any, arguments: dict[str, Any]) -> Any:
        """Called before a tool runs. The result is passed to `tool_ended`."""

    def tool_ended(self, begun: Any, result: Any, error: BaseException | None) -> None:
        """Called after a tool has returned or raised `error`."""

    def parse_failed(self, text: str) -> None:
        """Called when an adapter could not parse an answer."""

    def replayed(self, tool: Any, arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
        """What is called in place of a tool; None if the tool runs."""
        return None


def listeners() -> tuple[Listener, ...]:
    """Listeners of this thread or task, or of the place where its thread was started."""
    active = dspy.settings.get(_KEY)
    if active is None:
        active = getattr(current_place(), "listeners", ())
    return active if isinstance(active, tuple) else ()


def has_listeners() -> bool:
    """Whether DSPy's context with the listeners reaches this thread or task. If so, its open rollout (or none) is
    known.
    """
    return dspy.settings.get(_KEY) is not None


def listening(listener: Listener) -> dict[str, Any]:
    """Settings for `dspy.context` that add a listener. An active listener is not added twice."""
    _install()
    return {_KEY: (*(other for other in listeners() if other is not listener), listener)}


def replacing(lm: Any) -> dict[str, Any]:
    """Settings for `dspy.context` in which a model is called, also in place of those that a program made itself."""
    return {"lm": lm, _REPLACEMENT: lm}


def with_lm(lm: Any) -> dict[str, Any]:
    """Settings for `dspy.context` with a model, such as a copy of the current one with other parameters.

    Where the current one is called in place of a program's own models, this one is.
    """
    return {"lm": lm} if dspy.settings.get(_REPLACEMENT) is None else replacing(lm)


def _install() -> None:
    global _installed
    with _lock:
        if _installed:
            return
        patch_calls(lm=lambda plain: wrapped(plain, _opened), tool=_with_tool_events)
        patch_overrides(_recorded_override)
        patch_parsing(_watched)
        keep_converters()
        guard_bars()
        _installed = True


def _tell(handler: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return handler(*arguments)
    except Exception as error:
        _logger.warning("listener %s failed: %s: %s", handler, type(error).__name__, error)
        return None


def _opened(lm: Any, args: list[Any], kwargs: dict[str, Any]) -> Opened:
    """A call of a model that is not the job's: replaced or recorded if a listener can, else only counted."""
    active = _asking_listeners()
    if (record := _recording_of(lm)) is not None:
        replacement = dspy.settings.get(_REPLACEMENT)
        try:
            call = (
                recorded_call(lm, args, kwargs, observer=record.observer, meter=record.meter, cache=record.cache)
                if replacement is None
                else replaced_call(replacement, args, kwargs)
            )
            return replace(call, context=lambda: _handed_over(lm, call))
        except (StopRun, PartMoved):
            raise
        except Exception as error:  # of a class that cannot be copied
            _logger.warning("calls of %s cannot be recorded: %s: %s", lm, type(error).__name__, error)
    return Opened(lm, functools.partial(_counted, active, lm)) if active else Opened(lm)


def _asking_listeners() -> tuple[Listener, ...]:
    """The listeners; none inside a call that is recorded already."""
    return () if accounted_calls.get() else listeners()


def _recording_of(lm: Any) -> Recording | None:
    """What records a call of a model that is not the job's."""
    records = (_tell(listener.recording, lm) for listener in reversed(_asking_listeners()))
    return next((record for record in records if record is not None), None)


def _recorded_override(plain: Any) -> Any:
    """A method of the user's that calls a model by itself, recorded."""

    @functools.wraps(plain)
    def call(lm: Any, /, *given: Any, **kwargs: Any) -> Any:
        args, record, replacement = list(given), _recording_of(lm), dspy.settings.get(_REPLACEMENT)
        if record is None:
            return plain(lm, *args, **kwargs)
        if replacement is not None:
            with _handed_over(lm, replaced_call(replacement, args, kwargs)):
                return getattr(replacement, plain.__name__)(*args, **kwargs)
        return run_recorded(lm, plain, args, kwargs, observer=record.observer, meter=record.meter)

    @functools.wraps(plain)
    async def acall(lm: Any, /, *given: Any, **kwargs: Any) -> Any:
        args, record, replacement = list(given), _recording_of(lm), dspy.settings.get(_REPLACEMENT)
        if record is None:
            return await plain(lm, *args, **kwargs)
        if replacement is not None:
            with _handed_over(lm, replaced_call(replacement, args, kwargs)):
                return await getattr(replacement, plain.__name__)(*args, **kwargs)
        return await arun_recorded(lm, plain, args, kwargs, observer=record.observer, meter=record.meter)

    return acall if inspect.iscoroutinefunction(plain) else call


def _handed_over(lm: Any, call: Opened) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(call.context())
    stack.enter_context(handed_over(lm, call.lm))
    return stack


def _counted(active: Sequence[Listener], lm: Any) -> AbstractContextManager[Any]:
    """Context managers of the listeners for a call that they do not record."""
    stack = ExitStack()
    for listener in active:
        if (context := _tell(listener.lm_called, lm)) is not None:
            stack.enter_context(context)
    return stack


class _Run:
    """Notifies all listeners of the start and end of a tool run."""

    def __init__(self, tool: Any, arguments: dict[str, Any]) -> None:
        self.begun = [(listener, _tell(listener.tool_began, tool, arguments)) for listener in listeners()]
        self.result: Any = None

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        for listener, begun in self.begun:
            _tell(listener.tool_ended, begun, self.result, error)


def run_tool(tool: Any, arguments: dict[str, Any], work: Callable[[], Any]) -> Any:
    """Result of `work`, a run of a tool: the listeners are notified and the time limit of tools applies.

    Args:
        tool: an object with a `name`.
        arguments: as the listeners receive them.
    Raises:
        ToolOverTime: the run exceeded the current limit of tools.
        BaseException: any exception of `work`.
    """
    with _Run(tool, arguments) as run:
        run.result = within_tool_limit(_replayed(tool, arguments) or work, tool.name)
    return run.result


def _replayed(tool: Any, arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
    answers = (listener.replayed(tool, arguments) for listener in listeners())
    return next((answer for answer in answers if answer is not None), None)


def _with_tool_events(plain: Any) -> Any:
    """Wrap a tool's call so that listeners are notified before and after it, and apply the time limit of tools."""

    @functools.wraps(plain)
    def call(tool: Any, /, **arguments: Any) -> Any:
        return run_tool(tool, arguments, lambda: plain(tool, **arguments))

    @functools.wraps(plain)
    async def acall(tool: Any, /, **arguments: Any) -> Any:
        with _Run(tool, arguments) as run:
            if (replayed := _replayed(tool, arguments)) is not None:
                run.result = replayed()
                return run.result
            run.result = await awaited_within_tool_limit(lambda: plain(_limited(tool), **arguments), tool.name)
        return run.result

    return acall if inspect.iscoroutinefunction(plain) else call


def _limited(tool: Any) -> Any:
    """Copy of a tool for an asynchronous call, with a time limit on a synchronous function.

    A synchronous function blocks the event loop, where its task cannot be cancelled.
    """
    if current_tool_limit() is None or inspect.iscoroutinefunction(tool.func):
        return tool
    plain, limited = tool.func, copy.copy(tool)
    limited.func = lambda *args, **kwargs: within_tool_limit(lambda: plain(*args, **kwargs), tool.name)
    return limited


def _watched(plain: Any) -> Any:
    """Wrap `parse` so that listeners are notified of a failure, once even if several classes are wrapped."""
    if getattr(plain, "_assay_watched", False):  # inherited from a class that is wrapped
        return plain

    @functools.wraps(plain)
    def parse(adapter: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(adapter, *args, **kwargs)
        except Exception:
            text = str(args[1] if len(args) > 1 else kwargs.get("completion"))
            # told before it is raised, because DSPy may catch it and ask with another adapter
            for listener in listeners():
                _tell(listener.parse_failed, text)
            raise

    parse._assay_watched = True  # type: ignore[attr-defined]
    return parse


# -- Tools with side effects are answered from a recording while a recorded rollout is replayed.
#
# Without a replay a marked tool runs as any other. Does not run programs.


F = TypeVar("F", bound=Callable[..., Any])
_MARK = "assay_side_effects"


def side_effects(function: F) -> F:
    """Marks a function that a program uses as a tool: it changes something outside, so a replay must not run it."""
    setattr(function, _MARK, True)
    return function


def has_side_effects(tool: Any) -> bool:
    """Whether a tool, or the function of a `dspy.Tool`, is marked."""
    return bool(getattr(tool, _MARK, False) or getattr(getattr(tool, "func", None), _MARK, False))


class RecordedToolError(RuntimeError):
    """The error that the tool had when it was recorded."""


class NotInRecording(LookupError):
    """A replayed program calls a tool with side effects in another way than the recorded one: the result is unknown."""


class ToolReplay(Listener):
    """Answers the calls of marked tools with the results of a recorded rollout.

    Each recorded call answers one call of the same tool with the same arguments, in their order.

    Args:
        recorded: the tool calls of the recorded rollout.

    Attributes:
        answered: number of calls that were answered.
        missed: names of tools whose calls are not in the recording.
    """

    def __init__(self, recorded: Sequence[ToolCall]) -> None:
        self.answered, self.missed = 0, list[str]()
        self._waiting: dict[tuple[str, str], list[ToolCall]] = {}
        for call in recorded:
            self._waiting.setdefault((call.name, _key(call.arguments)), []).append(call)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "ToolReplay":
        return self

    def result(self, tool: Any, arguments: Mapping[str, Any]) -> str:
        """The recorded result of a call, as text.

        Raises:
            RecordedToolError: the recorded call ended with an error.
            NotInRecording: there is no such call, or it was used.
        """
        name = str(getattr(tool, "name", tool))
        with self._lock:
            waiting = self._waiting.get((name, _key(arguments)))
            if not waiting:
                self.missed.append(name)
                raise NotInRecording(f"{name} has side effects and is not run in a replay; this call is not recorded")
            call = waiting.pop(0)
            self.answered += 1
        if call.error is not None:
            raise RecordedToolError(call.error)
        return call.result or ""

    def replayed(self, tool: Any, arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
        return functools.partial(self.result, tool, arguments) if has_side_effects(tool) else None


def _key(arguments: Mapping[str, Any]) -> str:
    """Arguments as the store has them."""
    return json_text(arguments, sort_keys=True)
