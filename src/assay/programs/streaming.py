"""Supports `dspy.streamify` for programs that run a copy of themselves.

DSPy identifies the predictors of a stream by object identity in the program passed to `streamify`. Output of copied
predictors is redirected to the listeners of the originals.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anyio.to_thread
import dspy


class _Renamed:
    """A stream that replaces the ids of copied predictors by those of their originals."""

    def __init__(self, stream: Any, ids: Mapping[int, int]) -> None:
        self._stream, self._ids = stream, ids

    async def send(self, item: Any) -> None:
        if (original := self._ids.get(getattr(item, "predict_id", None) or 0)) is not None:
            item.predict_id = original
        await self._stream.send(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def streaming_as(program: dspy.Module, copied: dspy.Module) -> AbstractContextManager[Any]:
    """Context in which the predictors of `copied` stream as those of `program`. Each call has its own copy."""
    stream = dspy.settings.send_stream
    if stream is None:
        return nullcontext()
    pairs = list(zip(program.predictors(), copied.predictors(), strict=True))
    listeners = list(dspy.settings.stream_listeners or ())
    for listener in tuple(listeners):
        for original, part in pairs:
            if listener.predict is original:
                # DSPy streams only predictors that have a listener; the chunks are sent to the original's listener
                duplicate = copy.copy(listener)
                duplicate.predict = part
                listeners.append(duplicate)
    context: AbstractContextManager[Any] = dspy.context(
        send_stream=_Renamed(stream, {id(part): id(original) for original, part in pairs}),
        stream_listeners=listeners,
    )
    return context


async def in_thread(function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Calls a function in a worker thread of AnyIO, with the caller's context.

    DSPy can stream from AnyIO's threads, but not from those of `asyncio.to_thread`.
    """
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **inputs), abandon_on_cancel=True)
