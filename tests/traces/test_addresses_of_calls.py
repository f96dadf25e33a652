"""Addresses: what `--upstream` takes, and LM calls at paths that are not the dialects' own."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.commands.serve import Serve
from assay.errors import ConfigError
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served
from rigs.upstream import response_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CLAUDE = {**CHAT, "max_tokens": 9}


class Server:
    """A server that answers every path, as a call of the dialect in which its path ends, and lists the addresses."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        ends = {"/chat/completions": "chat", "/completions": "completions", "/responses": "responses"}
        ends["/messages"] = "messages"
        dialect = next((name for end, name in ends.items() if request.path.endswith(end)), None)
        return web.json_response(response_body(dialect, 1, "m", "hello", []) if dialect else {"reply": "hello"})


def asked_at(folder: Path, address: str, path: str, body: Any = None) -> tuple[str, list[str], Gateway]:
    """The address at the server, the outputs on record, and the gateway, of one call through it."""
    server = Server()
    with Store(folder / "s.db") as store, served(server.app()) as behind:
        gateway = Gateway(store, upstream_of(None, base=behind + address))
        with served(gateway.app()) as url:
            status, reply = post(url + path, CHAT if body is None else body)
            assert status == 200, reply
        store.flush()
        outputs = [t.output for r in store.rollouts() for t in store.rollout(r.id).transitions]
    return server.asked[0], outputs, gateway


@pytest.mark.parametrize(
    ("address", "located"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/api/v1", "/api/v1/chat/completions"),
        ("/api/paas/v4", "/api/paas/v4/chat/completions"),
        ("/api/paas/v4/", "/api/paas/v4/chat/completions"),
        ("/v1beta/openai", "/v1beta/openai/chat/completions"),
        ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
        ("/compatible-mode/v1", "/compatible-mode/v1/chat/completions"),
        ("/v4?api-version=2", "/v4/chat/completions?api-version=2"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v3/chat/completions/?a=1", "/api/v3/chat/completions?a=1"),
        ("/openai/deployments/x?api-version=2", "/openai/deployments/x/chat/completions?api-version=2"),
        (
            "/openai/deployments/x/chat/completions?api-version=2",
            "/openai/deployments/x/chat/completions?api-version=2",
        ),
        ("/inference", "/inference/chat/completions"),
    ],
)
def test_an_upstreams_address_is_taken_as_it_is(tmp_path: Path, address: str, located: str) -> None:
    for path in ("/v1/chat/completions", "/chat/completions"):
        asked, outputs, _ = asked_at(tmp_path, address, path)
        assert asked == located
    assert outputs == ["hello"] * 2


def test_other_dialects_and_paths_follow_the_address(tmp_path: Path) -> None:
    assert asked_at(tmp_path, "/anthropic", "/v1/messages", CLAUDE)[0] == "/anthropic/v1/messages"
    assert asked_at(tmp_path, "/api/v4", "/v1/responses", {"model": "m", "input": "hi"})[0] == "/api/v4/responses"
    assert asked_at(tmp_path, "/api/v4?a=1", "/v1/embeddings?b=2", {"input": "hi"})[0] == "/api/v4/embeddings?a=1&b=2"
    assert asked_at(tmp_path, "/v1", "/tokenize", {"text": "hi"})[0] == "/tokenize"


@pytest.mark.parametrize("address", ["/api/paas/v4", "/v1beta/openai", "/openai/v1", "/openai/deployments/x"])
def test_a_callers_path_that_repeats_the_address_is_not_doubled(tmp_path: Path, address: str) -> None:
    asked, outputs, _ = asked_at(tmp_path, address, f"{address}/chat/completions")
    assert (asked, outputs) == (f"{address}/chat/completions", ["hello"])


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    for address in ("https://user:secret@host/v4", "https://host/v4?api_key=secret", "host/v4"):
        with pytest.raises(ConfigError) as refused:
            upstream_of(None, base=address)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["HTTP://Host/v4", "Http://Host/v4", " http://Host/v4/\n"])
def test_the_scheme_of_an_address_may_have_capitals_and_blanks_around_it(address: str) -> None:
    upstream = upstream_of(None, base=address)
    assert (upstream.base, upstream.version) == ("http://Host", "/v4")  # type: ignore[union-attr]


@pytest.mark.parametrize("address", ["http://", "http:///v1", "HTTPS://?a=1", "ftp://host", "//host"])
def test_an_address_without_a_host_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        upstream_of(None, base=address)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/openai/deployments/x/chat/completions?api-version=2024", CHAT),
        ("/v1/engines/x/completions", {"prompt": "hi"}),
        ("/v1/engines/x/chat/completions", {"messages": CHAT["messages"]}),
        ("/v2/projects/p/messages", CLAUDE),
        ("/anthropic/v1/messages", CLAUDE),
        ("/api/v1/chat/completions", CHAT),
        ("/api/paas/v4/chat/completions", CHAT),
        ("/v1beta/openai/chat/completions", CHAT),
        ("/proxy/openai/v1/responses", {"model": "m", "input": "hi"}),
        ("/chat/completions", CHAT),
        ("/responses", {"model": "m", "input": "hi"}),
        ("/messages", CLAUDE),
        ("/r/me/api/v3/chat/completions", CHAT),
    ],
)
def test_calls_at_odd_paths_are_recorded(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    _, outputs, gateway = asked_at(tmp_path, "", path, body)
    assert (outputs, gateway.unrecorded) == (["hello"], 0)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/model/x/converse", "/odd"])
def test_calls_in_other_formats_are_counted_and_said_at_once(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**CHAT, "prompt": "hi"}
    _, outputs, gateway = asked_at(tmp_path, "", path, body)
    assert (outputs, gateway.unrecorded) == ([], 1)
    assert [
        path.split("/")[1] in record.getMessage() for record in caplog.records if record.name == "assay.gateway"
    ] == [True]


@pytest.mark.parametrize("path", ["/v1/threads/t/messages", "/v1/embeddings", "/v1/files"])
def test_requests_that_are_no_calls_are_passed_on(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    _, outputs, gateway = asked_at(tmp_path, "", path, {"role": "user", "content": "hi"})
    assert (outputs, gateway.unrecorded, caplog.records) == ([], 0, [])


def test_the_default_size_of_a_request_is_the_same_everywhere(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        gateway = Gateway(store, upstream_of(None, base="http://127.0.0.1:1"))
    assert Serve().max_body_mb << 20 == gateway.max_body == 64 << 20
