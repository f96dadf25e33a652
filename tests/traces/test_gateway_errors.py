"""The gateway over real sockets: upstream errors, clients that disconnect, invalid and hostile requests, keys."""

import json
from pathlib import Path

import openai
import pytest
from gateway_stage import Stage, stage as stage

from assay.errors import ConfigError
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream


def test_errors_and_rate_limits_of_the_upstream_are_forwarded_unchanged(stage: Stage) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        stage.chat("#429")
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.body["message"] == "scripted 429"  # type: ignore[index]
    with pytest.raises(openai.InternalServerError):
        stage.chat("#500")
    errors = [r.transitions[0].error for r in stage.rollouts()]
    assert [error[:8] for error in errors if error] == ["HTTP 429", "HTTP 500"]
    assert all(r.score is None for r in stage.rollouts())


def test_an_unreachable_upstream_or_invalid_answer_is_an_error_of_that_call(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        stage.chat("#die")
    assert caught.value.status_code == 502
    import urllib.request

    body = json.dumps({"messages": [{"role": "user", "content": "#garbage"}]}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{stage.url}/v1/chat/completions", data=body), timeout=120
    ) as answer:
        assert answer.read() == b"{this is no json"
    errors = [r.transitions[0].error for r in stage.rollouts()]
    assert "could not be read" in errors[1]  # type: ignore[operator]
    with Store(tmp_path / "gone.db") as store:
        gateway = Gateway(store, HttpUpstream("gone", "http://127.0.0.1:9"))
        with served(gateway.app()) as url:
            assert post(f"{url}/v1/chat/completions", {"messages": []})[0] == 502
            assert gateway.stats()["stored"] == 1


def test_large_bodies_unknown_paths_and_invalid_json_are_refused(stage: Stage) -> None:
    big = {"messages": [{"role": "user", "content": "x" * (65 << 20)}]}
    status, reply = post(f"{stage.url}/v1/chat/completions", big)
    assert (status, "larger than 64 MB" in reply["error"]["message"]) == (413, True)
    assert post(f"{stage.url}/v1/chat/completions", b"{broken")[0] == 422
    status, reply = post(f"{stage.url}/v1/embeddings", {"input": "x"})
    assert (status, "with the gateway's key" in reply["error"]["message"]) == (403, True)
    assert stage.gateway.stats()["refused_paths"] == {"/v1/embeddings": 1}
    assert stage.upstream.calls == 0
    assert stage.rollouts() == []


def test_emoji_and_lone_surrogates_are_forwarded_and_stored(stage: Stage) -> None:
    status, _ = post(
        f"{stage.url}/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\ud800 \\u0000"}]}',
    )
    assert status == 200
    (transition,) = stage.rollouts()[0].transitions
    assert "\U0001f600" in transition.output


@pytest.mark.parametrize("stage", [{"key": "gateway-key-1"}], indirect=True)
def test_with_a_key_other_callers_are_refused_and_no_key_is_stored(stage: Stage) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    url = f"{stage.url}/v1/chat/completions"
    assert post(url, body)[0] == 401
    assert post(url, body, Authorization="Bearer wrong")[0] == 401
    assert post(f"{stage.url}/assay/rollouts", {})[0] == 401
    assert post(url, body, Authorization="Bearer gateway-key-1")[0] == 200
    assert post(url, body, **{"x-api-key": "gateway-key-1"})[0] == 200
    _, opened = stage.manage("/assay/rollouts", {})
    assert post(url, body, Authorization=f"Bearer {opened['api_key']}")[0] == 200
    assert all("gateway-key-1" not in json.dumps(headers) for headers in stage.upstream.headers)
    assert stage.upstream.headers[0]["Authorization"] == "Bearer upstream-secret"
    stage.gateway.store.flush()
    raw = (
        Path(stage.gateway.store.url.removeprefix("sqlite:///")).read_bytes()
        + Path(stage.gateway.store.url.removeprefix("sqlite:///") + "-wal").read_bytes()
    )
    assert b"gateway-key-1" not in raw
    assert b"upstream-secret" not in raw
    assert stage.gateway.store.rollout(opened["id"]).transitions


def test_a_non_loopback_host_requires_a_key(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with pytest.raises(ConfigError, match="set the key that callers send"):
            Gateway(store, HttpUpstream("x", "http://x"), host="0.0.0.0")
        with pytest.raises(ConfigError, match="at least 8"):
            Gateway(store, HttpUpstream("x", "http://x"), key="short")
    with pytest.raises(ConfigError, match="must be an address"):
        upstream_of("m", base="localhost:8000")
    with pytest.raises(ConfigError, match="name a model"):
        upstream_of(None)


def test_requests_of_pages_of_other_sites_are_refused(stage: Stage) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert post(f"{stage.url}/v1/chat/completions", body, Origin="http://evil.example")[0] == 403
    assert post(f"{stage.url}/v1/chat/completions", body, Origin="http://localhost:3000")[0] == 200
    assert stage.upstream.calls == 1


def test_a_caller_can_neither_choose_a_server_nor_obtain_a_key(tmp_path: Path) -> None:
    mine, evil = ScriptedUpstream(), ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(mine.app()) as behind, served(evil.app()) as elsewhere:
        with served(
            Gateway(store, LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "secret"})).app()
        ) as url:
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "api_base": f"{elsewhere}/v1",
                "base_url": f"{elsewhere}/v1",
                "api_key": "sk-theirs",
            }
            assert post(f"{url}/v1/chat/completions", body)[0] == 200
        store.flush()
        request = store.rollout(next(store.rollouts()).id).transitions[0].request
    assert (mine.calls, evil.calls) == (1, 0)
    assert "sk-theirs" not in json.dumps(request)
    with pytest.raises(ConfigError, match="no user or password"):
        upstream_of("m", base="http://user:pw@host/v1")


def test_an_id_is_unique_and_a_late_call_does_not_change_the_final_status(stage: Stage) -> None:
    assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 200
    assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 422
    stage.chat("one", extra_headers={"x-assay-rollout": "mine", "x-assay-end": "0"})
    assert stage.manage("/assay/rollouts/mine/close", {"reward": 0.5})[0] == 200
    assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 422
    stage.chat("late", extra_headers={"x-assay-rollout": "mine"})
    stage.gateway.rollouts.sweep(all_of_them=True)
    (rollout,) = stage.rollouts()
    assert (rollout.status, rollout.score, [t.t for t in rollout.transitions]) == ("done", 0.5, [0, 1])


def test_a_run_whose_last_call_failed_has_no_answer(stage: Stage) -> None:
    with pytest.raises(openai.InternalServerError):
        stage.chat("#500")
    stage.gateway.rollouts.sweep(all_of_them=True)
    assert [(r.status, r.score) for r in stage.rollouts()] == [("error", None)]


def test_invalid_numbers_and_types_do_not_break_the_gateway(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {})
    huge = b'{"reward": ' + b"9" * 400 + b"}"
    assert stage.manage(f"/assay/rollouts/{opened['id']}/reward", huge)[0] == 422
    assert stage.manage(f"/assay/rollouts/{opened['id']}/reward", {"reward": 1e308, "t": 0})[0] == 422
    assert stage.manage(f"/assay/rollouts/{opened['id']}/close", {"error": {"a": 1}})[0] == 422
    assert stage.manage("/assay/rollouts", {"split": "Test"})[0] == 422
    odd = {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": "text"}]},
            {"role": "user", "content": "x"},
            "text",
            7,
        ]
    }
    assert post(f"{stage.url}/v1/chat/completions", odd)[0] == 200
