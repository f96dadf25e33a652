"""A call of an upstream and its reply as it is passed on, and replies that the gateway writes itself."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from assay.models.calls import Call
from assay.support.scrubbing import message

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
    """A reply whose status has arrived: status, headers to pass on, and the body's chunks as they arrive.

    Attributes:
        call: how a model of this process was called for it.
        shown_tasks: keys of the tasks in the demonstrations of the request, as far as they are known.
        unsent: whether a cap or a signal kept the call from being sent: it is not counted or stored.
    """

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    call: Call | None = None
    shown_tasks: tuple[str, ...] = ()
    unsent: bool = False


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


# -- Headers that a gateway forwards, in both directions.
#
# Left out are headers of a single connection, headers that describe its bytes, and the gateway's own.


KEYS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")  # headers in which clients send a provider's key
# RFC 9110, section 7.6.1. Headers that `Connection` lists are added per request.
_CONNECTION = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "trailers", "transfer-encoding", "upgrade",
))  # fmt: skip
_BYTES = frozenset(("content-length", "content-encoding"))  # both bodies are decompressed on reading
_REQUEST_ONLY = frozenset(("host", "accept-encoding", "expect"))
_OURS = "x-assay-"


def request_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of a caller's request, as sent to the upstream."""
    return _forwarded(headers, _REQUEST_ONLY)


def response_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of an upstream's answer, as sent to the caller."""
    return _forwarded(headers, frozenset())


def _forwarded(headers: Mapping[str, str], also: frozenset[str]) -> CIMultiDict[str]:
    listed = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for name in value.split(",")
    }
    dropped = _CONNECTION | _BYTES | also | listed
    return CIMultiDict(
        (key, readable(value))
        for key, value in headers.items()
        if key.lower() not in dropped and not key.lower().startswith(_OURS)
    )


def readable(value: str) -> str:
    """A header value decoded as UTF-8, else as Latin-1, which browsers and Node send.

    aiohttp would drop bytes that are not UTF-8. The value is sent as UTF-8.
    """
    if value.isascii():
        return value
    data = value.encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")
