"""Secrets in every place that a request has, and what is written of it: none is in the store, what a caller gets, or what is logged."""

import asyncio
import base64
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.scrubbing import MARK
from assay.testing.serving import asked, post, served
from assay.traces import Rollout, Store, Transition
from assay.traces.gateway import Gateway
from assay.traces.upstreams import HttpUpstream, LitellmUpstream, _without, upstream_of


class Echo:
    """A server that says back all that it is sent: as an error, as an answer's text, or streamed in pieces of a few bytes."""

    def __init__(self) -> None:
        self.status = 401
        self.received = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.received = f"{request.rel_url} {dict(request.headers)} {await request.text()}"
        if self.status >= 400:
            return web.json_response({"error": {"message": f"wrong key: {self.received}"}}, status=self.status)
        if "pieces" not in self.received:
            choice = {"index": 0, "message": {"role": "assistant", "content": self.received}, "finish_reason": "stop"}
            return web.json_response(
                {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "service_tier": "default", "choices": [choice]}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, finish in (({"content": self.received}, None), ({}, "stop")):
            event = json.dumps({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            for part in (f"data: {event}\n\n"[at : at + 7] for at in range(0, len(event) + 8, 7)):
                await response.write(part.encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def everything_in(folder: Path) -> str:
    """All bytes of the files in a folder, and all cells of its databases."""
    found = [path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()]
    for path in folder.rglob("*.db"):
        with sqlite3.connect(path) as database:
            found += list(database.iterdump())
    return "\n".join(found)


class Planted:
    """Secrets with a number each, no two alike, in no shape that a provider uses."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def __call__(self) -> str:
        self.all.append(f"plant{len(self.all):02d}Qz7wXk{len(self.all) * 7919:06d}")
        return self.all[-1]

    def in_(self, text: str) -> list[str]:
        return [secret for secret in self.all if secret in text]


def request_full_of(plant: Planted) -> tuple[dict[str, Any], dict[str, str], str]:
    """Body, headers and query of a call with a secret in every place that can hold one."""
    mcp = {
        "type": "mcp", "server_label": "s", "server_url": f"https://user:{plant()}@mcp.example/sse?api_key={plant()}&token={plant()}",
        "authorization": plant(), "headers": {"Authorization": f"Bearer {plant()}", "X-Anything": plant()}, "require_approval": "never",
    }  # fmt: skip
    stdio = {"type": "mcp", "command": "server", "args": ["--api-key", plant(), f"--url=https://a:{plant()}@h"], "env": {"GITHUB_TOKEN": plant()}}
    body = {
        "model": "m", "messages": [{"role": "user", "content": "hello", "api_key": plant()}],
        "tools": [mcp, stdio, {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "mcp_servers": [{"type": "url", "url": "https://mcp.example", "name": "x", "authorization_token": plant()}],
        "api_key": plant(), "apiKey": plant(), "api_base": f"https://u:{plant()}@elsewhere/v1", "headers": {"X-Key": plant()},
        "extra_headers": {"x-api-key": plant()},
        "extra_body": {"api_key": plant(), "deep": {"er": [{"access_token": plant(), "client_secret": plant()}]}},
        "metadata": {"password": plant(), "token": plant(), "secret": plant(), "note": f"Authorization: Bearer {plant()}", "refresh_token": plant()},
        "vault": {"aws_secret_access_key": plant(), "privateKey": plant(), "passphrase": plant(), "session-token": plant()},
        "options": [{"name": "X-Api-Key", "value": plant()}, {"credentials": [plant(), plant()]}],
    }  # fmt: skip
    login = base64.b64encode(f"user:{plant()}".encode()).decode()
    headers = {
        "x-api-key": plant(), "api-key": plant(), "Authorization": f"Basic {login}", "Cookie": f"session={plant()}", "X-Goog-Api-Key": plant(),
        "X-Auth-Token": plant(),
    }  # fmt: skip
    return body, headers, f"api_key={plant()}&key={plant()}&sig={plant()}"


@pytest.fixture
def echo() -> Iterator[tuple[Echo, str]]:
    server = Echo()
    with served(server.app()) as url:
        yield server, url


@pytest.mark.parametrize("how", ["error", "answer", "stream"])
def test_forty_secrets_are_in_nothing_that_is_written_of_a_call(
    echo: tuple[Echo, str], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = echo
    server.status = 401 if how == "error" else 200
    plant, owner = Planted(), Planted()
    body, headers, query = request_full_of(plant)
    for name in ("SOME_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "OTHER_CLIENT_SECRET"):
        monkeypatch.setenv(name, plant())
    monkeypatch.setenv("OTHER_DATABASE_URL", f"postgresql://u:{plant()}@h/d")
    body["messages"].append(
        {"role": "user", "content": f"tool said: {plant.all[-1]} {plant.all[-2]} {plant.all[-3]}" + " pieces" * (how == "stream")}
    )
    body["stream"] = how == "stream"
    assert len(plant.all) >= 40
    with Store(tmp_path / "s.db") as store, caplog.at_level(logging.DEBUG):
        upstream = HttpUpstream("m", url, key=(key := f"owner{owner()}"))
        with served(Gateway(store, upstream).app()) as gateway:
            status, told = asked("POST", f"{gateway}/v1/chat/completions?{query}", body, **headers)
        store.flush()
        (transition,) = store.rollout(next(store.rollouts()).id).transitions
    assert status == server.status
    assert key in server.received  # it was sent, said back, and not passed on
    assert key not in told
    assert MARK in told
    if how == "error":
        assert transition.error is not None
        assert "wrong key" in transition.error
    else:
        assert transition.error is None
        assert len(transition.output) > 200
    assert transition.request["body"]["messages"][0]["content"] == "hello"
    assert plant.in_(everything_in(tmp_path)) == []
    assert owner.in_(everything_in(tmp_path)) == []
    assert plant.in_(caplog.text) == []


@pytest.mark.parametrize("status", [401, 200])
def test_secrets_of_a_call_in_geminis_dialect_are_in_nothing_that_is_written(
    echo: tuple[Echo, str], tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = echo
    server.status = status  # 200 with what is no answer of Gemini's
    plant, owner = Planted(), Planted()
    body, headers, query = request_full_of(plant)
    search = {"externalApi": {"endpoint": "https://s", "apiAuth": {"apiKeyConfig": {"apiKeyString": plant()}}}}
    maps = {"authConfig": {"apiKeyConfig": {"api_key_string": plant()}, "oauthConfig": {"accessToken": plant()}}}
    tools = [*body["tools"], {"retrieval": search}, {"googleMaps": maps}]
    gemini = {**body, "contents": [{"role": "user", "parts": [{"text": "hello"}]}], "tools": tools}
    with Store(tmp_path / "s.db") as store, caplog.at_level(logging.DEBUG):
        upstream = HttpUpstream("m", url, key=(key := f"owner{owner()}"))
        with served(Gateway(store, upstream).app()) as gateway:
            found, told = asked("POST", f"{gateway}/v1beta/models/m:generateContent?{query}", gemini, **headers)
        store.flush()
        (transition,) = store.rollout(next(store.rollouts()).id).transitions
    assert (found, transition.error is not None, transition.request["dialect"]) == (status, True, "gemini")
    assert key in server.received
    assert key not in told
    assert "&key=" not in server.received  # the caller's own, where the gateway asks with its own
    assert plant.in_(everything_in(tmp_path)) == []
    assert owner.in_(everything_in(tmp_path)) == []
    assert plant.in_(caplog.text) == []


def test_litellms_key_of_the_environment_is_neither_stored_nor_told_to_the_caller(
    echo: tuple[Echo, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = echo
    plant = Planted()
    for name in ("OPENAI_API_KEY", "GROQ_API_KEY"):
        monkeypatch.setenv(name, plant())
    with Store(tmp_path / "s.db") as store:
        for at, upstream in enumerate((LitellmUpstream("openai/m", {"api_base": f"{url}/v1"}), LitellmUpstream("groq/m", {"api_base": url}))):
            with served(Gateway(store, upstream).app()) as gateway:
                for status in (401, 200):
                    server.status = status
                    found, told = asked("POST", f"{gateway}/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
                    assert (found, MARK in told) == (status, True), told
                    assert plant.all[at] in server.received
                    assert plant.in_(told) == []
        store.flush()
    assert plant.in_(everything_in(tmp_path)) == []


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_key_that_a_server_says_back_in_pieces_does_not_reach_the_caller(size: int) -> None:
    key, text = b"abcabcabd-1", b"abcabcab abcabcabcabd-1 x abcabcabd-1abcabcabd-1 abc"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(text), size):
            yield text[at : at + size]

    async def collected() -> bytes:
        return b"".join([part async for part in _without(chunks(), key)])

    assert asyncio.run(collected()) == text.replace(key, b"[key]")


def test_texts_that_merely_look_like_secrets_are_stored_byte_for_byte(tmp_path: Path) -> None:
    said = "Bearer of news: sk-learn, password: hunter22, token=abcdefgh12345678 and api_key: 9f8e7d6c5b4a39281706f5e4d3c2b1a0 \u00e9 \U0001f600"
    tokens = [{"token": "Bearer", "logprob": -0.5}, {"token": "sk-0123456789abcdef", "logprob": -0.1}]
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 5,
            "tools": [{"type": "function", "function": {"name": "login", "description": said, "parameters": {
                "type": "object", "properties": {"password": {"type": "string"}, "headers": {"type": "object"}}, "required": ["password"]}}}]}  # fmt: skip
    answer = {"choices": [{"message": {"content": said, "tool_calls": [{"function": {"name": "login", "arguments": said}}]},
                           "logprobs": {"content": tokens}}], "usage": {"prompt_tokens": 1}}  # fmt: skip
    rollout = Rollout(inputs={"password": "hunter22", "api_key": "a task about keys 12345678"}, prediction={"secret": said})
    rollout.metadata = {"entities": {"password": "hunter22"}}
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(rollout)
        request = {"dialect": "chat", "body": body}
        store.put_transition(rollout.id, Transition(t=0, model="m", request=request, response={"body": answer}, output=said))
        store.flush()
        found = store.rollout(rollout.id)
    assert (found.inputs, found.prediction, found.metadata) == (rollout.inputs, rollout.prediction, rollout.metadata)
    assert (found.transitions[0].request, found.transitions[0].response, found.transitions[0].output) == (request, {"body": answer}, said)


def test_what_a_rollout_is_opened_and_ended_with_keeps_no_credentials(echo: tuple[Echo, str], tmp_path: Path) -> None:
    plant = Planted()
    with Store(tmp_path / "s.db") as store, served(Gateway(store, upstream_of("m", base=echo[1]), key="gateway-key-1").app()) as gateway:
        owner = {"Authorization": "Bearer gateway-key-1"}
        told = {"metadata": {"client": {"api_key": plant(), "headers": {"X-Any": plant()}}, "url": f"https://u:{plant()}@h"}}
        opened = post(f"{gateway}/assay/rollouts", told, **owner)[1]
        error = f"AuthenticationError: Incorrect API key provided: {'sk-' + plant()}; Authorization: Bearer {plant()}, api_key={plant()}"
        assert post(f"{gateway}/assay/rollouts/{opened['id']}/close", {"status": "error", "error": error}, **owner)[0] == 200
        store.put_run("r", kind="k", config={"optimizer_settings": {"api_key": plant()}, "api_base": f"http://h?api_key={plant()}"}, status="done",
                      started_at=0.0)  # fmt: skip
        store.flush()
        kept = store.rollout(opened["id"])
    assert kept.error == f"AuthenticationError: Incorrect API key provided: {MARK}; Authorization: Bearer {MARK}, api_key={MARK}"
    assert plant.in_(everything_in(tmp_path)) == []
    assert "gateway-key-1" not in everything_in(tmp_path)
