"""The most that a call is expected to cost, estimated from its request, and prices of models by name."""

from collections.abc import Mapping
from typing import Any

from assay.models.custom_backend import CustomBackend, rough_tokens
from assay.models.hosted import quiet_litellm
from assay.models.meter import Reservation
from assay.models.roles import is_embedded
from assay.support.values import json_text

__all__ = ["FIRST_ANSWER", "price", "reservation_of"]

FIRST_ANSWER = 1024  # tokens reserved for the answer of a call without `max_tokens`, until an answer was seen
_FORMAT = 8  # tokens of the chat format per message


def reservation_of(backend: Any, model: str, request: Mapping[str, Any], longest: int) -> Reservation:
    """Tokens of the prompt and `max_tokens`, and their price. An unknown price reserves nothing.

    Args:
        backend: counts the tokens of the prompt; images and other binary parts are not counted.
        request: the canonical lm15 dictionary.
        longest: tokens of the longest answer so far, for a request without `max_tokens`; 0 before the first.
    """
    config, messages = request.get("config") or {}, request.get("messages") or ()
    limit = config.get("max_tokens")
    prompt = _count(backend, "\n".join(_texts(request))) + _FORMAT * (len(messages) + 1)
    answer = (longest or FIRST_ANSWER) if limit is None else int(limit)
    if isinstance(backend, CustomBackend):
        cost = getattr(backend.engine, "price_usd", None)
    else:
        cost = price(model, prompt, answer)
    return Reservation(prompt + answer, cost or 0.0, limit is not None)


def price(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Dollars for so many tokens, 0 for embedded models, None where no price is known."""
    if is_embedded(model):
        return 0.0
    try:
        return float(
            sum(
                quiet_litellm().cost_per_token(
                    model=model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
                )
            )
        )
    except Exception:  # litellm raises its own kinds for models it has no price for
        return None


def _count(backend: Any, text: str) -> int:
    try:
        return int(backend.count_tokens(text))
    except Exception:  # a tokenizer that is not available must not stop a call
        return rough_tokens(text)


def _texts(request: Mapping[str, Any]) -> list[str]:
    """The texts of a request: system prompt, messages, tools and schema, without binary data."""
    texts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                if key not in ("data", "url", "type", "role"):
                    collect(part)
        elif isinstance(value, list | tuple):
            for part in value:
                collect(part)

    collect([request.get("system"), request.get("messages")])
    schemas = [request.get("tools"), (request.get("config") or {}).get("response_format")]
    return texts + [json_text(schema) for schema in schemas if schema]
