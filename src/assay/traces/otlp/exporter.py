"""Sends the rollouts and metrics of a process as they come, in a thread of its own.

Whatever the endpoint does, nothing that calls `ended` waits or fails: what cannot be sent is counted and logged. The
metrics are counts of a gateway and its agents, with the names of `metric_names`.
"""

import base64
import gzip
import http.client
import importlib
import json
import logging
import math
import os
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from assay.errors import AssayError, ConfigError, MissingExtra, UnknownRollout
from assay.support.numbers import counted
from assay.support.package import __version__
from assay.support.places import check_new_file, writing
from assay.support.report import Report
from assay.support.scrubbing import add_secrets, error_text
from assay.traces.export.restrictions import Leaving
from assay.traces.otlp.spans import VERSION, attributes_of, resource, scope, trace_request
from assay.traces.records import Rollout, subject_digest
from assay.traces.store import Store

# -- The metrics of a gateway and its agents: one table, from which `GET /metrics` and OTLP have names, units and texts.
#
# A change of a name or a meaning increases `names.VERSION`, which both send as the metric `assay.mapping.version`.


COUNTER, GAUGE, DURATION = "counter", "gauge", "histogram"
_PROMETHEUS_UNITS = {"s": "seconds"}  # units in braces, such as {call}, are not part of a name


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric.

    Attributes:
        name: in OTLP.
        unit: of UCUM; in braces what is counted.
        kind: counter, gauge, or histogram (sum and number of values, without buckets).
        text: description, in both formats.
        labels: names in Prometheus; in OTLP they have the prefix `assay.`.
    """

    name: str
    unit: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """Name in Prometheus, by the rules of OpenTelemetry: underscores, the unit, `_total` for counters."""
        unit = _PROMETHEUS_UNITS.get(self.unit)
        parts = [self.name.replace(".", "_"), *([unit] if unit else []), *(["total"] if self.kind == COUNTER else [])]
        return "_".join(parts)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of a metric; of a histogram the sum of `count` values."""

    value: float | int
    labels: Mapping[str, str]
    count: int = 1


def _counts(name: str, unit: str, kind: str, text: str, *labels: str) -> Measure:
    return Measure(name=name, unit=unit, kind=kind, text=text, labels=labels)


# key of the gateway's counts, or of an agent's -> metric
METRICS: dict[str, Measure] = {
    "calls": _counts("assay.gateway.calls", "{call}", COUNTER, "LM calls that were sent to a model."),
    "stored": _counts("assay.gateway.calls.stored", "{call}", COUNTER, "LM calls that are in the store."),
    "unrecorded": _counts("assay.gateway.calls.unrecorded", "{call}", COUNTER, "LM calls that are not in the store."),
    "in_flight": _counts("assay.gateway.calls.in_flight", "{call}", GAUGE, "LM calls that are not answered yet."),
    "rows_waiting": _counts("assay.gateway.rows_waiting", "{row}", GAUGE, "Rows that wait for the database."),
    "open": _counts("assay.gateway.rollouts.open", "{rollout}", GAUGE, "Rollouts that are open."),
    "rollouts": _counts(
        "assay.agent.rollouts", "{rollout}", COUNTER, "Rollouts by agent, version, arm and status.",
        "agent", "version", "arm", "status",
    ),
    "seconds": _counts(
        "assay.agent.rollout.duration", "s", DURATION, "Duration of rollouts.", "agent", "version", "arm"
    ),
    "fallbacks": _counts(
        "assay.agent.fallbacks", "{rollout}", COUNTER, "Rollouts of a version that the champion took over.",
        "agent", "version",
    ),
    "mapping": _counts("assay.mapping.version", "1", GAUGE, "Version of these names."),
}  # fmt: skip


