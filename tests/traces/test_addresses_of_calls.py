"""Addresses: what `--upstream` takes, and LM calls at paths that are not the dialects' own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.errors import ConfigError
from assay.traces.gateway.upstreams import upstream_of
from rigs.gateway import CHAT, AnsweringServer, Stage, body_of, opened_stage
from rigs.upstream import response_body

CLAUDE = body_of("messages")
RESPONSES = body_of("responses")
ENDS = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses", "messages": "/messages"}


class Listing(AnsweringServer):
    """Answers every path, as a call of the dialect in which its path ends, and lists the addresses."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.asked: list[str] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        dialect = next((name for name, end in ENDS.items() if request.path.endswith(end)), None)
        return web.json_response(response_body(dialect, 1, "m", "hello", []) if dialect else {"reply": "hello"})


def asked_at(folder: Path, address: str, *calls: tuple[str, Any]) -> tuple[list[str], list[str]]:
    """The addresses at the server and the outputs on record of calls through a gateway."""
    server = Listing()
    with opened_stage(folder, upstream=lambda behind: upstream_of(None, base=behind + address), server=server) as stage:
        for path, body in calls:
            assert stage.post(path, body)[0] == 200
        return server.asked, [call.output for call in stage.calls()]


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
        ("/openai/deployments/x/chat/completions?v=2", "/openai/deployments/x/chat/completions?v=2"),
        ("/inference", "/inference/chat/completions"),
    ],
)
def test_an_upstreams_address_is_taken_as_it_is(tmp_path: Path, address: str, located: str) -> None:
    calls = [(path, CHAT) for path in ("/v1/chat/completions", "/chat/completions")]
    assert asked_at(tmp_path, address, *calls) == ([located] * 2, ["hello"] * 2)


@pytest.mark.parametrize(
    ("address", "path", "body", "located"),
    [
        ("/anthropic", "/v1/messages", CLAUDE, "/anthropic/v1/messages"),
        ("/api/v4", "/v1/responses", RESPONSES, "/api/v4/responses"),
        ("/api/v4?a=1", "/v1/embeddings?b=2", {"input": "hi"}, "/api/v4/embeddings?a=1&b=2"),
        ("/v1", "/tokenize", {"text": "hi"}, "/tokenize"),
        *(  # a caller's path that repeats the address is not doubled
            (address, f"{address}/chat/completions", CHAT, f"{address}/chat/completions")
            for address in ("/api/paas/v4", "/v1beta/openai", "/openai/v1", "/openai/deployments/x")
        ),
    ],
)
def test_other_dialects_and_paths_follow_the_address(
    tmp_path: Path, address: str, path: str, body: Any, located: str
) -> None:
    asked, outputs = asked_at(tmp_path, address, (path, body))
    assert (asked, outputs) == ([located], ["hello"] if any(located.endswith(end) for end in ENDS.values()) else [])


@pytest.mark.parametrize("address", ["HTTP://Host/v4", "Http://Host/v4", " http://Host/v4/\n"])
def test_the_scheme_of_an_address_may_have_capitals_and_blanks_around_it(address: str) -> None:
    upstream = upstream_of(None, base=address)
    assert (upstream.base, upstream.version) == ("http://Host", "/v4")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "address",
    [
        None, "http://", "http:///v1", "HTTPS://?a=1", "ftp://host", "//host", "host/v4", "localhost:8000",
        "https://user:secret@host/v4", "https://host/v4?api_key=secret",
    ],
)  # fmt: skip
def test_an_address_without_a_host_or_with_a_key_is_refused_and_the_key_not_repeated(address: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        upstream_of(None, base=address)
    assert "secret" not in str(refused.value)


# -- calls at other paths


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with opened_stage(tmp_path_factory.mktemp("addresses"), Listing(), model=None) as opened:
        yield opened


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
        ("/proxy/openai/v1/responses", RESPONSES),
        ("/chat/completions", CHAT),
        ("/responses", RESPONSES),
        ("/messages", CLAUDE),
        ("/r/me/api/v3/chat/completions", CHAT),
    ],
)
def test_calls_at_odd_paths_are_recorded(stage: Stage, path: str, body: dict[str, Any]) -> None:
    before, unrecorded = len(stage.calls()), stage.gateway.unrecorded
    assert stage.post(path, body)[0] == 200
    assert (stage.calls()[-1].output, len(stage.calls()), stage.gateway.unrecorded) == ("hello", before + 1, unrecorded)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/model/x/converse", "/odd", "/v1beta/interactions"])
def test_calls_in_other_formats_are_counted_and_said_at_once(
    stage: Stage, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, unrecorded = len(stage.calls()), stage.gateway.unrecorded
    assert stage.post(path, {**CHAT, "prompt": "hi", "input": "hi"})[0] == 200
    assert (len(stage.calls()), stage.gateway.unrecorded) == (before, unrecorded + 1)
    said = [record.getMessage() for record in caplog.records if record.name == "assay.gateway"]
    assert [path.split("/")[1] in text for text in said] == [True]


@pytest.mark.parametrize("path", ["/v1/threads/t/messages", "/v1/embeddings", "/v1/files"])
def test_requests_that_are_no_calls_are_passed_on(stage: Stage, path: str, caplog: pytest.LogCaptureFixture) -> None:
    before, unrecorded = len(stage.calls()), stage.gateway.unrecorded
    assert stage.post(path, {"role": "user", "content": "hi"})[0] == 200
    assert (len(stage.calls()), stage.gateway.unrecorded, caplog.records) == (before, unrecorded, [])
