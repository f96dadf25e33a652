"""LM calls of other clients inside a rollout are counted once each, or the count is unknown if not observable."""

import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import aiohttp
import dspy
import httpcore
import httpx
import litellm
import openai
import pytest
import requests

from assay.models import with_recording
from assay.models.unrecorded import Unrecorded, is_lm_request
from assay.testing import ScriptedEngine
from assay.traces import Recorder, Rollout, Store
from rigs.gateway import CHAT, PATHS
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

BODY: dict[str, Any] = CHAT
DATA = json.dumps(BODY).encode()
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(ScriptedUpstream().app()) as url:
        yield url


def in_a_thread(function: Callable[[str], Any], url: str) -> None:
    thread = threading.Thread(target=function, args=(url,))
    thread.start()
    thread.join()


def in_a_pool(function: Callable[[str], Any], url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(function, url).result()


# -- clients


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(url + PATHS["chat"], json=BODY) as answer:
        await answer.read()


async def by_httpx(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(url + PATHS["messages"], json={**BODY, "max_tokens": 9})


async def by_openai(url: str) -> None:
    await openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY)


def by_urllib(url: str) -> None:
    request = urllib.request.Request(url + PATHS["chat"], DATA, JSON)
    urllib.request.urlopen(request, timeout=120).read()


def by_httpx_transport(url: str) -> None:
    with httpx.HTTPTransport() as transport:
        transport.handle_request(httpx.Request("POST", url + PATHS["chat"], json=BODY)).read()


def by_httpx2(url: str) -> None:
    pytest.importorskip("httpx2").post(url + PATHS["chat"], json=BODY)


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k")


def litellm_options(url: str) -> dict[str, Any]:
    return {**BODY, "model": "openai/m", "api_base": f"{url}/v1", "api_key": "k"}


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": lambda url: sdk(url).chat.completions.create(**BODY),
    "openai responses": lambda url: sdk(url).responses.create(model="m", input="hello"),
    "openai streamed": lambda url: list(sdk(url).chat.completions.create(**BODY, stream=True)),
    "openai async": lambda url: asyncio.run(by_openai(url)),
    "litellm": lambda url: litellm.completion(**litellm_options(url)),
    "litellm async": lambda url: asyncio.run(litellm.acompletion(**litellm_options(url))),
    "httpx": lambda url: httpx.post(url + PATHS["chat"], json=BODY),
    "httpx async": lambda url: asyncio.run(by_httpx(url)),
    "httpx2": by_httpx2,
    "requests": lambda url: requests.post(url + PATHS["chat"], json=BODY, timeout=120),
    "urllib": by_urllib,
    "urllib in a thread": partial(in_a_thread, by_urllib),
    "aiohttp": lambda url: asyncio.run(by_aiohttp(url)),
    "httpcore": lambda url: httpcore.request("POST", url + PATHS["chat"], content=DATA, headers=JSON),
    "httpx transport": by_httpx_transport,
    "another path": lambda url: httpx.post(f"{url}/ask", json=BODY),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_call_of_another_client_is_counted_once(server: str, name: str) -> None:
    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        for _ in range(2):
            CLIENTS[name](server)
    assert (recorder.unrecorded, len(rollout.transitions)) == (Unrecorded(2), 0)


@pytest.mark.slow
def test_calls_of_a_client_imported_inside_a_rollout_are_counted(server: str) -> None:
    code = (
        "import sys\nfrom assay.traces import Recorder, Rollout\nassert 'httpx' not in sys.modules\n"
        "recorder = Recorder()\n"
        "with recorder.rollout(Rollout()):\n    import httpx\n"
        f"    httpx.post('{server}/v1/chat/completions', json={{'messages': []}})\nprint(recorder.unrecorded)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_recorded_calls_other_requests_and_calls_outside_are_not_counted(server: str) -> None:
    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        requests.get(f"{server}/v1/models", timeout=120)
        httpx.post(f"{server}/messages", json={"to": "somebody", "text": "hello"})
        urllib.request.urlopen(f"{server}/v1/models", timeout=120).read()
        for engine in ("auto", "litellm"):
            lm = dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=False, engine=engine)
            recorded = with_recording(lm, observers=[recorder.observe])
            recorded("hello")
            asyncio.run(recorded.acall("hello again"))
    CLIENTS["openai"](server)
    assert (recorder.unrecorded, len(rollout.transitions)) == (Unrecorded(0), 4)


def test_each_rollout_counts_its_own_unrecorded_calls(server: str) -> None:
    first, second = Recorder(), Recorder()
    with first.rollout(Rollout()):
        CLIENTS["httpx"](server)
        with second.rollout(Rollout()):
            CLIENTS["httpx"](server)
            CLIENTS["aiohttp"](server)
        CLIENTS["httpx"](server)
    assert (first.unrecorded, second.unrecorded) == (Unrecorded(2), Unrecorded(2))


# -- clients that cannot be observed


def by_socket(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        connection.recv(100)


def by_process(url: str) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def by_multiprocessing(url: str, method: str = "spawn") -> None:
    process = multiprocessing.get_context(method).Process(target=int)
    process.start()
    process.join()


def by_process_pool(url: str) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(int).result()


PROCESS, CONNECTION = "a process was started", "a client that is not known opened a connection"
HIDDEN: dict[str, tuple[Callable[[str], Any], str]] = {
    "process": (by_process, PROCESS),
    "socket": (by_socket, CONNECTION),
    "process in a thread": (partial(in_a_thread, by_process), PROCESS),
    "socket in a thread": (partial(in_a_thread, by_socket), CONNECTION),
    "socket in a pool": (partial(in_a_pool, by_socket), CONNECTION),
    "spawn": (by_multiprocessing, PROCESS),
    "forkserver": (partial(by_multiprocessing, method="forkserver"), PROCESS),
    "process pool": (by_process_pool, PROCESS),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_unobservable_client_makes_the_count_unknown(server: str, name: str) -> None:
    recorder = Recorder()
    hidden, reason = HIDDEN[name]
    with recorder.rollout(Rollout()):
        CLIENTS["httpx"](server)
        hidden(server)
    assert recorder.unrecorded == Unrecorded(1, reason)
    assert recorder.unrecorded.count is None


def test_an_older_pool_of_processes_makes_the_count_unknown() -> None:
    recorder = Recorder()
    with multiprocessing.get_context("spawn").Pool(1) as pool, recorder.rollout(Rollout()):
        pool.apply(int)
    assert recorder.unrecorded == Unrecorded(0, "processes of multiprocessing are at work")


def test_a_client_in_c_makes_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycurl", sys)
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    assert recorder.unrecorded.count is None


# -- what an LM request is


@pytest.mark.parametrize(
    ("method", "path", "body", "asks"),
    [
        ("POST", "/v1/chat/completions", None, True),
        ("POST", "/openai/deployments/d/chat/completions?api-version=1", {"messages": []}, True),
        ("POST", "/v1beta/models/gemini-2.0-flash:generateContent", b'{"contents": []}', True),
        ("POST", "/v1beta/models/gemini-2.0-flash:streamGenerateContent?alt=sse", {"contents": []}, True),
        ("POST", "/v1beta/interactions", {"model": "gemini-2.5-flash", "input": "hi"}, True),
        ("POST", "/model/anthropic.claude/converse-stream", '{"messages": []}', True),
        ("POST", "/api/generate", {"prompt": "x"}, True),
        ("POST", "/ask", {"model": "m", "messages": []}, True),
        ("POST", "/v1/predictions", {"input": {"prompt": "x"}}, True),
        ("POST", "/models/org/name", {"inputs": "x"}, True),
        ("POST", "/v1/complete", {"prompt": "x"}, True),
        ("POST", "/generate", {"text": "x", "sampling_params": {}}, True),
        ("POST", "/infill", {"input_prefix": "x"}, True),
        ("POST", "/v1/responses/compact", {"input": "x"}, True),
        ("POST", "/v1/threads/runs", {"assistant_id": "a"}, True),
        ("POST", "/v1/threads/t1/runs", {"assistant_id": "a"}, True),
        ("POST", "/endpoints/e/invocations", {"messages": []}, True),
        ("POST", "/v22.0/1/messages", {"messaging_product": "whatsapp", "text": {"body": "x"}}, False),
        ("POST", "/v1/threads/t1/messages", {"role": "user", "content": "x"}, False),
        ("POST", "/v1beta/models/gemini-2.0-flash:countTokens", {"contents": []}, False),
        ("POST", "/ask", {"messages": []}, False),
        ("POST", "/tokenize", {"model": "m", "messages": []}, False),
        ("GET", "/v1/chat/completions", None, False),
        ("POST", "/v1/embeddings", {"input": "x"}, False),
        ("POST", "/v1/messages/count_tokens", {"messages": []}, False),
        ("POST", "/v1/messages", b"to=somebody", False),
        ("POST", "/v1/responses", {"form": 1}, False),
        ("POST", "/r/abc/v1/chat/completions", {"messages": []}, False),
    ],
)
def test_an_lm_request_is_recognised_by_its_form(method: str, path: str, body: Any, asks: bool) -> None:
    assert is_lm_request(method, path, body) is asks


# -- recorded calls of threads that a program makes by itself


def scripted(recorder: Recorder) -> Any:
    lm = dspy.LM("scripted", engine=ScriptedEngine(lambda request: "hello"), cache=False)
    return with_recording(lm, observers=[recorder.observe])


def each_in_a_thread(ask: Callable[[str], Any], prompts: list[str]) -> None:
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_executor(ask: Callable[[str], Any], prompts: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, prompts))


def by_thread_pool(ask: Callable[[str], Any], prompts: list[str]) -> None:
    with ThreadPool(2) as pool:
        pool.map(func=ask, iterable=prompts)


def by_loop(ask: Callable[[str], Any], prompts: list[str]) -> None:
    async def gathered() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, ask, prompt) for prompt in prompts))

    in_a_thread(lambda _: asyncio.run(gathered()), "")


