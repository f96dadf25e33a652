"""Sends export requests to an OTLP/HTTP endpoint: encoding, headers, retries with backoff."""

import base64
import gzip
import http.client
import importlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from assay.errors import AssayError, ConfigError, MissingExtra
from assay.support.package import __version__
from assay.support.scrubbing import add_secrets

__all__ = ["Endpoint", "NotSent", "encoded", "post", "send"]

PROTOBUF, JSON = "http/protobuf", "http/json"
_RETRIED = (429, 502, 503, 504)  # OTLP/HTTP specification, "Retryable response codes"
_TRIES = 5
_FIRST_S, _LONGEST_S = 1.0, 30.0  # pauses between tries
_ANSWER = 64 << 10  # bytes of an answer that are read


class NotSent(AssayError):
    """A request that the endpoint has not taken.

    Attributes:
        again: whether a later try may succeed.
        after_s: how long the endpoint asks to wait; None if it does not say.
    """

    def __init__(self, text: str, *, again: bool, after_s: float | None = None) -> None:
        super().__init__(text)
        self.again, self.after_s = again, after_s


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where traces and metrics are sent.

    Attributes:
        traces, metrics: the full addresses.
        headers: sent with each request; may hold keys.
        protocol: http/protobuf or http/json.
    """

    traces: str
    metrics: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    protocol: str = PROTOBUF
    gzip: bool = False
    timeout_s: float = 10.0

    @classmethod
    def of(cls, base: str | None = None) -> "Endpoint":
        """The endpoint at a base address, by default that of the environment, with the usual variables.

        Reads `OTEL_EXPORTER_OTLP_ENDPOINT`, `…_TRACES_ENDPOINT`, `…_METRICS_ENDPOINT`, `…_HEADERS`, `…_PROTOCOL` and
        `…_COMPRESSION`.

        Raises:
            ConfigError: there is no address, it is none, or the protocol is not over HTTP.
            MissingExtra: `http/protobuf` without `opentelemetry-proto`.
        """
        named = base or _variable("ENDPOINT")
        traces, metrics = (None, None) if base else (_variable("TRACES_ENDPOINT"), _variable("METRICS_ENDPOINT"))
        if named is None and traces is None:
            raise ConfigError("no OTLP endpoint: set OTEL_EXPORTER_OTLP_ENDPOINT, or name an address")
        base = (named or "").rstrip("/")
        addresses = [traces or f"{base}/v1/traces", metrics or (f"{base}/v1/metrics" if base else "")]
        for address in filter(None, addresses):
            if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
                raise ConfigError(f"the OTLP endpoint {address!r} must be an http or https address")
        protocol = _variable("PROTOCOL") or PROTOBUF
        if protocol not in (PROTOBUF, JSON):
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} must be {PROTOBUF} or {JSON}")
        if protocol == PROTOBUF:
            _messages("trace", "TracesData")
        return cls(
            traces=addresses[0], metrics=addresses[1], headers=_headers(_variable("HEADERS") or ""), protocol=protocol,
            gzip=(_variable("COMPRESSION") or "none") == "gzip",
        )  # fmt: skip


def _variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or None


def _headers(text: str) -> dict[str, str]:
    """`key=value,key=value`, with values in URL encoding."""
    headers = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("OTEL_EXPORTER_OTLP_HEADERS must be key=value pairs with commas between them")
        headers[name.strip()] = unquote(value.strip())
        if len(headers[name.strip()]) >= 8:
            add_secrets(headers[name.strip()])
    return headers


def _messages(kind: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"opentelemetry.proto.{kind}.v1.{kind}_pb2"), name)
    except ModuleNotFoundError as error:
        raise MissingExtra("opentelemetry-proto", "otlp") from error


def encoded(request: Mapping[str, Any], protocol: str = PROTOBUF) -> bytes:
    """The body of a request that `trace_request` or `metrics_request` made.

    Raises:
        MissingExtra: `http/protobuf` without `opentelemetry-proto`.
    """
    if protocol == JSON:
        return json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    kind, name = ("trace", "TracesData") if "resourceSpans" in request else ("metrics", "MetricsData")
    message = _messages(kind, name)()
    importlib.import_module("google.protobuf.json_format").ParseDict(_with_base64(request), message)
    return bytes(message.SerializeToString())


def _with_base64(value: Any) -> Any:
    """The request with ids as protobuf's JSON has them; OTLP's has hex."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else _with_base64(item)
            for key, item in value.items()
        }
    return [_with_base64(item) for item in value] if isinstance(value, list) else value


def send(
    endpoint: Endpoint, request: Mapping[str, Any], *, tries: int = _TRIES, first_s: float = _FIRST_S,
    wait: Callable[[float], bool] | None = None,
) -> None:  # fmt: skip
    """Sends a request, and tries again after a pause that doubles, or is as long as the endpoint asks for.

    Args:
        wait: waits for seconds; returns whether to give up. By default `time.sleep`.
    Raises:
        NotSent: the endpoint refused it, or did not take it in `tries`.
    """
    address = endpoint.traces if "resourceSpans" in request else endpoint.metrics
    body = encoded(request, endpoint.protocol)
    for number in range(tries):
        try:
            return post(endpoint, address, body)
        except NotSent as error:
            if not error.again or number + 1 == tries:
                raise
            pause = error.after_s
            if pause is None:
                pause = min(_LONGEST_S, first_s * 2**number) * random.uniform(0.5, 1.0)
            if (wait or _sleep)(min(_LONGEST_S, pause)):
                raise


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def post(endpoint: Endpoint, address: str, body: bytes) -> None:
    """One POST with a time limit on all of it.

    Raises:
        NotSent: it was not taken.
    """
    parts = urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {
        "Content-Type": "application/json" if endpoint.protocol == JSON else "application/x-protobuf",
        "User-Agent": f"assay/{__version__}",
        **endpoint.headers,
    }
    if endpoint.gzip:
        headers["Content-Encoding"], body = "gzip", gzip.compress(body, 6)
    connection = kind(parts.hostname or "", parts.port, timeout=endpoint.timeout_s)
    stop = threading.Timer(2 * endpoint.timeout_s, connection.close)  # a server that sends a byte from time to time
    stop.daemon = True
    stop.start()
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        text = answer.read(_ANSWER)
    except (OSError, http.client.HTTPException, AttributeError) as error:  # AttributeError: closed by the timer
        raise NotSent(f"{parts.netloc}: {type(error).__name__}: {error}", again=True) from None
    finally:
        stop.cancel()
        connection.close()
    if not 200 <= answer.status < 300:
        raise NotSent(
            f"{parts.netloc} answered {answer.status}: {text[:200].decode('utf-8', 'replace')}",
            again=answer.status in _RETRIED, after_s=_after(answer.headers.get("Retry-After")),
        )  # fmt: skip


def _after(value: str | None) -> float | None:
    """Seconds of a `Retry-After`, which is a number or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
