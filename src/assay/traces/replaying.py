"""Tools with side effects are answered from a recording while a recorded rollout is replayed.

Without a replay a marked tool runs as any other. Does not run programs.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from assay.support.values import json_text
from assay.traces.listening import Listener
from assay.traces.records import ToolCall

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
