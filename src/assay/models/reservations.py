"""Tokens of calls: those that a call is expected to take, with their price, and those that a server did not report."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dspy import lm15

from assay.models.codec import response_to_dict
from assay.models.custom_backend import CustomBackend, rough_tokens
from assay.models.meter import Reservation
from assay.models.prices import Price, price
from assay.support.values import json_text

FIRST_ANSWER = 1024  # tokens reserved for the answer of a call without `max_tokens`, until an answer was seen
_FORMAT = 8  # tokens of the chat format per message


def reservation_of(
    backend: Any, model: str, request: Mapping[str, Any], longest: int, own: Price | None = None
) -> Reservation:
    """Tokens of the prompt and `max_tokens`, and their price. An unknown price reserves nothing.

    Args:
        backend: counts the tokens of the prompt; images and other binary parts are not counted.
        request: the canonical lm15 dictionary.
        longest: tokens of the longest answer so far, for a request without `max_tokens`; 0 before the first.
        own: the user's price of the model.
    """
    limit = (request.get("config") or {}).get("max_tokens")
    text = _count(backend, "\n".join(_texts(request)))
    prompt, answer = text + _format_tokens(request), (longest or FIRST_ANSWER) if limit is None else int(limit)
    cost, least = price(model, prompt, answer, own=own), price(model, text, 0, own=own)
    if own is None and isinstance(backend, CustomBackend):
        cost, least = (getattr(backend.engine, "price_usd", value) for value in (cost, least))
    return Reservation(prompt + answer, cost or 0.0, limit is not None, text, least or 0.0)


def counted(backend: Any, request: Mapping[str, Any], response: lm15.Response) -> lm15.Response:
    """The answer with tokens counted by the backend's tokenizer where the server reports none, or 0 of a text."""
    usage, text = response.usage, "\n".join(_strings(response_to_dict(response)["message"]["parts"]))
    if usage.input_tokens and (usage.output_tokens or not text):
        return response
    prompt = usage.input_tokens or _count(backend, "\n".join(_texts(request))) + _format_tokens(request)
    answer = usage.output_tokens or (_count(backend, text) if text else 0)
    return replace(response, usage=replace(usage, input_tokens=prompt, output_tokens=answer))


def _format_tokens(request: Mapping[str, Any]) -> int:
    return _FORMAT * (len(request.get("messages") or ()) + 1)


def _count(backend: Any, text: str) -> int:
    try:
        return int(backend.count_tokens(text))
    except Exception:  # a tokenizer that is not available must not stop a call
        return rough_tokens(text)


def _texts(request: Mapping[str, Any]) -> list[str]:
    """The texts of a request: system prompt, messages, tools and schema, without binary data."""
    schemas = [request.get("tools"), (request.get("config") or {}).get("response_format")]
    return _strings([request.get("system"), request.get("messages")]) + [json_text(part) for part in schemas if part]


def _strings(value: Any) -> list[str]:
    """The strings in messages or their parts, without binary data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [part for key, part in value.items() if key not in ("data", "url", "type", "role")]
    return [text for part in value for text in _strings(part)] if isinstance(value, list | tuple) else []
