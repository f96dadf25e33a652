"""A gateway changes nothing between a client and its upstream: paths and requests that are no LM call."""

import gzip
import json

import pytest
from transparent_stage import CALLERS_KEY, CHAT, KEY, Stage, stage as stage


def test_an_lm_call_on_another_path_is_counted_as_unrecorded(stage: Stage) -> None:
    stage.ask("POST", "/v1beta/interactions", {"model": "gemini-pro", "input": "hi"})
    stats = stage.gateway.stats()
    assert (stats["calls"], stats["stored"], stats["unrecorded"]) == (1, 0, 1)


def test_a_redirect_is_an_error_and_not_followed(stage: Stage) -> None:
    status, _, reply = stage.ask("POST", "/v1/moved", b"secret body", Authorization=f"Bearer {CALLERS_KEY}")
    assert (status, "elsewhere.example" in str(reply)) == (502, True)
    assert len(stage.echo.requests) == 1


@pytest.mark.parametrize(
    "stage",
    [{"upstream_key": "sk-owner"}, {"upstream_key": "sk-owner", "key": KEY}],
    ids=["open", "keyed"],
    indirect=True,
)
def test_the_upstreams_key_is_used_on_other_paths_only_with_the_gateways_key(stage: Stage) -> None:
    body, access = {"input": "x"}, stage.gateway.access
    token = access.token("0" * 32)
    assert stage.ask("POST", "/v1/embeddings", body)[0] == (403 if access.open else 401)
    assert stage.ask("POST", "/v1/embeddings", body, Authorization=f"Bearer {token}")[0] == 403
    assert stage.ask("POST", f"/r/{token}/v1/embeddings", body)[0] == 403
    assert stage.echo.requests == []
    assert stage.ask("POST", "/v1/embeddings", body, Authorization=f"Bearer {access.key}")[0] == 200
    assert stage.ask("POST", f"/r/{token}/v1/embeddings", body, Authorization=f"Bearer {CALLERS_KEY}")[0] == 200
    assert [headers["authorization"] for headers in stage.echo.headers] == ["Bearer sk-owner", f"Bearer {CALLERS_KEY}"]
    assert {path for _, path in stage.echo.requests} == {"/v1/embeddings"}
    assert token not in json.dumps(stage.gateway.stats())


@pytest.mark.parametrize("stage", [{}, {"key": KEY}], ids=["open", "keyed"], indirect=True)
def test_a_rollouts_token_reaches_no_other_path_of_an_upstream_without_a_key(stage: Stage) -> None:
    token, body = stage.gateway.access.token("0" * 32), {"lora_name": "mine"}
    assert stage.ask("POST", "/v1/load_lora_adapter", body, Authorization=f"Bearer {token}")[0] == 403
    assert stage.ask("POST", f"/r/{token}/v1/load_lora_adapter", body)[0] == 403
    assert stage.echo.requests == []
    assert (
        stage.ask("POST", "/v1/load_lora_adapter", body, Authorization=f"Bearer {stage.gateway.access.key}")[0] == 200
    )


@pytest.mark.parametrize("stage", [{"upstream_key": "sk-owner", "key": KEY}], indirect=True)
def test_a_rollouts_token_lists_models_and_counts_tokens(stage: Stage) -> None:
    token = stage.gateway.access.token("0" * 32)
    assert stage.ask("GET", f"/r/{token}/v1/models")[0] == 200
    assert stage.ask("POST", "/v1/messages/count_tokens", CHAT, **{"x-api-key": token})[0] == 200
    assert [headers["x-api-key"] for headers in stage.echo.headers] == ["sk-owner"] * 2
    assert stage.rollouts() == []


@pytest.mark.parametrize("path", ["/", "/assay/nothing", "/feedback", "/r/some/reward", "/health/x"])
def test_paths_of_the_gateway_are_never_forwarded(stage: Stage, path: str) -> None:
    status, _, reply = stage.ask("GET", path, Authorization=f"Bearer {stage.gateway.access.key}")
    assert (status, "is not supported here" in reply["error"]["message"]) == (404, True)
    assert stage.echo.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/../chat/completions", "/openai/deployments/..%2f..%2ffiles/chat/completions",
        "/r/a/openai/deployments/%2e%2e/completions",
        "/v1beta/models/%2E%2E%2Ffiles%3f:generateContent", "/openai/deployments/a%23/chat/completions",
        "/openai/deployments/a%5c..%5cb/chat/completions",
    ],
)  # fmt: skip
def test_a_name_in_an_address_cannot_lead_to_another_path_with_the_providers_key(stage: Stage, path: str) -> None:
    assert stage.ask("POST", path, CHAT)[0] == 422
    assert not stage.echo.requests
    assert stage.ask("POST", "/openai/deployments/my%20own%2Fmodel..v2/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/chat/completions"])
def test_a_compressed_body_reaches_the_upstream_decompressed(stage: Stage, path: str) -> None:
    body = json.dumps({**CHAT, "padding": "a" * 10_000}).encode()
    assert stage.ask("POST", path, gzip.compress(body), **{"Content-Encoding": "gzip"})[0] == 200
    assert stage.echo.bodies == [body]
    status, _, reply = stage.ask("POST", "/v1/chat/completions", b"no gzip", **{"Content-Encoding": "gzip"})
    assert (status, "cannot be read" in reply["error"]["message"]) == (400, True)


def test_a_call_that_cannot_be_recorded_is_forwarded_and_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.gateway.rollouts, "register_call", lambda *_: 1 / 0)
    assert stage.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    assert (stage.gateway.stats()["calls"], stage.gateway.stats()["stored"], stage.gateway.unrecorded) == (1, 0, 1)
