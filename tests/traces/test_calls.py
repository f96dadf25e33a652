"""A call is sent before it is recorded, and is recorded whatever happens to it."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.traces import Store
from assay.traces.gateway.calls import Call
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[ScriptedUpstream, Gateway, str]]:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind))
        with served(gateway.app()) as url:
            yield upstream, gateway, url


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