def points_of(stats: Mapping[str, Any], agents: Mapping[str, Any]) -> Iterator[tuple[Measure, list[Point]]]:
    """The metrics that have values, in the order of `METRICS`.

    Args:
        stats: the counts of the gateway; other keys are not metrics.
        agents: deployed agents by name, see `assay.traces.gateway.routes.AgentRunner`.
    """
    points: dict[str, list[Point]] = {key: [Point(value=stats[key], labels={})] for key in METRICS if key in stats}
    points["mapping"] = [Point(value=VERSION, labels={})]
    for agent, runner in agents.items():
        counts = dict(runner.counts)
        for key, values in (("rollouts", counts), ("seconds", dict(runner.seconds)), ("fallbacks", runner.fallbacks)):
            for at, value in sorted(dict(values).items()):
                of_it = at if isinstance(at, tuple) else (at,)
                number = sum(count for each, count in counts.items() if each[:2] == of_it) if key == "seconds" else 1
                labels = dict(zip(METRICS[key].labels, (agent, *of_it), strict=True))
                points.setdefault(key, []).append(Point(value=value, labels=labels, count=number))
    return ((METRICS[key], points[key]) for key in METRICS if key in points)


# -- Metrics.


_CUMULATIVE = 2


def metrics_request(
    stats: Mapping[str, Any], agents: Mapping[str, Any], *, since: float, now: float, service: str = "assay"
) -> dict[str, Any]:
    """An export request in OTLP's JSON encoding.

    Args:
        stats: the counts of the gateway.
        agents: deployed agents by name, see `assay.traces.gateway.routes.AgentRunner`.
        since: when the process began to count, seconds since the epoch.
        now: seconds since the epoch.
    """
    times = {"startTimeUnixNano": str(int(since * 1e9)), "timeUnixNano": str(int(now * 1e9))}
    metrics = [_metric(measure, points, times) for measure, points in points_of(stats, agents)]
    scopes = [{"scope": scope(), "metrics": metrics}]
    return {"resourceMetrics": [{"resource": resource(service), "scopeMetrics": scopes}]}


def _metric(measure: Measure, points: Sequence[Point], times: Mapping[str, str]) -> dict[str, Any]:
    rises = measure.kind in (COUNTER, DURATION)
    data = [
        {
            **(times if rises else {"timeUnixNano": times["timeUnixNano"]}),
            **(_summed(point) if measure.kind == DURATION else _value(point.value)),
            "attributes": attributes_of({f"assay.{label}": text for label, text in point.labels.items()}),
        }
        for point in points
    ]
    kind: dict[str, Any] = {"dataPoints": data}
    if rises:
        kind["aggregationTemporality"] = _CUMULATIVE
    if measure.kind == COUNTER:
        kind["isMonotonic"] = True
    name = {COUNTER: "sum", DURATION: "histogram"}.get(measure.kind, "gauge")
    return {"name": measure.name, "unit": measure.unit, "description": measure.text, name: kind}


def _value(value: float | int) -> dict[str, Any]:
    return {"asInt": str(value)} if isinstance(value, int) else {"asDouble": value}


def _summed(point: Point) -> dict[str, Any]:
    return {"count": str(point.count), "sum": float(point.value), "bucketCounts": [str(point.count)]}


# -- Sends export requests to an OTLP/HTTP endpoint: encoding, headers, retries with backoff.


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
            pause = min(_LONGEST_S, pause)
            if wait is None:
                time.sleep(pause)
            elif wait(pause):
                raise


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


# -- Exporter.


_LOG = logging.getLogger("assay.otlp")
_WAITING = 10_000  # rollouts that wait at most; the oldest are dropped
_BATCH = 64  # rollouts of a request
_SENT = 20_000  # ids that are remembered, so that a rollout whose score comes later is not sent twice
_READ_AGAIN_S = 60.0  # how old what is known of sealed tasks and erased people may be
_QUIET_S = 60.0  # between two lines of the log


