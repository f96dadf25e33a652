"""A call of an upstream and its reply as it is passed on, and replies that the gateway writes itself."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from assay.support.scrubbing import message

__all__ = ["IDLE_S", "JSON", "STREAM", "Reply", "UpstreamCall", "error_response", "json_reply", "once"]

IDLE_S = 600.0  # reasoning models may send nothing for minutes
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}  # streams that the gateway writes itself
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class UpstreamCall:
    """A request of one dialect, for an upstream.

    Attributes:
        raw: the request's body as received.
        query: query string of its address.
        path: path of its address if it is not the dialect's own: Azure's has the deployment, Gemini's the model.
    """

    dialect: str
    body: dict[str, Any]
    raw: bytes
    headers: Mapping[str, str]
    query: str = ""
    path: str = ""


@dataclass
class Reply:
    """A reply whose status has arrived: status, headers to pass on, and the body's chunks as they arrive."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def json_reply(status: int, body: Any) -> Reply:
    """A JSON reply that the gateway writes itself."""
    return Reply(status, JSON, once(json.dumps(body).encode()))


def error_response(
    status: int, text: str, *, rollout: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An error of the gateway itself, in the JSON shape that clients of all dialects read."""
    headers = {**(headers or {}), **({"x-assay-rollout": rollout} if rollout else {})}
    body = {"type": "error", "error": {"message": message(text), "type": "assay_gateway", "code": status}}
    return web.json_response(body, status=status, headers=headers)
