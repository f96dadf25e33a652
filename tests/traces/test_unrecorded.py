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

import assay
from assay.models import get_lm, with_recording
from assay.models.transports import is_lm_request
from assay.testing import ScriptedEngine
from assay.testing.serving import served
from assay.testing.upstream import ScriptedUpstream
from assay.traces import Recorder, Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.missed import Unrecorded

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
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=20).read()


def by_dspy(url: str, **kwargs: Any) -> None:
    dspy.LM("openai/m", **{"api_base": f"{url}/v1", "api_key": "k", "cache": False, "num_retries": 0, **kwargs})(
        "hello"
    )


async def by_dspy_async(url: str) -> None:
    await dspy.LM("openai/m", api_base=f"{url}/v1", api_key="k", cache=False, num_retries=0).acall("hello")


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


def scripted() -> dspy.LM:
    return dspy.LM("scripted", engine=ScriptedEngine(lambda request: "hello"), cache=False)


def in_a_thread(function: Callable[[str], Any], url: str) -> None:
    thread = threading.Thread(target=function, args=(url,))
    thread.start()
    thread.join()


def in_a_pool(function: Callable[[str], Any], url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(function, url).result()


def in_a_loop_of_a_thread(url: str) -> None:
    in_a_thread(lambda url: asyncio.run(by_dspy_async(url)), url)


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
    "requests": lambda url: requests.post(f"{url}/v1/chat/completions", json=BODY, timeout=20),
    "urllib": by_urllib,
    "urllib in a thread": lambda url: in_a_thread(by_urllib, url),
    "aiohttp": lambda url: asyncio.run(by_aiohttp(url)),
    "httpcore": by_httpcore,
    "httpx transport": by_httpx_transport,
    "dspy": by_dspy,
    "dspy async": lambda url: asyncio.run(by_dspy_async(url)),
    "dspy in a thread": lambda url: in_a_thread(by_dspy, url),
    "dspy in a pool": lambda url: in_a_pool(by_dspy, url),
    "dspy async in a thread": in_a_loop_of_a_thread,
    "dspy over litellm": lambda url: by_dspy(url, engine="litellm"),
    "dspy over litellm in a thread": lambda url: in_a_thread(lambda url: by_dspy(url, engine="litellm"), url),
    "not ours": lambda url: get_lm("openai/m", api_base=f"{url}/v1", api_key="k")("hello"),
    "not ours in a thread": lambda url: in_a_thread(get_lm("openai/m", api_base=f"{url}/v1", api_key="k"), "hello"),
    "not ours over an engine, in a thread": lambda url: in_a_thread(with_recording(scripted()), "hello"),
    "an engine of one's own": lambda url: scripted()("hello"),
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


def test_an_older_thread_makes_the_count_of_every_open_rollout_unknown(server: str) -> None:
    recorder, begin = Recorder(), threading.Event()

    def later() -> None:
        begin.wait(20)
        by_socket(server)

    thread = threading.Thread(target=later)
    thread.start()
    with recorder.rollout(Rollout()):
        begin.set()
        thread.join()
    assert recorder.unrecorded == Unrecorded(0, REASONS["socket"])


def test_an_older_pool_of_processes_makes_the_count_unknown() -> None:
    recorder = Recorder()
    with multiprocessing.get_context("spawn").Pool(1) as pool, recorder.rollout(Rollout()):
        pool.apply(int)
    assert recorder.unrecorded == Unrecorded(0, "processes of multiprocessing are at work")


@pytest.mark.slow
def test_retries_are_counted_and_answers_of_dspys_cache_are_not(server: str) -> None:
    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()):
        with pytest.raises(dspy.LMError):
            dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=False, num_retries=1)("#500")
        assert recorder.unrecorded == Unrecorded(2)
        cached = dspy.LM("openai/m", api_base=f"{server}/v1", api_key="k", cache=True)
        cached(f"hello {server}")
        cached(f"hello {server}")
    assert recorder.unrecorded == Unrecorded(3)


def test_a_thread_that_outlives_its_rollout_is_counted(server: str) -> None:
    recorder, begin = Recorder(), threading.Event()

    def later() -> None:
        begin.wait(20)
        by_urllib(server)

    with recorder.rollout(Rollout()):
        thread = threading.Thread(target=later)
        thread.start()
    begin.set()
    thread.join()
    assert recorder.unrecorded == Unrecorded(1)


# -- recorded calls of threads that a program makes by itself


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
    lm = with_recording(scripted(), observers=[recorder.observe])

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


def test_calls_of_a_shared_pool_belong_to_their_rollouts() -> None:
    recorder = Recorder()
    lm = with_recording(scripted(), observers=[recorder.observe])
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with recorder.active(), recorder.rollout(Rollout()) as rollout:
                pool.submit(lm, "hello").result()
            assert len(rollout.transitions) == 1


def ask_from_outside(recorder: Recorder, rollouts: int, tmp_path: Path) -> tuple[list[int], int]:
    """Call a model in a thread that is older than the rollouts.

    Returns the number of transitions of each open rollout, and of those outside any rollout.
    """
    begin = threading.Event()
    with Store(tmp_path / "s.db") as store:
        recorder.store = store
        lm = with_recording(scripted(), observers=[recorder.observe])
        thread = threading.Thread(target=lambda: begin.wait(20) and lm("hello"))
        thread.start()
        with ExitStack() as opened:
            open_rollouts = [opened.enter_context(recorder.rollout(Rollout())) for _ in range(rollouts)]
            begin.set()
            thread.join()
        store.flush()
        outside = sum(len(store.rollout(row.id).transitions) for row in store.rollouts() if row.source == "outside")
        return [len(rollout.transitions) for rollout in open_rollouts], outside


