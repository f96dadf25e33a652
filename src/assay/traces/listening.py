"""Tells the recorders at work which language models are called, which tools run, and which answers cannot be parsed.

DSPy's callbacks tell the same, and took half of what recording costs: for each of five functions a prediction goes through they make an id and
bind the arguments, for whoever listens to any. Here the three methods that matter are wrapped, once a process, and cost a look into DSPy's
settings. Who listens travels in those settings, which DSPy copies into its worker threads and async tasks.
"""

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import dspy
from dspy.clients.typesafe import TypeSafe

from assay.models.limits import current_tool_limit
from assay.models.threads import current_place
from assay.models.toollimits import awaited_within_tool_limit, within_tool_limit

__all__ = ["Listener", "is_told_here", "listeners", "listening"]

_KEY = "assay_listeners"
_lock = threading.Lock()
_installed = False
_logger = logging.getLogger(__name__)


class Listener(Protocol):
    """What is told, in the thread or task where it happens. An exception is logged and never reaches the program."""

    def lm_called(self, lm: Any) -> AbstractContextManager[None] | None:
        """A language model is about to be called; what it is to be called within, if anything."""

    def tool_began(self, tool: Any, arguments: dict[str, Any]) -> Any:
        """A tool is about to run. What is returned is handed to `tool_ended`."""

    def tool_ended(self, begun: Any, result: Any, error: BaseException | None) -> None:
        """The tool has returned, or raised `error`."""

    def parse_failed(self, text: str) -> None:
        """An adapter could not parse this answer."""


def listeners() -> tuple[Listener, ...]:
    """Who listens in this thread or task, or where its thread was started."""
    found = dspy.settings.get(_KEY)
    if found is None:
        found = getattr(current_place(), "listeners", ())
    return found if isinstance(found, tuple) else ()


def is_told_here() -> bool:
    """Whether DSPy's context, with those who listen, has come to this thread or task: then it tells what is open, and that nothing is."""
    return dspy.settings.get(_KEY) is not None


def listening(listener: Listener) -> dict[str, Any]:
    """The settings for `dspy.context` within which one more listens; one that listens already is not told twice."""
    _install()
    return {_KEY: (*(other for other in listeners() if other is not listener), listener)}


def _install() -> None:
    global _installed
    with _lock:
        if _installed:
            return
        for owner, wrap in ((dspy.BaseLM, _counting), (TypeSafe, _counting), (dspy.Tool, _telling)):
            for name in ("__call__", "acall"):
                setattr(owner, name, wrap(getattr(owner, name)))
        _watch_adapters()
        _installed = True


def _tell(told: Callable[..., Any], *what: Any) -> Any:
    try:
        return told(*what)
    except Exception as error:
        _logger.warning("%s could not take what it was told: %s: %s", told, type(error).__name__, error)
        return None


def _counting(plain: Any) -> Any:
    """A model's call, of which the listeners hear before it is made."""

    def within(lm: Any) -> AbstractContextManager[Any]:
        """What the listeners want it to be made within."""
        found = [wanted for listener in listeners() if (wanted := _tell(listener.lm_called, lm)) is not None]
        if not found:
            return nullcontext()
        stack = ExitStack()
        for wanted in found:
            stack.enter_context(wanted)
        return stack

    @functools.wraps(plain)
    def call(lm: Any, *args: Any, **kwargs: Any) -> Any:
        with within(lm):
            return plain(lm, *args, **kwargs)

    @functools.wraps(plain)
    async def acall(lm: Any, *args: Any, **kwargs: Any) -> Any:
        with within(lm):
            return await plain(lm, *args, **kwargs)

    return acall if inspect.iscoroutinefunction(plain) else call


class _Run:
    """One run of a tool, told to everybody who listens."""

    def __init__(self, tool: Any, arguments: dict[str, Any]) -> None:
        self.begun = [(listener, _tell(listener.tool_began, tool, arguments)) for listener in listeners()]
        self.result: Any = None

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        for listener, begun in self.begun:
            _tell(listener.tool_ended, begun, self.result, error)


def _telling(plain: Any) -> Any:
    """A tool's call, of which the listeners hear before and after. It has the time limit of tools."""

    @functools.wraps(plain)
    def call(tool: Any, **arguments: Any) -> Any:
        with _Run(tool, arguments) as run:
            run.result = within_tool_limit(lambda: plain(tool, **arguments), tool.name)
        return run.result

    @functools.wraps(plain)
    async def acall(tool: Any, **arguments: Any) -> Any:
        with _Run(tool, arguments) as run:
            run.result = await awaited_within_tool_limit(lambda: plain(_limited(tool), **arguments), tool.name)
        return run.result

    return acall if inspect.iscoroutinefunction(plain) else call


def _limited(tool: Any) -> Any:
    """A tool for an asynchronous call: a plain function holds the loop, where no task can be cancelled, so its call has a limit of its own."""
    if current_tool_limit() is None or inspect.iscoroutinefunction(tool.func):
        return tool
    plain, limited = tool.func, copy.copy(tool)
    limited.func = lambda *args, **kwargs: within_tool_limit(lambda: plain(*args, **kwargs), tool.name)
    return limited


def _watch_adapters() -> None:
    """Adapters bring a `parse` of their own each: those that there are, and those that will be."""
    plain = dspy.Adapter.__init_subclass__.__func__

    def with_watched_parse(cls: Any, /, **kwargs: Any) -> None:
        plain(cls, **kwargs)
        cls.parse = _watched(cls.parse)

    dspy.Adapter.__init_subclass__ = classmethod(with_watched_parse)
    waiting = list(dspy.Adapter.__subclasses__())
    while waiting:
        adapter = waiting.pop()
        waiting += adapter.__subclasses__()
        adapter.parse = _watched(adapter.parse)


def _watched(plain: Any) -> Any:
    """A `parse` whose failure the listeners hear of, once, however many classes wrap it."""
    if getattr(plain, "_assay_watched", False):
        return plain

    @functools.wraps(plain)
    def parse(adapter: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(adapter, *args, **kwargs)
        except Exception:
            text = str(args[1] if len(args) > 1 else kwargs.get("completion"))
            for listener in listeners():
                _tell(listener.parse_failed, text)
            raise

    parse._assay_watched = True  # type: ignore[attr-defined]
    return parse
