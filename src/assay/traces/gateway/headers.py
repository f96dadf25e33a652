"""Headers that a gateway forwards, in both directions.

Left out are headers of a single connection, headers that describe its bytes, and the gateway's own.
"""

from collections.abc import Mapping

from multidict import CIMultiDict

__all__ = ["KEYS", "readable", "request_headers", "response_headers"]

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
