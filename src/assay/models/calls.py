"""What one language-model call was, exactly. Plain data; does not interpret it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from assay.errors import FailureKind

__all__ = ["Call", "Observer", "call_to_dict"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One LM call, answered, refused or served from the response cache.

    `request` and `response` are the canonical lm15 dictionaries, as sent and as received; `text` is the text of all parts of the answer, and
    the response's `provider_data` holds the provider's message where its parts do not say it exactly.
    Token counts are None where the engine did not report them; `cost_usd` is None where no price is known.
    """

    model: str
    weights: str = ""  # sha256 of the weights file; empty where the engine cannot tell
    adapters: tuple[str, ...] = ()
    request: dict[str, Any]
    response: dict[str, Any] | None = None
    text: str = ""
    error: str | None = None
    failure: FailureKind | None = None  # set where `error` is
    cached: bool = False
    constrained: bool = False  # the output was constrained to a schema or grammar
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    thinking_tokens: int | None = None  # of the completion tokens
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # of the sampled tokens, natural log
    latency_ms: float = 0.0  # of an answer from the cache: what the model once needed for it
    cost_usd: float | None = None
    started_at: float = field(default=0.0)  # unix seconds
    sample: int | None = None


Observer = Callable[[Call], None]


def call_to_dict(call: Call) -> dict[str, Any]:
    """The call as JSON-ready data."""
    return asdict(call)
