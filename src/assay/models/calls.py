"""Record of one language-model call. Plain data; does not interpret it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from assay.errors import FailureKind


@dataclass(frozen=True, kw_only=True)
class Call:
    """One LM call: answered, failed, or served from the response cache.

    `request` and `response` are the canonical lm15 dictionaries, as sent and as received. `text` is the text of all
    parts of the answer. The response's `provider_data` holds the provider's message if its parts do not contain the
    exact text. Token counts are None if the engine did not report them; `cost_usd` is None if no price is known.
    """

    model: str
    weights: str = ""  # sha256 of the weights file; empty if unknown
    adapters: tuple[str, ...] = ()
    request: dict[str, Any]
    response: dict[str, Any] | None = None
    text: str = ""
    error: str | None = None
    failure: FailureKind | None = None  # set if `error` is
    cached: bool = False
    constrained: bool = False  # the output was constrained to a schema or grammar
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    thinking_tokens: int | None = None  # part of the completion tokens
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # of the sampled tokens, natural log
    latency_ms: float = 0.0  # for a cached answer: the latency of the original call
    cost_usd: float | None = None
    started_at: float = field(default=0.0)  # unix seconds
    sample: int | None = None


Observer = Callable[[Call], None]


def call_to_dict(call: Call) -> dict[str, Any]:
    """The call as JSON-ready data."""
    return asdict(call)