class Exporter:
    """Exports ended rollouts and metrics until it is stopped.

    Args:
        stores: where the rollouts are written; `ended` is set as their listener.
        rollouts: whether rollouts are sent.
        content: with texts.
        tenants: whose rollouts are sent, besides those without a tenant.
        metrics: returns the counts of the gateway and its agents, for `metrics_request`.
        delay_s: how long after its end a rollout is read from the store, so that its score is there.
        metrics_s: seconds between two requests with metrics.
        first_s: pause before the second try of a request.
    Attributes:
        sent, failed: rollouts that were sent, and that were not. Those that may not leave count as neither.
    """

    def __init__(
        self, endpoint: Endpoint, stores: Sequence[Store], *, rollouts: bool = True, content: bool = True,
        tenants: Sequence[str] = (), metrics: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None,
        delay_s: float = 5.0, metrics_s: float = 60.0, first_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.endpoint, self.stores, self.content, self.tenants = endpoint, list(stores), content, tenants
        self.metrics, self.delay_s, self.metrics_s, self.first_s = metrics, delay_s, metrics_s, first_s
        self.sent = self.failed = 0
        self._since = time.time()
        self._permits: dict[int, tuple[float, Leaving]] = {}
        self._waiting: deque[tuple[float, int, str]] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._logged_at = -_QUIET_S
        self._thread = threading.Thread(target=self._running, name="otlp", daemon=True)
        if rollouts:
            for number, store in enumerate(self.stores):
                store.on_ended = partial(self.ended, store=number)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Sends what waits, each request once, for at most `timeout_s`."""
        for store in self.stores:
            store.on_ended = None
        self._stopping.set()
        self._thread.join(timeout_s)

    def ended(self, rollout: str, store: int = 0) -> None:
        """Takes note of a rollout that has ended. Does not wait."""
        with self._lock:
            if rollout in self._known:
                return
            self._known[rollout] = None
            if len(self._known) > _SENT:
                self._known.popitem(last=False)
            self._waiting.append((time.monotonic() + self.delay_s, store, rollout))
            if len(self._waiting) > _WAITING:
                self._waiting.popleft()
                self.failed += 1

    def to_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "failed": self.failed, "waiting": len(self._waiting)}

    def _running(self) -> None:
        measured = time.monotonic()
        while not self._stopping.wait(min(1.0, self.delay_s or 0.05, self.metrics_s)):
            self._tick()
            if time.monotonic() - measured >= self.metrics_s:
                measured = time.monotonic()
                self._guarded(self._send_metrics)
        self._tick()
        self._guarded(self._send_metrics)

    def _tick(self) -> None:
        while batch := self._due():
            if not self._guarded(partial(self._send, batch)):
                self.failed += len(batch)

    def _due(self) -> list[tuple[int, str]]:
        now = time.monotonic()
        batch: list[tuple[int, str]] = []
        with self._lock:
            while self._waiting and len(batch) < _BATCH and (self._waiting[0][0] <= now or self._stopping.is_set()):
                batch.append(self._waiting.popleft()[1:])
        return batch

    def _send(self, batch: Sequence[tuple[int, str]]) -> None:
        rollouts = []
        for at in {store for store, _ in batch}:
            self.stores[at].flush()
        for at, name in batch:
            try:
                rollout = self.stores[at].rollout(name)
            except UnknownRollout:  # erased meanwhile
                continue
            if self._leaving(at).permits(rollout):
                rollouts.append(rollout)
        if rollouts:
            self._post(trace_request(rollouts, content=self.content))
            self.sent += len(rollouts)

    def _leaving(self, store: int) -> Leaving:
        """What may leave a store. Read again at intervals, because data subjects are erased and jobs seal tasks."""
        made, leaving = self._permits.get(store, (-math.inf, None))
        if leaving is None or time.monotonic() - made > _READ_AGAIN_S:
            leaving = Leaving(self.stores[store], tenants=self.tenants, content=self.content, thorough=False)
            self._permits[store] = (time.monotonic(), leaving)
        return leaving

    def _send_metrics(self) -> None:
        if self.metrics is not None and self.endpoint.metrics:
            stats, agents = self.metrics()
            self._post(metrics_request(stats, agents, since=self._since, now=time.time()))

    def _post(self, request: Mapping[str, Any]) -> None:
        tries = 1 if self._stopping.is_set() else 5
        send(self.endpoint, request, tries=tries, first_s=self.first_s, wait=self._stopping.wait)

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Runs `work`; errors are logged, at most one per `_QUIET_S`."""
        try:
            work()
            return True
        except Exception as error:  # also a record that cannot be encoded: the thread must not end
            self._tell(error_text(error))
        return False

    def _tell(self, text: str) -> None:
        if time.monotonic() - self._logged_at >= _QUIET_S:
            self._logged_at = time.monotonic()
            _LOG.warning("OTLP export: %s", text)


# -- Exports stored rollouts as OTLP traces to a file or an endpoint, in batches.


@dataclass(frozen=True, kw_only=True, repr=False)
class TracesExportReport(Report):
    """What was exported.

    Attributes:
        path: the file, or the address of the endpoint.
        rollouts: rollouts that were exported.
        transitions: their LM calls.
        withheld: rollouts that were left out: sealed, of other tenants or erased people, without consent, or with
            prompts that show such a task.
    """

    path: str
    rollouts: int
    transitions: int
    withheld: int

    def lines(self) -> Iterator[str]:
        withheld = f"; {counted(self.withheld, 'rollouts')} left out (split, tenant or consent)"
        exported = f"{counted(self.rollouts, 'rollouts')} with {counted(self.transitions, 'LM calls')}: {self.path}"
        yield exported + (withheld if self.withheld else "")


def export_traces(
    store: Store, ids: Iterable[str], *, file: Path | None, endpoint: str | None = None, content: bool = True,
    tenants: Sequence[str] = (),
) -> TracesExportReport:  # fmt: skip
    """Exports rollouts by their ids.

    Args:
        file: JSON lines, or protobuf (each request after its length, as the collector's file exporter writes it) if
            its name ends with `.pb`; None sends to `endpoint`.
        content: with texts.
        tenants: whose rollouts are exported, besides those without a tenant.
    Raises:
        ConfigError: the file exists or cannot be written, or see `Endpoint.of`.
        NotSent: see `send`.
    """
    leaving, counts, people = Leaving(store, tenants=tenants, content=content), Counter[str](), set[str]()

    def permitted() -> Iterator[Rollout]:
        for rollout in map(store.rollout, ids):
            if leaving.permits(rollout):
                yield rollout
            else:
                counts["withheld"] += 1

    def requests() -> Iterator[dict[str, Any]]:
        rollouts = permitted()
        while batch := list(islice(rollouts, _BATCH)):
            people.update(subject_digest(rollout.data_subject) for rollout in batch if rollout.data_subject)
            yield trace_request(batch, content=content)
            counts.update(rollouts=len(batch), transitions=sum(len(rollout.transitions) for rollout in batch))

    if file is None:
        target = Endpoint.of(endpoint)
        for request in requests():
            send(target, request)
    else:
        check_new_file(file, "file")
        store.put_searched(file)  # first, so that erasure finds it after a kill too
        with writing(file) as place, place.open("wb") as stream:
            for request in requests():
                _write(stream, request, is_protobuf=file.suffix == ".pb")
        store.put_artifact(str(file.resolve()), sorted(people))
    amounts = {name: counts[name] for name in ("rollouts", "transitions", "withheld")}
    return TracesExportReport(path=str(file) if file is not None else target.traces, **amounts)


def _write(stream: BinaryIO, request: dict[str, Any], *, is_protobuf: bool) -> None:
    if is_protobuf:
        body = encoded(request, PROTOBUF)
        stream.write(len(body).to_bytes(4, "big") + body)
    else:
        stream.write(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
