"""DSPy 3.4.1 in the shapes that are announced for 3.5: a pytest plugin, `python -m pytest -p tests.stub_dspy35`.

- Its version is 3.5.0, so that assay warns.
- The default adapter is `XMLAdapter(use_native_function_calling=True)`.
- Adapters call `lm.generate(request, n=…)` or `agenerate`, which return a list of `lm15.Response`.
- `lm(messages=…)` is a TypeError; `lm("text")` and `lm(Request)` are as before.
- `format` of DSPy's adapters returns an object with `system` and `messages`, which are `lm15.Message`s. An adapter of
  another package may still return dictionaries here.
- `dspy.ReAct` is `ReActV2`.

With STUB_FORMAT=chat the chat adapter is configured, as 3.5 documents for who wants to keep the format of 3.4: for
tests whose scripted answers are in it.

What was not announced is as in 3.4.1, in particular `_call_preprocess`, `_call_postprocess` and how values are escaped.
"""

import functools
import inspect
import os
from dataclasses import dataclass
from typing import Any

import dspy
from dspy import lm15
from dspy.clients import execution
from dspy.clients.call_result import CallResult
from dspy.clients.capabilities import with_capability_planning
from dspy.predict import predict


@dataclass(frozen=True)
class Prompt:
    """What `format` returns. `sent` is 3.4.1's form of it, for the stub alone."""

    system: Any
    messages: tuple[lm15.Message, ...]
    sent: Any


def _prompt(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages  # of a class whose parent's `format` is wrapped too
    request = lm15.request_from_openai_chat({"model": "stub/m", "messages": messages})
    return Prompt(request.system, request.messages, messages)


def _wrap_formats() -> None:
    waiting: list[Any] = [dspy.Adapter]
    while waiting:
        adapter = waiting.pop()
        waiting += adapter.__subclasses__()
        plain = vars(adapter).get("format")
        if plain is not None:
            adapter.format = functools.wraps(plain)(
                lambda *args, plain=plain, **kwargs: _prompt(plain(*args, **kwargs))
            )


def _generate(lm: Any, request: lm15.Request, *, n: int = 1, **options: Any) -> list[lm15.Response]:
    return [lm(request, **options) for _ in range(n)]


async def _agenerate(lm: Any, request: lm15.Request, *, n: int = 1, **options: Any) -> list[lm15.Response]:
    return [await lm.acall(request, **options) for _ in range(n)]


def _asked(adapter: Any, lm: Any, kwargs: dict[str, Any], signature: Any, demos: Any, inputs: Any) -> Any:
    """The processed signature, the request and the options of `generate`."""
    processed = adapter._call_preprocess(lm, kwargs, signature, inputs)
    prompt = adapter.format(processed, demos, inputs)
    if kwargs.get("parallel_tool_calls") is not None:
        kwargs.setdefault("tool_choice", "auto")
    call = execution.prepare(lm, None, getattr(prompt, "sent", prompt), kwargs)
    options = {name: kwargs[name] for name in ("rollout_id", "cache") if name in kwargs}
    return processed, execution._canonical(call), {"n": call.n, **options}


def _outputs(lm: Any, request: lm15.Request, responses: list[lm15.Response]) -> list[Any]:
    logprobs = request.config.logprobs is not None
    results = [CallResult.native(one, model_type=lm.model_type, logprobs=logprobs) for one in responses]
    return [output for result in results for output in result.outputs]


@with_capability_planning
def _call(self: Any, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
    processed, request, options = _asked(self, lm, lm_kwargs, signature, demos, inputs)
    outputs = _outputs(lm, request, lm.generate(request, **options))
    return self._call_postprocess(processed, signature, outputs, lm, lm_kwargs)


@with_capability_planning
async def _acall(self: Any, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
    processed, request, options = _asked(self, lm, lm_kwargs, signature, demos, inputs)
    outputs = _outputs(lm, request, await lm.agenerate(request, **options))
    return self._call_postprocess(processed, signature, outputs, lm, lm_kwargs)


def _without_messages(plain: Any) -> Any:
    def refuse(kwargs: dict[str, Any]) -> None:
        if kwargs.get("messages") is not None:
            raise TypeError("lm(messages=…) was removed in DSPy 3.5")

    @functools.wraps(plain)
    def call(lm: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(kwargs)
        return plain(lm, *args, **kwargs)

    @functools.wraps(plain)
    async def acall(lm: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(kwargs)
        return await plain(lm, *args, **kwargs)

    return acall if inspect.iscoroutinefunction(plain) else call


_wrap_formats()
dspy.Adapter.__call__, dspy.Adapter.acall = _call, _acall
dspy.BaseLM.generate, dspy.BaseLM.agenerate = _generate, _agenerate
dspy.BaseLM.__call__ = _without_messages(dspy.BaseLM.__call__)
dspy.BaseLM.acall = _without_messages(dspy.BaseLM.acall)
predict.ChatAdapter = functools.partial(dspy.XMLAdapter, use_native_function_calling=True)
dspy.ReAct = dspy.predict.ReAct = dspy.ReActV2
dspy.__version__ = "3.5.0"
if os.environ.get("STUB_FORMAT") == "chat":
    dspy.configure(adapter=dspy.ChatAdapter())
