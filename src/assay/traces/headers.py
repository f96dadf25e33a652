"""Which headers a gateway passes on, both ways: all but those of one connection, those that describe the bytes of one, and the gateway's own."""

from collections.abc import Mapping

from multidict import CIMultiDict

__all__ = ["KEYS", "request_headers", "response_headers"]

KEYS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")  # in which clients send a provider's key
# RFC 9110, section 7.6.1, and what `Connection` names.
_CONNECTION = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer", "trailers", "transfer-encoding",
    "upgrade",
))  # fmt: skip
_BYTES = frozenset(("content-length", "content-encoding"))  # both bodies are read uncompressed
_ASKED = frozenset(("host", "accept-encoding", "expect"))
_OURS = "x-assay-"


def request_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of a caller's request, as the upstream gets them."""
    return _kept(headers, _ASKED)


def response_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of an upstream's answer, as the caller gets them."""
    return _kept(headers, frozenset())


def _kept(headers: Mapping[str, str], also: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for key, value in headers.items() if key.lower() == "connection" for name in value.split(",")}
    left = _CONNECTION | _BYTES | also | named
    return CIMultiDict((key, _readable(value)) for key, value in headers.items() if key.lower() not in left and not key.lower().startswith(_OURS))


def _readable(value: str) -> str:
    """A value whose bytes are no UTF-8 as Latin-1, which browsers and Node send: aiohttp would leave these bytes out. It is sent as UTF-8."""
    if value.isascii():
        return value
    data = value.encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")
