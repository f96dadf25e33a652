"""LM calls of other clients inside a rollout are counted once each, or the count is unknown if not observable."""

import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import aiohttp
import dspy
import httpcore
import httpx
import litellm
import openai
import pytest
import requests
from unrecorded_clients import BODY, in_a_thread, server as server

import assay
from assay.models.unrecorded import Unrecorded
from assay.traces import Recorder, Rollout

REASONS = {"process": "a process was started", "socket": "a client that is not known opened a connection"}


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
        await answer.read()


async def by_httpx(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/messages", json={**BODY, "max_tokens": 9})


async def by_openai(url: str) -> None:
    await openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY)


def by_urllib(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=120).read()


def by_httpcore(url: str) -> None:
    httpcore.request(
        "POST",
        f"{url}/v1/chat/completions",
        content=json.dumps(BODY).encode(),
        headers={"Content-Type": "application/json"},
    )


def by_httpx_transport(url: str) -> None:
    with httpx.HTTPTransport() as transport:
        transport.handle_request(httpx.Request("POST", f"{url}/v1/chat/completions", json=BODY)).read()


def by_httpx2(url: str) -> None:
    pytest.importorskip("httpx2").post(f"{url}/v1/chat/completions", json=BODY)


def in_a_pool(function: Callable[[str], Any], url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(function, url).result()


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY),
    "openai responses": lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="k").responses.create(
        model="m", input="hello"
    ),
    "openai streamed": lambda url: list(
        openai.OpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**BODY, stream=True)
    ),
    "openai async": lambda url: asyncio.run(by_openai(url)),
    "litellm": lambda url: litellm.completion(**{**BODY, "model": "openai/m"}, api_base=f"{url}/v1", api_key="k"),
    "litellm async": lambda url: asyncio.run(
        litellm.acompletion(**{**BODY, "model": "openai/m"}, api_base=f"{url}/v1", api_key="k")
    ),
    "httpx": lambda url: httpx.post(f"{url}/v1/chat/completions", json=BODY),
    "httpx async": lambda url: asyncio.run(by_httpx(url)),
    "httpx2": by_httpx2,
    "requests": lambda url: requests.post(f"{url}/v1/chat/completions", json=BODY, timeout=120),
    "urllib": by_urllib,
    "urllib in a thread": lambda url: in_a_thread(by_urllib, url),
    "aiohttp": lambda url: asyncio.run(by_aiohttp(url)),
    "httpcore": by_httpcore,
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


@pytest.mark.parametrize("engine", ["auto", "litellm"])
def test_a_recorded_call_is_not_counted(server: str, engine: str) -> None:
    recorder = Recorder()
    plain_lm = dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=False, engine=engine)
    lm = assay.models.with_recording(plain_lm, observers=[recorder.observe])
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        lm("hello")
        asyncio.run(lm.acall("hello again"))
    assert (recorder.unrecorded, len(rollout.transitions)) == (Unrecorded(0), 2)


def test_other_requests_are_not_counted(server: str) -> None:
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        requests.get(f"{server}/v1/models", timeout=120)
        httpx.post(f"{server}/messages", json={"to": "somebody", "text": "hello"})
        urllib.request.urlopen(f"{server}/v1/models", timeout=120).read()
    assert recorder.unrecorded == Unrecorded(0)


def test_calls_outside_a_rollout_are_not_counted(server: str) -> None:
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    CLIENTS["openai"](server)
    assert recorder.unrecorded == Unrecorded(0)


def test_each_rollout_counts_its_own_unrecorded_calls(server: str) -> None:
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


def by_process(url: str) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def by_multiprocessing(url: str, method: str = "spawn") -> None:
    process = multiprocessing.get_context(method).Process(target=int)
    process.start()
    process.join()


def by_process_pool(url: str) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(int).result()


HIDDEN: dict[str, tuple[Callable[[str], Any], str]] = {
    "process": (by_process, "process"),
    "socket": (by_socket, "socket"),
    "process in a thread": (lambda url: in_a_thread(by_process, url), "process"),
    "socket in a thread": (lambda url: in_a_thread(by_socket, url), "socket"),
    "socket in a pool": (lambda url: in_a_pool(by_socket, url), "socket"),
    "spawn": (by_multiprocessing, "process"),
    "forkserver": (lambda url: by_multiprocessing(url, "forkserver"), "process"),
    "spawn in a thread": (lambda url: in_a_thread(by_multiprocessing, url), "process"),
    "process pool": (by_process_pool, "process"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_unobservable_client_makes_the_count_unknown(server: str, name: str) -> None:
    recorder = Recorder()
    hidden, reason = HIDDEN[name]
    with recorder.rollout(Rollout()):
        CLIENTS["httpx"](server)
        hidden(server)
    assert recorder.unrecorded == Unrecorded(1, REASONS[reason])
    assert recorder.unrecorded.count is None


def test_an_older_pool_of_processes_makes_the_count_unknown() -> None:
    recorder = Recorder()
    with multiprocessing.get_context("spawn").Pool(1) as pool, recorder.rollout(Rollout()):
        pool.apply(int)
    assert recorder.unrecorded == Unrecorded(0, "processes of multiprocessing are at work")


@pytest.mark.slow
def test_retries_and_answers_of_dspys_cache_are_recorded(server: str) -> None:
    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        with pytest.raises(dspy.LMError):
            dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=False, num_retries=1)("#500")
        assert [transition.error is None for transition in rollout.transitions] == [False, False]
        cached = dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=True)
        cached(f"hello {server}")
        cached(f"hello {server}")
    assert recorder.unrecorded == Unrecorded(0)
    answers = rollout.transitions[2:]
    assert [(answer.cached, answer.cost_usd) for answer in answers] == [(False, None), (True, 0.0)]
    assert answers[0].output == answers[1].output
