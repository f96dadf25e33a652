"""Calls through the public methods of a language model, and what one of them adds to the requests of its engine.

DSPy's adapters call a model by another method in each of its versions, and one method may call another. All of them are
wrapped alike, so that an engine gets the same requests whichever was called.
"""

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspy.utils.exceptions import LMError

from assay.errors import ConfigError, LoopStopped
from assay.models.scope import Repeats, current_repeats, current_sample, sample_scope
from assay.support.values import json_text

if TYPE_CHECKING:
    from assay.models.thinking import Thinking

_SAMPLES = 1_000_003  # a prime above the number of samples that a run has


class Entry:
    """A call of a public method of a model, which may request several completions and repeat failed requests.

    Args:
        backend: the backend of the model's engine, which copies of the engine share.
        seed: seed of the run, for requests without one.
        rollout_id: DSPy's number of a sample, of the call or the model.
        thinking: thinking budget of the call or the model.
        numbered: a call that repeats an earlier one of its rollout is a sample of its own.
    """

    def __init__(
        self,
        backend: object,
        *,
        seed: int | None = None,
        rollout_id: int | None = None,
        thinking: "Thinking | None" = None,
        numbered: bool = True,
    ) -> None:
        self.backend, self.seed, self.rollout_id, self.thinking = backend, seed, rollout_id, thinking
        self.reached = False  # the engine was called
        self._repeats = current_repeats.get() if numbered else None
        self._repeat: tuple[str, int] | None = None  # this call among its rollout's: identity and number
        self._completions, self._lock = Repeats(), threading.Lock()

    @contextmanager
    def completion(self, identity: Callable[[], Any], *, repeated: bool) -> Iterator[int | None]:
        """One request of the call. Inside, it belongs to its own sample, which is the value.

        Args:
            identity: what the equal calls of a rollout have in common; read for the first request.
            repeated: a repeated call is a sample of its own; not at temperature 0, which asks for the same answer.
        """
        number, repeat = self._completions.next(""), self._number(identity) if repeated else 0
        outer = current_sample.get()
        try:
            with sample_scope((outer or 0) if repeat else outer, f"repeat {repeat}" if repeat else ""):
                sample = self._sample(number)
                with sample_scope(sample):
                    yield sample
        except BaseException:
            self._completions.unanswered("", number)  # if the request is sent again, it is the same completion
            raise

    def _number(self, identity: Callable[[], Any]) -> int:
        if self._repeats is None:
            return 0
        with self._lock:
            if self._repeat is None:
                text = json_text([self.rollout_id, identity()], sort_keys=True)
                call = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
                self._repeat = call, self._repeats.next(call)
            return self._repeat[1]

    def _sample(self, completion: int) -> int | None:
        outer = sample = current_sample.get()
        if self.rollout_id is not None:
            sample = self.rollout_id if outer is None else outer * _SAMPLES + self.rollout_id
        return sample if completion == 0 else ((sample or 0) + 1) * _SAMPLES + completion

    def failed(self) -> None:
        """The call raised: if it is made again, it is the same one."""
        if self._repeats is not None and self._repeat is not None:
            self._repeats.unanswered(*self._repeat)


def seed_of(seed: int, sample: int | None, request: Mapping[str, Any]) -> int:
    """Seed of a request, derived from the run's seed, the sample and the messages.

    A seeded run then replays. Under one seed, an engine would draw the same numbers for every prompt: sampling errors
    of different tasks would be correlated.

    Args:
        request: the canonical lm15 dictionary.
    """
    system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
    messages = [{"role": message["role"], "content": _content(message)} for message in request["messages"]]
    identity = json_text([seed, sample, None, [*system, *messages]], sort_keys=True)
    return int.from_bytes(hashlib.sha256(identity.encode("utf-8", "replace")).digest()[:4], "big") >> 1


def _content(message: Mapping[str, Any]) -> Any:
    """A message's text, if it is one; else its parts."""
    parts = message["parts"]
    return parts[0]["text"] if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


current_entry: ContextVar[Entry | None] = ContextVar("assay_entry", default=None)


@contextmanager
def entered(entry: Entry) -> Iterator[Entry]:
    """Inside, requests that reach the entry's engine are those of this call. Raises assay's own errors as they are:
    DSPy wraps exceptions of engines that it does not know."""
    token = current_entry.set(entry)
    try:
        yield entry
    except LMError as error:
        if isinstance(cause := error.__cause__, LoopStopped):  # the response cache has it as the answer of this call
            raise cause from None
        entry.failed()
        if isinstance(cause, ConfigError):
            raise cause from None
        raise
    except LoopStopped:
        raise
    except BaseException:
        entry.failed()
        raise
    finally:
        current_entry.reset(token)


@dataclass(frozen=True)
class Opened:
    """A call of a public method, as it is made.

    Attributes:
        lm: the model to call.
        context: opens the context of the call. It is opened anew for each event of a stream, because the caller's code
            runs between them.
        done: called with the result, if it is not a stream.
    """

    lm: Any
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    done: Callable[[Any], None] | None = None


def wrapped(plain: Any, opened: Callable[[Any, list[Any], dict[str, Any]], Opened]) -> Any:
    """A public method of a model with a context around it, also where it is asynchronous or returns a stream.

    Args:
        opened: (model, arguments, keyword arguments) -> how the call is made. It may change the arguments.
    """

    @functools.wraps(plain)
    def call(lm: Any, /, *given: Any, **kwargs: Any) -> Any:
        args = list(given)
        opening = opened(lm, args, kwargs)
        _drop_file_names(opening.lm, kwargs.get("messages"))
        with opening.context():
            result = plain(opening.lm, *args, **kwargs)
        if inspect.isasyncgen(result):
            return _later(result, opening.context)
        if inspect.isgenerator(result):
            return _each(result, opening.context)
        if opening.done is not None:
            opening.done(result)
        return result

    @functools.wraps(plain)
    async def acall(lm: Any, /, *given: Any, **kwargs: Any) -> Any:
        args = list(given)
        opening = opened(lm, args, kwargs)
        _drop_file_names(opening.lm, kwargs.get("messages"))
        with opening.context():
            result = await plain(opening.lm, *args, **kwargs)
        if opening.done is not None:
            opening.done(result)
        return result

    return acall if inspect.iscoroutinefunction(plain) else call


def _drop_file_names(lm: Any, messages: Any) -> None:
    """Take names of files out of a list of messages: DSPy refuses calls with them where the engine is not its own.

    The list stays the same object, by which DSPy knows the calls of its adapters.
    """
    if isinstance(messages, list) and not isinstance(getattr(lm, "engine", ""), str):
        for at, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list) and (nameless := list(map(_nameless, content))) != content:
                messages[at] = {**message, "content": nameless}


def _nameless(block: Any) -> Any:
    file = block.get("file") if isinstance(block, Mapping) else None
    if not isinstance(file, Mapping):
        return block
    return {**block, "file": {name: value for name, value in file.items() if name != "filename"}}


def _each(events: Iterator[Any], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    while True:
        with context():
            try:
                event = next(events)
            except StopIteration:
                return
        yield event


async def _later(events: Any, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    while True:
        with context():
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
        yield event
