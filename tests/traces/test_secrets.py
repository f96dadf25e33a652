"""Secrets in every part of a request: none reaches the store, a response or the log."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from planted_secrets import Echo, Planted, echo as echo, everything_in

from assay.support.scrubbing import MARK
from assay.traces import Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of, without_key
from rigs.serving import send, served
from rigs.upstream import ScriptedUpstream


def servers_full_of(plant: Planted) -> list[dict[str, Any]]:
    """Two servers of tools, one by address and one by command."""
    mcp = {
        "type": "mcp", "server_label": "s", "require_approval": "never", "authorization": plant(),
        "server_url": f"https://user:{plant()}@mcp.example/sse?api_key={plant()}&token={plant()}",
        "headers": {"Authorization": f"Bearer {plant()}", "X-Anything": plant()},
    }  # fmt: skip
    stdio = {
        "type": "mcp", "command": "server", "env": {"GITHUB_TOKEN": plant()},
        "args": ["--api-key", plant(), f"--url=https://a:{plant()}@h"],
        "config": json.dumps({"api_key": plant(), "headers": {"X-Any": plant()}, "env": [f"--password={plant()}"]}),
    }  # fmt: skip
    other = [f"--token={plant()}", "-e", f"GITHUB_TOKEN={plant()}", "--header", f"X-Api-Key: {plant()}"]
    return [mcp, stdio, {"type": "mcp", "args": other}]


def request_full_of(plant: Planted) -> tuple[dict[str, Any], dict[str, str], str]:
    """Body, headers and query of a call with a secret in every place that can hold one."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    names = ("password", "token", "secret", "refresh_token", "jwt", "passcode", "pw")
    keys = ("aws_secret_access_key", "privateKey", "passphrase", "session-token")
    hook = f"https://hooks.slack.com/services/T0/B0/{plant()}"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello", "api_key": plant()}],
        "tools": [*servers_full_of(plant), {"type": "function", "function": function}],
        "mcp_servers": [{"type": "url", "url": "https://mcp.example", "name": "x", "authorization_token": plant()}],
        "api_key": plant(),
        "apiKey": plant(),
        "api_base": f"https://u:{plant()}@elsewhere/v1",
        "headers": {"X-Key": plant()},
        "extra_headers": {"x-api-key": plant()},
        "extra_body": {"api_key": plant(), "deep": {"er": [{"access_token": plant(), "client_secret": plant()}]}},
        "metadata": {name: plant() for name in names} | {"note": f"Authorization: Bearer {plant()}", "hook": hook},
        "vault": {name: plant() for name in keys},
        "options": [{"name": "X-Api-Key", "value": plant()}, {"credentials": [plant(), plant()]}],
    }
    login = base64.b64encode(f"user:{plant()}".encode()).decode()
    headers = {name: plant() for name in ("x-api-key", "api-key", "X-Goog-Api-Key", "X-Auth-Token")}
    headers |= {"Authorization": f"Basic {login}", "Cookie": f"session={plant()}"}
    return body, headers, f"api_key={plant()}&key={plant()}&sig={plant()}"


def conversation_full_of(plant: Planted) -> list[dict[str, Any]]:
    """Messages with a secret in every part of a conversation that can hold nothing else there."""
    headers = {"Authorization": f"Bearer {plant()}"}
    called = {"api_key": plant(), "headers": headers, "deep": json.dumps({"clientSecret": plant()}), "q": "byte"}
    cut = {"name": "f", "arguments": json.dumps(called, separators=(",", ":"))[:-6]}
    tool_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(called)}}
    picture = {"url": f"https://u:{plant()}@h/a.png?sig={plant()}&X-Amz-Signature={plant()}&w=1"}
    parts = [
        {"type": "image_url", "image_url": picture},
        {"type": "input_image", "image_url": f"https://h/a.png?X-Amz-Security-Token={plant()}"},
        {"type": "file", "file_uri": f"https://u:{plant()}@h/f"},
    ]
    return [
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "assistant", "content": None, "function_call": cut},
        {"role": "user", "content": parts},
    ]