@pytest.mark.parametrize("spread", [each_in_a_thread, by_executor, by_thread_pool, by_loop])
def test_recorded_calls_of_a_programs_threads_belong_to_its_rollout(spread: Callable[..., None]) -> None:
    recorder = Recorder()
    lm = scripted(recorder)

    def run(name: str) -> Rollout:
        with recorder.active(), recorder.rollout(Rollout()) as rollout:
            time.sleep(0.05)  # both are open
            spread(lm, [f"{name} {number}" for number in range(4)])
        return rollout

    with ThreadPoolExecutor(2) as pool:
        rollouts = dict(zip("ab", pool.map(run, "ab"), strict=True))
    for name, rollout in rollouts.items():
        prompts = sorted(transition.request["messages"][0]["parts"][0]["text"] for transition in rollout.transitions)
        assert prompts == [f"{name} {number}" for number in range(4)]
    assert recorder.unrecorded == Unrecorded(0)


@pytest.mark.parametrize(
    ("opened", "inside", "outside"),
    [(1, [1], 0), (2, [0, 0], 1)],
    ids=["the only open rollout made it", "several rollouts may have made it"],
)
def test_a_call_of_an_older_thread_is_stored_where_it_belongs_or_counted(
    tmp_path: Path, opened: int, inside: list[int], outside: int
) -> None:
    begin = threading.Event()
    with Store(tmp_path / "s.db") as store:
        recorder = Recorder(store)
        lm = scripted(recorder)
        thread = threading.Thread(target=lambda: begin.wait(120) and lm("hello"))
        thread.start()
        with ExitStack() as stack:
            rollouts = [stack.enter_context(recorder.rollout(Rollout())) for _ in range(opened)]
            begin.set()
            thread.join()
        store.flush()
        stored = sum(len(store.rollout(row.id).transitions) for row in store.rollouts() if row.source == "outside")
    assert ([len(rollout.transitions) for rollout in rollouts], stored) == (inside, outside)
    assert recorder.unrecorded == Unrecorded(outside)
