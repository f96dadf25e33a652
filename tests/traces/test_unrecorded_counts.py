"""LM calls that are recorded elsewhere, by hand or at the gateway, and how the count is stored and printed."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from unrecorded_clients import BODY
from unrecorded_clients import server as server

import assay
from assay.models.unrecorded import Unrecorded, is_lm_request
from assay.traces import Recorder, Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served


def test_a_client_in_c_makes_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycurl", sys)
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    assert recorder.unrecorded.count is None


def test_a_call_that_was_recorded_by_hand_is_not_counted(server: str, tmp_path: Path) -> None:
    with assay.record("hello", store=tmp_path / "s.db") as run:
        before = run.recorder.unrecorded.calls
        for _ in range(2):
            answer = openai.OpenAI(base_url=f"{server}/v1", api_key="k").chat.completions.create(**BODY)
        run.call(BODY["messages"], answer.choices[0].message.content, model="m")
        run.call(BODY["messages"], "of another machine", model="m")
        run.call(BODY["messages"], "of another machine", model="m")
    assert run.recorder.unrecorded.calls - before == 0


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
        ("POST", "/v1/complete", {"prompt": "x"}, True),
        ("POST", "/generate", {"text": "x", "sampling_params": {}}, True),
        ("POST", "/infill", {"input_prefix": "x"}, True),
        ("POST", "/v1/responses/compact", {"input": "x"}, True),
        ("POST", "/v1/threads/runs", {"assistant_id": "a"}, True),
        ("POST", "/v1/threads/t1/runs", {"assistant_id": "a"}, True),
        ("POST", "/endpoints/e/invocations", {"messages": []}, True),
        ("POST", "/v22.0/1/messages", {"messaging_product": "whatsapp", "text": {"body": "x"}}, False),
        ("POST", "/v1/threads/t1/messages", {"role": "user", "content": "x"}, False),
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
