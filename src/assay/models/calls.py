"""Record of one language-model call. Plain data; does not interpret it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from assay.errors import FailureKind


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
