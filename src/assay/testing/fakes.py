"""A scripted engine: a DSPy engine whose responses are a function of the request, for tests without a model."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dspy import lm15

from assay.models import LanguageModel, Meter, ResponseCache, with_recording
from assay.models.calls import Observer


class ScriptedEngine:
    """Returns `script(request)` as the response, or raises it if it is an exception. `calls` is the number of calls.

    Args:
        script: canonical request -> text, an exception, or next-token probabilities by word.
        tokens: prompt and completion tokens that each call reports.
    """

    supports_function_calling = False
    supports_reasoning = False
    supports_response_schema = True

    def __init__(
        self,
        script: Callable[[Any], Any],
        *,
        tokens: tuple[int, int] = (10, 5),
        price_usd: float | None = 0.0,
        logprobs: bool = False,
    ) -> None:
        self.supported_params = frozenset(
            {
                "temperature",
                "max_tokens",
                "response_format",
                "seed",
                *(("logprobs", "top_logprobs") if logprobs else ()),
            }
        )
        self.script, self.tokens, self.price_usd, self.calls = script, tokens, price_usd, 0
        self._lock = threading.Lock()

    def complete(self, request: Any) -> Any:
        with self._lock:
            self.calls += 1
        output = self.script(request)
        if isinstance(output, BaseException):
            raise output
        prompt, completion = self.tokens
        usage = lm15.Usage(input_tokens=prompt, output_tokens=completion)
        logprobs = None
        if isinstance(output, dict):
            top = tuple(lm15.TopLogprob(token=word, logprob=math.log(p)) for word, p in output.items() if p > 0)
            output = max(output, key=output.__getitem__)
            logprobs = (lm15.TokenLogprob(token=output, logprob=0.0, top=top),)
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(str(output))]),
            finish_reason="stop",
            usage=usage,
            logprobs=logprobs,
        )

    def stream(self, request: Any) -> Any:
        return iter(lm15.response_to_events(self.complete(request)))

    def close(self) -> None:
        pass


def scripted_lm(
    script: Callable[[Any], Any],
    *,
    num_retries: int = 0,
    tokens: tuple[int, int] = (10, 5),
    price_usd: float | None = 0.0,
    logprobs: bool = False,
    cache: ResponseCache | None = None,
    meter: Meter | None = None,
    observers: Sequence[Observer] = (),
) -> LanguageModel:
    """A language model with a `ScriptedEngine`, which is its attribute `scripted`.

    Args:
        script: as in `ScriptedEngine`, as are `tokens`, `price_usd` and `logprobs`.
        num_retries: retries of a failed call.
        cache, meter, observers: as in `assay.models.with_recording`.
    """
    import dspy

    engine = ScriptedEngine(script, tokens=tokens, price_usd=price_usd, logprobs=logprobs)
    model = dspy.LM("scripted/model", engine=engine, cache=False, num_retries=num_retries)
    lm = with_recording(model, cache=cache, meter=meter, observers=observers)
    lm.scripted = engine
    return lm