def test_a_call_of_an_older_thread_belongs_to_the_only_open_rollout(tmp_path: Path) -> None:
    recorder = Recorder()
    assert ask_from_outside(recorder, 1, tmp_path) == ([1], 0)
    assert recorder.unrecorded == Unrecorded(0)


def test_an_open_rollout_of_another_recorder_is_not_considered(tmp_path: Path) -> None:
    opened, finished = threading.Event(), threading.Event()

    def other() -> None:
        with Recorder().rollout(Rollout()):
            opened.set()
            finished.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(20)
    transitions = ask_from_outside(Recorder(), 1, tmp_path)
    finished.set()
    thread.join()
    assert transitions == ([1], 0)


def test_a_call_that_several_open_rollouts_may_have_made_is_stored_outside_and_counted(tmp_path: Path) -> None:
    recorder = Recorder()
    assert ask_from_outside(recorder, 2, tmp_path) == ([0, 0], 1)
    assert recorder.unrecorded == Unrecorded(1)


def test_a_call_outside_rollouts_by_dspys_context_is_not_assigned_to_another_threads_rollout() -> None:
    recorder, opened, finished = Recorder(), threading.Event(), threading.Event()
    lm = with_recording(scripted(), observers=[recorder.observe])

    def other() -> None:
        with recorder.active(), recorder.rollout(rollout):
            opened.set()
            finished.wait(20)

    rollout = Rollout()
    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(20)
    with recorder.active():
        lm("hello")
    finished.set()
    thread.join()
    assert rollout.transitions == []


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
    with (
        Store(tmp_path / "s.db") as store,
        served(Gateway(store, upstream_of("m", base=server)).app()) as gateway,
        recorder.rollout(Rollout()),
    ):
        openai.OpenAI(base_url=f"{gateway}/r/r1/v1", api_key="k").chat.completions.create(**BODY)
        openai.OpenAI(base_url=f"{gateway}/v1", api_key="rollout-r2").chat.completions.create(**BODY)
    assert recorder.unrecorded == Unrecorded(0)


@pytest.mark.parametrize("name", ["x-goog-api-key", "x-api-key", "api-key"])
def test_a_call_with_a_rollouts_name_as_its_key_is_recorded_at_the_gateway(
    server: str, tmp_path: Path, name: str
) -> None:
    recorder, body = Recorder(), {"contents": [{"parts": [{"text": "hello"}]}]}

    async def ask(url: str) -> None:
        async with (
            aiohttp.ClientSession(headers={name: "rollout-r1"}) as session,
            session.post(url, json=body) as answer,
        ):
            await answer.read()

    with (
        Store(tmp_path / "s.db") as store,
        served(Gateway(store, upstream_of(None, base=server)).app()) as gateway,
        recorder.rollout(Rollout()),
    ):
        url = f"{gateway}/v1beta/models/m:generateContent"
        httpx.post(url, json=body, headers={name: "rollout-r1"})
        asyncio.run(ask(url))
        httpx.post(f"{server}/v1beta/models/m:generateContent", json=body, headers={name: "AIza"})
    assert recorder.unrecorded == Unrecorded(1)


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


@pytest.mark.parametrize(
    ("method", "path", "body", "asks"),
    [
        ("POST", "/v1/chat/completions", None, True),
        ("POST", "/openai/deployments/d/chat/completions?api-version=1", {"messages": []}, True),
        ("POST", "/v1beta/models/gemini-2.0-flash:generateContent", b'{"contents": []}', True),
        ("POST", "/model/anthropic.claude/converse-stream", '{"messages": []}', True),
        ("POST", "/api/generate", {"prompt": "x"}, True),
        ("POST", "/ask", {"model": "m", "messages": []}, True),
        ("POST", "/v1/predictions", {"input": {"prompt": "x"}}, True),
        ("POST", "/models/org/name", {"inputs": "x"}, True),
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


def test_the_count_is_stored_and_printed_by_the_command_line(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_run("one", kind="collect", config={}, status="done", started_at=1.0, unrecorded=Unrecorded(5))
        store.put_run(
            "two",
            kind="collect",
            config={},
            status="done",
            started_at=2.0,
            unrecorded=Unrecorded(2, "a process was started"),
        )
        store.flush()
        assert (store.unrecorded("one"), store.unrecorded("two")) == (
            Unrecorded(5),
            Unrecorded(2, "a process was started"),
        )
        assert store.stats(run_id="one")["unrecorded"] == 5
        stats = store.stats()
    assert (stats["unrecorded"], stats["unrecorded_seen"], stats["unrecorded_reason"]) == (
        None,
        7,
        "a process was started",
    )
    command = [sys.executable, "-m", "assay", "traces", "stats", "--store", str(tmp_path / "s.db")]
    assert "unrecorded         unknown" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (
        json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)[
            "unrecorded"
        ]
        is None
    )


def test_an_older_store_without_the_reason_can_be_opened(tmp_path: Path) -> None:
    from assay.traces.store.tables import revisions

    with Store(tmp_path / "s.db") as store:
        store.put_run("one", kind="collect", config={}, status="done", started_at=1.0, unrecorded=Unrecorded(3))
        store.flush()
        with store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE runs DROP COLUMN unrecorded_reason")
            connection.exec_driver_sql("UPDATE meta SET value = '4' WHERE key = 'schema'")
            connection.exec_driver_sql(f"DROP TABLE {revisions.name}")
    with Store(tmp_path / "s.db") as store:
        assert store.stats()["unrecorded"] == 3
