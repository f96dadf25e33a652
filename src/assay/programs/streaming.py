"""`dspy.streamify` over programs that run a copy of themselves: what a copied predictor writes reaches the listeners of its original.

DSPy knows the predictors of a stream by identity, those of the program that `streamify` was given.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anyio.to_thread
import dspy

__all__ = ["in_thread", "streaming_as"]


class _Renamed:
    """A stream that sends the chunks of copied predictors under the ids of their originals."""

    def __init__(self, stream: Any, ids: Mapping[int, int]) -> None:
        self._stream, self._ids = stream, ids

    async def send(self, item: Any) -> None:
        if (original := self._ids.get(getattr(item, "predict_id", None) or 0)) is not None:
            item.predict_id = original
        await self._stream.send(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def streaming_as(program: dspy.Module, copied: dspy.Module) -> AbstractContextManager[Any]:
    """Within: the copy's predictors stream as those of `program`. For the calls of this context alone, as every call has a copy of its own."""
    stream = dspy.settings.send_stream
    if stream is None:
        return nullcontext()
    pairs = list(zip(program.predictors(), copied.predictors(), strict=True))
    listeners = list(dspy.settings.stream_listeners or ())
    for listener in tuple(listeners):
        for original, own in pairs:
            if listener.predict is original:
                stand_in = copy.copy(listener)  # DSPy asks whether any listener has the predictor; what is sent goes to the original's
                stand_in.predict = own
                listeners.append(stand_in)
    found: AbstractContextManager[Any] = dspy.context(
        send_stream=_Renamed(stream, {id(own): id(original) for original, own in pairs}), stream_listeners=listeners
    )
    return found


async def in_thread(function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """A call in a worker thread of AnyIO, in the context of the caller. DSPy can stream from those alone, not from `asyncio.to_thread`'s."""
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **inputs), abandon_on_cancel=True)
