"""Sends OTLP to a collector that parses protobuf, over HTTP: batches, retries, and failures that disturb nobody."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.commands.serve import ServeReport, Serving, serve
from assay.commands.traces import export_rollouts
from assay.errors import ConfigError
from assay.traces import Rollout, Store
from assay.traces.otlp.exporter import Endpoint, Exporter, NotSent, send
from assay.traces.otlp.spans import trace_request
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

pytest.importorskip("opentelemetry.proto")
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData


class Collector:
    """An OTLP/HTTP collector. `answers` are the statuses of its next answers; 200 after them. Answers while `open`."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.requests = 0
        self.open = True
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.headers: list[dict[str, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        app.router.add_post("/v1/metrics", self._take)
        return app

    async def _take(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.read()
        while not self.open:
            await asyncio.sleep(0.01)
        self.headers.append(dict(request.headers))
        if self.answers:
            status = self.answers.pop(0)
            return web.Response(status=status, text="not now", headers={"Retry-After": "0"} if status == 503 else {})
        if request.headers["Content-Type"] != "application/x-protobuf":
            return web.Response(status=415)
        if request.path == "/v1/traces":
            data = TracesData.FromString(body)
            self.spans += [span for r in data.resource_spans for s in r.scope_spans for span in s.spans]
        else:
            data = MetricsData.FromString(body)
            self.metrics = [metric for r in data.resource_metrics for s in r.scope_metrics for metric in s.metrics]
        return web.Response()


def until(condition: Callable[[], bool], limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def test_stored_rollouts_are_sent_in_batches_with_the_variables_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(503, 429)
    with served(collector.app()) as address, Store(tmp_path / "a.db") as store:
        for number in range(70):
            store.put_rollout(Rollout(program="p", status="done", inputs={"q": str(number)}, ended_at=2.0))
        store.flush()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{address}/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20c2VjcmV0c2VjcmV0, x-team=a")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        report = export_rollouts("otlp", store=store.url)
    assert (report.rollouts, report.path) == (70, f"{address}/v1/traces")
    assert (len(collector.spans), collector.requests) == (70, 4)  # two batches, two tries more
    assert collector.headers[0]["Authorization"] == "Basic c2VjcmV0c2VjcmV0"
    assert (collector.headers[0]["x-team"], collector.headers[0]["Content-Encoding"]) == ("a", "gzip")
    assert len({span.trace_id for span in collector.spans}) == 70


def test_refusals_are_not_tried_again_and_a_server_that_is_away_is() -> None:
    request = trace_request([Rollout(program="p", ended_at=2.0)])
    collector = Collector(400)
    with served(collector.app()) as address:
        with pytest.raises(NotSent, match="answered 400: not now"):
            send(Endpoint.of(address), request, first_s=0.01)
        assert collector.requests == 1
        waits: list[float] = []
        collector.answers = [503, 502, 504, 429, 503]
        with pytest.raises(NotSent, match="503"):
            send(Endpoint.of(address), request, wait=lambda s: bool(waits.append(s)))  # type: ignore[func-returns-value]
    assert waits[0] == 0.0  # Retry-After
    assert 1.0 <= waits[1] <= 2.0 <= waits[2] <= 4.0 <= waits[3] <= 8.0
    with pytest.raises(NotSent, match="Connection"):
        send(Endpoint.of("http://127.0.0.1:9"), request, tries=2, first_s=0.01)


def test_endpoints_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, message in (
        ("ENDPOINT", "collector:4318", "http or https"), ("PROTOCOL", "grpc", "http/protobuf or http/json"),
        ("HEADERS", "secret", "key=value"),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
            patched.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
            with pytest.raises(ConfigError, match=message):
                Endpoint.of()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/t?x=1")
    assert (Endpoint.of().traces, Endpoint.of().metrics) == ("http://c/t?x=1", "")
    assert Endpoint.of("http://d").traces == "http://d/v1/traces"


@pytest.mark.timeout(120)
def test_an_endpoint_that_fails_is_logged_and_nothing_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(*[400] * 2)
    with served(collector.app()) as address, Store(tmp_path / "a.db") as store:
        exporter = Exporter(Endpoint.of(address), [store], delay_s=0.0, first_s=0.01)
        exporter.start()
        for number in range(3):
            rollout = Rollout(program="p", status="done", inputs={"q": str(number)}, ended_at=2.0)
            collector.open = False
            store.put_rollout(rollout)
            store.put_rollout(rollout)  # its score
            collector.open = True
            until(lambda number=number: exporter.failed + exporter.sent == number + 1)  # type: ignore[misc]
        exporter.stop()
    assert exporter.to_dict() == {"sent": 1, "failed": 2, "waiting": 0}
    assert [r.levelno for r in caplog.records if "answered 400" in r.message] == [logging.WARNING]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["content", "structure"])
def test_a_gateway_sends_its_rollouts_and_metrics_as_they_end(tmp_path: Path, kind: str) -> None:
    collector, started = Collector(), threading.Event()
    running: list[Serving] = []
    counts: list[ServeReport] = []

    def on_start(serving: Serving) -> None:
        running.append(serving)
        started.set()

    def run() -> None:
        options = {"otlp": kind, "otlp_endpoint": address, "on_start": on_start}
        counts.append(serve(upstream=model, model="m", port=0, store=tmp_path / "a.db", **options))

    with served(ScriptedUpstream().app()) as model, served(collector.app()) as address:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(120)
        url, headers = running[0].url, {"Authorization": f"Bearer {running[0].key}"}
        _, opened = post(f"{url}/assay/rollouts", {"inputs": {"q": "sum"}}, **headers)
        body = {"model": "m", "messages": [{"role": "user", "content": "secret question"}]}
        post(f"{url}/r/{opened['id']}/v1/chat/completions", body, **headers)
        post(f"{url}/assay/rollouts/{opened['id']}/close", {"status": "done"}, **headers)
        running[0].stop()
        thread.join(60)
    assert counts[0].otlp == {"sent": 1, "failed": 0, "waiting": 0}
    assert sorted(span.name.split()[0] for span in collector.spans) == ["chat", "invoke_agent"]
    assert (b"secret question" in b"".join(s.SerializeToString() for s in collector.spans)) is (kind == "content")
    calls = next(metric for metric in collector.metrics if metric.name == "assay.gateway.calls")
    assert calls.sum.data_points[0].as_int == 1
