"""A call is sent before it is recorded, and is recorded whatever happens to it."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from assay.errors import FailureKind
from assay.traces import Store, Transition
from assay.traces.gateway.calls import Call, Turns, sent
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import Reply, upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[ScriptedUpstream, Gateway, str]]:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind))
        with served(gateway.app()) as url:
            yield upstream, gateway, url


def calls_of(store: Store) -> list[Transition]:
    store.flush()
    return [call for rollout in store.rollouts() for call in store.rollout(rollout.id).transitions]


@pytest.mark.parametrize("named", [{}, {"x-assay-rollout": "mine"}], ids=["by its conversation", "named"])
def test_the_upstream_has_the_request_before_the_gateway_reads_its_conversation(
    stage: tuple[ScriptedUpstream, Gateway, str], monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    upstream, _, url = stage
    assert (
        post(f"{url}/v1/chat/completions", CHAT, **named)[0] == 200
    )  # the connection to the upstream is there from now on
    plain, had = Call.begin, []

    def begin(call: Call, to: Any) -> None:
        end = time.monotonic() + 120
        while upstream.calls < 2 and time.monotonic() < end:  # in this thread, which would have to send it
            time.sleep(0.01)
        had.append(upstream.calls)
        plain(call, to)

    monkeypatch.setattr(Call, "begin", begin)
    assert post(f"{url}/v1/chat/completions", CHAT, **named)[0] == 200
    assert had == [2]


def test_an_open_rollout_keeps_its_model_when_another_is_served(tmp_path: Path) -> None:
    old, new = ScriptedUpstream(name="old"), ScriptedUpstream(name="new")
    with Store(tmp_path / "s.db") as store, served(old.app()) as old_url, served(new.app()) as new_url:
        gateway = Gateway(store, upstream_of("old", base=old_url))
        with served(gateway.app()) as url:
            answer = post(f"{url}/v1/chat/completions", CHAT)[1]["choices"][0]["message"]
            gateway.serve_model(upstream_of("new", base=new_url))
            more = [*CHAT["messages"], answer, {"role": "user", "content": "and more"}]
            assert post(f"{url}/v1/chat/completions", {"messages": more})[1]["model"] == "old"
            assert (
                post(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "other"}]})[1]["model"]
                == "new"
            )
    assert (old.calls, new.calls) == (2, 1)


def test_a_call_whose_client_disconnects_at_once_is_recorded(stage: tuple[ScriptedUpstream, Gateway, str]) -> None:
    _, gateway, url = stage
    body = json.dumps({"messages": [{"role": "user", "content": "#hang"}]}).encode()
    sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    sock.close()
    end = time.monotonic() + 120
    while not gateway.stored:
        assert time.monotonic() < end
        time.sleep(0.02)
    (call,) = calls_of(gateway.store)
    assert (call.failure, gateway.started, gateway.unrecorded) == (FailureKind.CAP, 1, 0)


@pytest.mark.parametrize("stops", ["at once", "while it waits", "by an error"])
def test_a_sent_request_is_cancelled_with_its_call(stops: str) -> None:
    noted: list[str] = []

    @asynccontextmanager
    async def asking() -> AsyncIterator[Reply]:
        noted.append("sent")
        try:
            await asyncio.sleep(3600 if stops == "while it waits" else 0.05)
            yield Reply(200, {}, None)  # type: ignore[arg-type]
        finally:
            noted.append("ended")

    def meanwhile() -> None:
        noted.append("noted")
        if stops == "by an error":
            raise ValueError

    async def call() -> None:
        async with sent(asking(), Turns(), meanwhile):
            noted.append("answered")

    async def run() -> None:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        if stops == "while it waits":
            await asyncio.sleep(0.1)
        elif stops == "at once":
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, ValueError)):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert noted == ["sent", "noted", "ended"]


@pytest.mark.slow
def test_streamed_text_is_forwarded_before_the_call_is_recorded(
    stage: tuple[ScriptedUpstream, Gateway, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the whole stream came at once; its end waits, as the client's next call may come with it."""
    last = b'"content": "o"'  # of "hello"
    _, _, url = stage
    original, received_before, received = Call.keep, list[bytes](), list[bytes]()

    def keep(call: Call) -> bool:
        end = time.monotonic() + 120
        while last not in b"".join(received) and time.monotonic() < end:  # in the gateway's own thread
            time.sleep(0.01)
        received_before.append(b"".join(received))
        return original(call)

    monkeypatch.setattr(Call, "keep", keep)
    body = json.dumps({**CHAT, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=120) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        while part := sock.recv(65536):
            received.append(part)
    (before,) = received_before
    assert b"[DONE]" in b"".join(received)
    assert last in before
    assert b"[DONE]" not in before
    assert b'"finish_reason": "stop"' not in before


def test_calls_are_recorded_one_per_iteration_of_the_event_loop() -> None:
    noted: list[str] = []

    async def busy() -> None:
        for _ in range(8):
            noted.append("-")
            await asyncio.sleep(0)

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(
            *(turns.record(lambda number=number: noted.append(str(number))) for number in range(4)), busy()
        )

    asyncio.run(run())
    text = "".join(noted)
    assert [c for c in text if c != "-"] == ["0", "1", "2", "3"]
    assert not any(pair in text for pair in ("01", "12", "23")), text
