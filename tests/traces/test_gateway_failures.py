"""Error responses with any status and broken streams are stored as failures with their kind and text."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.errors import FailureKind
from assay.traces import Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served

OVERLOADED = {"message": "overloaded", "type": "server_error"}
REQUESTS = {"chat": {"messages": [{"role": "user", "content": "hello"}]}, "responses": {"input": "hello"},
         "messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}}  # fmt: skip
KEY = "gateway-key-1"
OWNER = {"Authorization": f"Bearer {KEY}"}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


class Planned:
    """Answers every call with one body, or one stream of events, and a status."""

    def __init__(self) -> None:
        self.body: Any = {}
        self.status = 200
        self.wait: threading.Event | None = None  # between the first event and the others

    def app(self) -> web.Application:
        app = web.Application()
        for path in PATHS.values():
            app.router.add_post(path, self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not isinstance(self.body, list):
            return web.json_response(self.body, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, event in enumerate(self.body):
            if at and self.wait is not None:
                await asyncio.to_thread(self.wait.wait, 10)
            if isinstance(event, bytes):
                await response.write(event)
                continue
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        return response


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[Planned, Store, str]]:
    planned = Planned()
    with (
        Store(tmp_path / "s.db") as store,
        served(planned.app()) as url,
        served(Gateway(store, upstream_of("m", base=url)).app()) as gateway,
    ):
        yield planned, store, gateway


def call_of(store: Store) -> tuple[Any, Transition]:
    store.flush()
    (rollout,) = store.rollouts()
    (transition,) = store.rollout(rollout.id).transitions
    return rollout, transition


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"error": OVERLOADED}),
        ("chat", {"error": "overloaded"}),
        ("chat", {"choices": []}),
        ("chat", {"choices": [None]}),
        ("chat", {"choices": None}),
        ("chat", {"choices": [{"index": 0, "message": None}]}),
        ("chat", {}),
        ("chat", {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "error"}]}),
        (
            "chat",
            {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "error", "error": OVERLOADED}]},
        ),
        ("chat", {"object": "error", **OVERLOADED, "code": 400}),
        ("chat", {"detail": "overloaded"}),
        ("responses", {"error": OVERLOADED}),
        ("responses", {"status": "failed", "output": [], "error": OVERLOADED}),
        ("responses", {"status": "completed"}),
        ("messages", {"type": "error", "error": OVERLOADED}),
        ("messages", {"type": "message", "content": None}),
    ],
    ids=str,
)
def test_status_200_without_an_answer_is_a_failure(
    stage: tuple[Planned, Store, str], dialect: str, body: dict[str, Any]
) -> None:
    planned, store, gateway = stage
    planned.body = body
    status, passed = post(gateway + PATHS[dialect], REQUESTS[dialect], **{"x-assay-end": "1"})
    assert (status, passed) == (200, body)  # the caller gets it as it came
    rollout, transition = call_of(store)
    assert (transition.failure, transition.output) == (FailureKind.MODEL, "")
    assert transition.error is not None
    if "overloaded" in str(body):
        assert "overloaded" in transition.error
    assert rollout.prediction is None


@pytest.mark.parametrize(
    ("status", "error", "kind", "passed"),
    [
        (400, {"message": "too long", "code": "context_length_exceeded"}, "context", 400),
        (400, {"message": "too long", "type": "exceed_context_size_error"}, "context", 400),
        (400, {"message": "context_length_exceeded is what you may think of"}, "model", 400),
        (504, {"message": "late"}, "timeout", 504),
        (500, {"message": "boom"}, "model", 500),
    ],
)
def test_an_upstreams_refusal_has_the_kind_of_its_code(
    stage: tuple[Planned, Store, str], status: int, error: dict[str, str], kind: str, passed: int
) -> None:
    planned, store, gateway = stage
    planned.body, planned.status = {"error": error}, status
    assert post(gateway + PATHS["chat"], REQUESTS["chat"])[0] == passed
    _, transition = call_of(store)
    assert transition.failure == kind


def streamed(gateway: str, dialect: str) -> bytes:
    request = urllib.request.Request(
        gateway + PATHS[dialect],
        data=json.dumps({**REQUESTS[dialect], "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
    return content


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "1", "model": "m", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


CREATED = {"type": "response.created", "response": {"id": "r", "output": []}}
STARTED = {"type": "message_start", "message": {"id": "m", "content": []}}


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        ("chat", [chunk("par"), {"error": OVERLOADED}]),
        ("chat", [{"error": OVERLOADED}]),
        ("chat", [chunk("par"), {"object": "error", **OVERLOADED, "code": 400}]),
        (
            "chat",
            [
                chunk("par"),
                {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error", "error": OVERLOADED}]},
            ],
        ),
        ("chat", [{"detail": "overloaded"}]),
        ("chat", [chunk("par"), b"event: error\ndata: overloaded\n\n"]),
        ("responses", [CREATED, {"type": "error", "code": "server_error", "message": "overloaded"}]),
        (
            "responses",
            [
                CREATED,
                {
                    "type": "response.failed",
                    "response": {"id": "r", "status": "failed", "output": [], "error": OVERLOADED},
                },
            ],
        ),
        ("messages", [STARTED, {"type": "error", "error": OVERLOADED}]),
    ],
)
def test_the_error_of_a_stream_that_breaks_is_kept(
    stage: tuple[Planned, Store, str], dialect: str, events: list[Any]
) -> None:
    planned, store, gateway = stage
    planned.body = events
    assert b"overloaded" in streamed(gateway, dialect)
    _, transition = call_of(store)
    assert transition.failure == FailureKind.MODEL
    assert "overloaded" in (transition.error or "")
    assert transition.output == ("par" if len(events) == 2 and dialect == "chat" else "")


@pytest.mark.parametrize(
    "event",
    [b'data: {"choices": [{"delta": {"con\n\n', b'data: {"id": "\xff\xfe"}\n\n', b"data: upstream timed out\n\n"],
)
def test_a_stream_with_an_event_that_is_not_json_is_a_failure(stage: tuple[Planned, Store, str], event: bytes) -> None:
    planned, store, gateway = stage
    planned.body = [chunk("one "), event, chunk("two", "stop"), "[DONE]"]
    assert event in streamed(gateway, "chat")  # the caller gets it as it came, and cannot read it either
    _, transition = call_of(store)
    assert (transition.failure, transition.output) == (FailureKind.MODEL, "one two")
    assert "is not JSON" in (transition.error or "")


def test_a_stream_that_ends_with_an_error_is_a_failure(stage: tuple[Planned, Store, str]) -> None:
    planned, store, gateway = stage
    planned.body = [chunk("par"), chunk("", "error"), "[DONE]"]
    streamed(gateway, "chat")
    _, transition = call_of(store)
    assert (transition.failure, transition.output) == (FailureKind.MODEL, "par")


@pytest.mark.parametrize(
    "fields", [{"code": "context_length_exceeded"}, {"code": 400, "param": "input_tokens"}, {"code": 40303}]
)
@pytest.mark.parametrize("streams", [True, False])
def test_a_flat_context_error_has_its_kind(
    stage: tuple[Planned, Store, str], streams: bool, fields: dict[str, Any]
) -> None:
    planned, store, gateway = stage
    error = {"object": "error", "message": "too long", **fields}
    planned.body = [error] if streams else error
    if streams:
        streamed(gateway, "chat")
    else:
        post(gateway + PATHS["chat"], REQUESTS["chat"])
    _, transition = call_of(store)
    assert transition.failure == FailureKind.CONTEXT
    assert "too long" in (transition.error or "")


def test_gateway_errors_have_their_status_and_a_valid_failure_kind_is_stored(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "s.db") as store,
        served(Gateway(store, upstream_of("m", base="http://127.0.0.1:9"), key=KEY).app()) as gateway,
    ):
        assert post(gateway + PATHS["chat"], REQUESTS["chat"], **OWNER)[0] == 502
        assert post(f"{gateway}/assay/rollouts/{'0' * 32}/close", {}, **OWNER)[0] == 404
        opened = post(f"{gateway}/assay/rollouts", {"id": "mine"}, **OWNER)[1]["id"]
        assert (
            post(f"{gateway}/assay/rollouts/{opened}/close", {"status": "failed", "failure": "nonsense"}, **OWNER)[0]
            == 422
        )
        assert (
            post(f"{gateway}/assay/rollouts/{opened}/close", {"status": "failed", "failure": "loop"}, **OWNER)[0] == 200
        )
        store.flush()
        kinds = {rollout.id: rollout.failure for rollout in store.rollouts()}
    assert kinds[opened] == FailureKind.LOOP