@pytest.mark.parametrize("how", ["error", "answer", "stream", "gemini error", "gemini without an answer"])
def test_forty_secrets_of_a_call_are_in_no_file_or_log(
    echo: tuple[Echo, str], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = echo
    server.status = 401 if "error" in how else 200
    plant, owner = Planted(), Planted()
    body, headers, query = request_full_of(plant)
    for name in ("SOME_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "OTHER_CLIENT_SECRET"):
        monkeypatch.setenv(name, plant())
    monkeypatch.setenv("OTHER_DATABASE_URL", f"postgresql://u:{plant()}@h/d")
    said = f"tool said: {plant.all[-1]} {plant.all[-2]} {plant.all[-3]}" + " pieces" * (how == "stream")
    body["messages"].append({"role": "user", "content": said})
    body["stream"] = how == "stream"
    path, is_gemini = "v1/chat/completions", "gemini" in how
    if is_gemini:
        path = "v1beta/models/m:generateContent"
        search = {"externalApi": {"endpoint": "https://s", "apiAuth": {"apiKeyConfig": {"apiKeyString": plant()}}}}
        maps = {"authConfig": {"apiKeyConfig": {"api_key_string": plant()}, "oauthConfig": {"accessToken": plant()}}}
        tools = [*body["tools"], {"retrieval": search}, {"googleMaps": maps}]
        body |= {"contents": [{"role": "user", "parts": [{"text": "hello"}]}], "tools": tools}
    assert len(plant.all) >= 40
    with Store(tmp_path / "s.db") as store, caplog.at_level(logging.DEBUG):
        upstream = HttpUpstream("m", url, key=(key := f"owner{owner()}"))
        with served(Gateway(store, upstream).app()) as gateway:
            status, reply = send("POST", f"{gateway}/{path}?{query}", body, **headers)
        store.flush()
        (transition,) = store.rollout(next(store.rollouts()).id).transitions
    assert status == server.status
    assert key in server.received  # it was sent and echoed, and not passed on
    assert key not in reply
    if is_gemini:
        assert (transition.error is not None, transition.request["dialect"]) == (True, "gemini")
        assert "&key=" not in server.received  # the caller's own, where the gateway asks with its own
    else:
        assert MARK in reply
        assert transition.request["body"]["messages"][0]["content"] == "hello"
        if how == "error":
            assert "wrong key" in str(transition.error)
        else:
            assert (transition.error, len(transition.output) > 200) == (None, True)
    assert plant.in_(everything_in(tmp_path)) == []
    assert owner.in_(everything_in(tmp_path)) == []
    assert plant.in_(caplog.text) == []


def test_litellms_key_from_the_environment_is_neither_stored_nor_sent_to_the_caller(
    echo: tuple[Echo, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = echo
    plant = Planted()
    for name in ("OPENAI_API_KEY", "GROQ_API_KEY"):
        monkeypatch.setenv(name, plant())
    with Store(tmp_path / "s.db") as store:
        for at, upstream in enumerate(
            (LitellmUpstream("openai/m", {"api_base": f"{url}/v1"}), LitellmUpstream("groq/m", {"api_base": url}))
        ):
            with served(Gateway(store, upstream).app()) as gateway:
                for status in (401, 200):
                    server.status = status
                    answered, reply = send(
                        "POST", f"{gateway}/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
                    )
                    assert (answered, MARK in reply) == (status, True), reply
                    assert plant.all[at] in server.received
                    assert plant.in_(reply) == []
        store.flush()
    assert plant.in_(everything_in(tmp_path)) == []


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_key_that_a_server_echoes_in_pieces_does_not_reach_the_caller(size: int) -> None:
    key, text = b"abcabcabd-1", b"abcabcab abcabcabcabd-1 x abcabcabd-1abcabcabd-1 abc"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(text), size):
            yield text[at : at + size]

    async def collected() -> bytes:
        return b"".join([part async for part in without_key(chunks(), key)])

    assert asyncio.run(collected()) == text.replace(key, b"[key]")


def test_texts_that_merely_look_like_secrets_are_stored_byte_for_byte(tmp_path: Path) -> None:
    text = (
        "Bearer of news: sk-learn, password: hunter22, token=abcdefgh12345678 and api_key: "
        "9f8e7d6c5b4a39281706f5e4d3c2b1a0 \u00e9 \U0001f600"
    )
    tokens = [{"token": "Bearer", "logprob": -0.5}, {"token": "sk-0123456789abcdef", "logprob": -0.1}]
    properties = {"password": {"type": "string"}, "headers": {"type": "object"}}
    parameters = {"type": "object", "properties": properties, "required": ["password"]}
    function = {"name": "login", "description": text, "parameters": parameters}
    request = {
        "dialect": "chat",
        "body": {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 5,
            "tools": [{"type": "function", "function": function}],
        },
    }
    message = {"content": text, "tool_calls": [{"function": {"name": "login", "arguments": text}}]}
    response = {"body": {"choices": [{"message": message, "logprobs": {"content": tokens}}]}}
    inputs = {"password": "hunter22", "api_key": "a task about keys 12345678"}
    rollout = Rollout(inputs=inputs, prediction={"secret": text}, metadata={"entities": {"password": "hunter22"}})
    call = Transition(t=0, model="m", request=request, response=response, output=text)
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(rollout)
        store.put_transition(rollout.id, call)
        store.flush()
        stored = store.rollout(rollout.id)
    assert (stored.inputs, stored.prediction, stored.metadata) == (rollout.inputs, rollout.prediction, rollout.metadata)
    (made,) = stored.transitions
    assert (made.request, made.response, made.output) == (request, response, text)


@pytest.mark.parametrize("stream", [True, False])
def test_secrets_in_tool_calls_and_addresses_of_a_conversation_are_not_stored(tmp_path: Path, stream: bool) -> None:
    plant, upstream = Planted(), ScriptedUpstream()
    messages = [*conversation_full_of(plant), {"role": "user", "content": "hello"}]
    with (
        Store(tmp_path / "s.db") as store,
        served(upstream.app()) as behind,
        served(Gateway(store, upstream_of("m", base=behind)).app()) as url,
    ):
        status, _ = send("POST", f"{url}/v1/chat/completions", {"messages": messages, "stream": stream})
    assert (status, len(plant.all)) == (200, 8)
    assert "hello" in everything_in(tmp_path)
    assert plant.in_(everything_in(tmp_path)) == []
