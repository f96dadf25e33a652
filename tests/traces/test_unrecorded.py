"""LM calls that other clients make inside a rollout are counted, once each; where they cannot be seen the count is unknown."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import dspy
import httpx
import litellm
import openai
import pytest
import requests

import assay
from assay.models import get_lm
from assay.models.transports import is_lm_request
from assay.testing.serving import served
from assay.testing.upstream import ScriptedUpstream
from assay.traces import Recorder, Rollout, Store
from assay.traces.gateway import Gateway
from assay.traces.missed import Unrecorded
from assay.traces.upstreams import upstream_of

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
REASONS = {"process": "a process was started", "socket": "a client that is not known opened a connection"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(ScriptedUpstream().app()) as url:
        yield url


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
        await answer.read()


async def by_httpx(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/messages", json={**BODY, "max_tokens": 9})


async def by_openai(url: str) -> None:
    await openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY)


def by_urllib(url: str) -> None:
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(asked, timeout=20).read()


def in_a_thread(url: str) -> None:
    thread = threading.Thread(target=by_urllib, args=(url,))
    thread.start()
    thread.join()


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY),
    "openai responses": lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="k").responses.create(model="m", input="hello"),
    "openai streamed": lambda url: list(openai.OpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY, stream=True)),
    "openai async": lambda url: asyncio.run(by_openai(url)),
    "litellm": lambda url: litellm.completion(**{**BODY, "model": "openai/m"}, api_base=f"{url}/v1", api_key="k"),
    "litellm async": lambda url: asyncio.run(litellm.acompletion(**{**BODY, "model": "openai/m"}, api_base=f"{url}/v1", api_key="k")),
    "httpx": lambda url: httpx.post(f"{url}/v1/chat/completions", json=BODY),
    "httpx async": lambda url: asyncio.run(by_httpx(url)),
    "requests": lambda url: requests.post(f"{url}/v1/chat/completions", json=BODY, timeout=20),
    "urllib": by_urllib,
    "urllib in a thread": in_a_thread,
    "aiohttp": lambda url: asyncio.run(by_aiohttp(url)),
    "dspy": lambda url: dspy.LM("openai/m", api_base=f"{url}/v1", api_key="k", cache=False, num_retries=0)("hello"),
    "dspy over litellm": lambda url: dspy.LM("openai/m", api_base=f"{url}/v1", api_key="k", cache=False, engine="litellm")("hello"),
    "not ours": lambda url: get_lm("openai/m", api_base=f"{url}/v1", api_key="k")("hello"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_call_of_another_client_is_counted_once(server: str, name: str) -> None:
    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        for _ in range(2):
            CLIENTS[name](server)
    assert (recorder.unrecorded, len(rollout.transitions)) == (Unrecorded(2), 0)


@pytest.mark.parametrize("engine", ["auto", "litellm"])
def test_a_recorded_call_is_not_counted(server: str, engine: str) -> None:
    recorder = Recorder()
    given = dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=False, engine=engine)
    lm = assay.models.with_recording(given, observers=[recorder.observe])
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        lm("hello")
        asyncio.run(lm.acall("hello again"))
    assert (recorder.unrecorded, len(rollout.transitions)) == (Unrecorded(0), 2)


def test_what_is_no_lm_call_is_not_counted(server: str) -> None:
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        requests.get(f"{server}/v1/models", timeout=20)
        httpx.post(f"{server}/messages", json={"to": "somebody", "text": "hello"})
        urllib.request.urlopen(f"{server}/v1/models", timeout=20).read()
    assert recorder.unrecorded == Unrecorded(0)


def test_calls_outside_a_rollout_are_not_counted(server: str) -> None:
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    CLIENTS["openai"](server)
    assert recorder.unrecorded == Unrecorded(0)


def test_each_rollout_counts_its_own(server: str) -> None:
    first, second = Recorder(), Recorder()
    with first.rollout(Rollout()):
        CLIENTS["httpx"](server)
        with second.rollout(Rollout()):
            CLIENTS["httpx"](server)
            CLIENTS["aiohttp"](server)
        CLIENTS["httpx"](server)
    assert (first.unrecorded, second.unrecorded) == (Unrecorded(2), Unrecorded(2))


def by_socket(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        connection.recv(100)


@pytest.mark.parametrize("kind", ["process", "socket"])
def test_what_cannot_be_looked_into_makes_the_count_unknown(server: str, kind: str) -> None:
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        CLIENTS["httpx"](server)
        if kind == "process":
            subprocess.run([sys.executable, "-c", ""], check=True)
        else:
            by_socket(server)
    assert recorder.unrecorded == Unrecorded(1, REASONS[kind])
    assert recorder.unrecorded.count is None


def test_a_client_in_c_makes_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycurl", sys)
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    assert recorder.unrecorded.count is None


def test_a_call_that_was_recorded_by_hand_is_not_counted(server: str, tmp_path: Path) -> None:
    with assay.record("hello", store=tmp_path / "s.db") as run:
        before = run._recorder.unrecorded.calls
        for _ in range(2):
            answer = openai.OpenAI(base_url=f"{server}/v1", api_key="k").chat.completions.create(**BODY)
        run.call(BODY["messages"], answer.choices[0].message.content, model="m")
        run.call(BODY["messages"], "of another machine", model="m")
        run.call(BODY["messages"], "of another machine", model="m")
    assert run._recorder.unrecorded.calls - before == 0


def test_a_call_through_the_gateway_is_recorded_there(server: str, tmp_path: Path) -> None:
    recorder = Recorder()
    with Store(tmp_path / "s.db") as store, served(Gateway(store, upstream_of("m", base=server)).app()) as gateway, recorder.rollout(Rollout()):
        openai.OpenAI(base_url=f"{gateway}/r/r1/v1", api_key="k").chat.completions.create(**BODY)
        openai.OpenAI(base_url=f"{gateway}/v1", api_key="rollout-r2").chat.completions.create(**BODY)
    assert recorder.unrecorded == Unrecorded(0)


def test_a_client_that_is_imported_inside_a_rollout_is_seen(server: str) -> None:
    code = (
        "import sys\nfrom assay.traces import Recorder, Rollout\nassert 'httpx' not in sys.modules\nrecorder = Recorder()\n"
        "with recorder.rollout(Rollout()):\n    import httpx\n"
        f"    httpx.post('{server}/v1/chat/completions', json={{'messages': []}})\nprint(recorder.unrecorded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("method", "path", "body", "asks"),
    [
        ("POST", "/v1/chat/completions", None, True),
        ("POST", "/openai/deployments/d/chat/completions?api-version=1", {"messages": []}, True),
        ("POST", "/v1beta/models/gemini-2.0-flash:generateContent", b'{"contents": []}', True),
        ("POST", "/model/anthropic.claude/converse-stream", '{"messages": []}', True),
        ("POST", "/api/generate", {"prompt": "x"}, True),
        ("GET", "/v1/chat/completions", None, False),
        ("POST", "/v1/embeddings", {"input": "x"}, False),
        ("POST", "/v1/messages/count_tokens", {"messages": []}, False),
        ("POST", "/v1/messages", b"to=somebody", False),
        ("POST", "/v1/responses", {"form": 1}, False),
        ("POST", "/r/abc/v1/chat/completions", {"messages": []}, False),
    ],
)
def test_an_lm_request_is_known_by_its_shape(method: str, path: str, body: Any, asks: bool) -> None:
    assert is_lm_request(method, path, body) is asks


def test_the_store_keeps_the_count_and_the_command_line_says_it(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_run("one", kind="collect", config={}, status="done", started_at=1.0, unrecorded=Unrecorded(5))
        store.put_run("two", kind="collect", config={}, status="done", started_at=2.0, unrecorded=Unrecorded(2, "a process was started"))
        store.flush()
        assert (store.unrecorded("one"), store.unrecorded("two")) == (Unrecorded(5), Unrecorded(2, "a process was started"))
        assert store.stats(run_id="one")["unrecorded"] == 5
        whole = store.stats()
    assert (whole["unrecorded"], whole["unrecorded_seen"], whole["unrecorded_reason"]) == (None, 7, "a process was started")
    command = [sys.executable, "-m", "assay", "traces", "stats", "--store", str(tmp_path / "s.db")]
    assert "unrecorded         unknown" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)["unrecorded"] is None


def test_a_store_from_before_the_reason_opens(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_run("one", kind="collect", config={}, status="done", started_at=1.0, unrecorded=Unrecorded(3))
        store.flush()
        with store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE runs DROP COLUMN unrecorded_reason")
            connection.exec_driver_sql("UPDATE meta SET value = '4' WHERE key = 'schema'")
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["unrecorded"] == 3
