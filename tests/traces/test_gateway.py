"""The gateway over real sockets, in front of a scripted server and of the embedded model."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.errors import ConfigError
from assay.testing.serving import get, post, served
from assay.testing.upstream import ScriptedUpstream
from assay.traces import Rollout, Store, Verdict
from assay.traces.gateway.events import read_events
from assay.traces.gateway.left_open import close_abandoned
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from assay.traces.messages.dialects import answer_of

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class Stage:
    """A gateway, its store and the upstream behind it."""

    def __init__(self, gateway: Gateway, upstream: ScriptedUpstream, url: str, behind: str) -> None:
        self.gateway, self.upstream, self.url, self.behind = gateway, upstream, url, behind
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.owner = {"Authorization": f"Bearer {gateway.access.key}"}

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]

    def manage(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """A POST with the gateway's key."""
        return post(self.url + path, body, **self.owner)

    def chat(self, *texts: str, **options: Any) -> Any:
        messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
        return self.client.chat.completions.create(model="gpt-4o", messages=messages, **options)

    def settled(self, calls: int) -> None:
        """Waits until so many calls are stored: a stream's record is written after its last byte has gone out."""
        for _ in range(200):
            if self.gateway.stored >= calls:
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.gateway.stored} of {calls} calls were stored")


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    options = getattr(request, "param", {})
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of("echo", base=behind, key="upstream-secret"), run_id="run", **options)
        with served(gateway.app()) as url:
            yield Stage(gateway, upstream, url, behind)


def test_a_call_is_forwarded_unchanged_and_becomes_a_transition(stage: Stage) -> None:
    assert stage.chat("hello", temperature=0.3).choices[0].message.content == "echo: hello"
    (rollout,) = stage.rollouts()
    (transition,) = rollout.transitions
    assert transition.request == {
        "dialect": "chat",
        "body": {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.3},
    }
    assert (transition.output, transition.prompt_tokens, transition.completion_tokens, transition.error) == (
        "echo: hello",
        7,
        2,
        None,
    )
    assert (rollout.source, rollout.model, rollout.prediction, rollout.inputs) == (
        "gateway",
        "echo",
        {"answer": "echo: hello"},
        {"prompt": "hello"},
    )
    assert rollout.score is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_every_dialect_gives_the_same_record_streamed_or_not(stage: Stage, dialect: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "m", "stream": stream, "max_tokens": 50}
    if dialect == "responses":
        body = {"model": "m", "stream": stream, "input": "say this back to me"}
    else:
        body["messages"] = [{"role": "user", "content": "say this back to me"}]
    path = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}[dialect]
    if stream:
        import urllib.request

        request = urllib.request.Request(
            stage.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            through = answer.read()
        with urllib.request.urlopen(
            urllib.request.Request(stage.behind + path, data=json.dumps(body).encode()), timeout=30
        ) as answer:
            direct = answer.read()
        assert len(through) == len(direct)  # ids count up; all else is the same
    else:
        assert post(stage.url + path, body)[0] == 200
    stage.settled(1)
    (rollout,) = stage.rollouts()
    (transition,) = rollout.transitions
    assert (transition.output, transition.error) == ("echo: say this back to me", None)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_recorded_with_their_results(stage: Stage, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "use the tool"}]
    ask = stage.client.chat.completions.create
    if stream:
        parts = list(ask(model="m", messages=messages, tools=[TOOL], stream=True))  # type: ignore[call-overload]
        arguments = "".join(
            c.choices[0].delta.tool_calls[0].function.arguments for c in parts if c.choices[0].delta.tool_calls
        )
        call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        stage.settled(1)
    else:
        messages.append(
            ask(model="m", messages=messages, tools=[TOOL]).choices[0].message.model_dump(exclude_none=True)
        )
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "42"})
    assert ask(model="m", messages=messages, tools=[TOOL]).choices[0].message.content == "echo: 42"
    (rollout,) = stage.rollouts()  # one conversation, one rollout
    first, second = rollout.transitions
    (tool,) = first.tools
    assert (tool.name, tool.arguments, tool.result, tool.error) == ("calculator", {"expression": "6*7"}, "42", None)
    assert (second.t, second.output) == (1, "echo: 42")


def test_invalid_arguments_of_a_tool_are_kept_with_the_error(stage: Stage) -> None:
    stage.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "use the tool #badtool"}], tools=[TOOL]
    )  # type: ignore[list-item]
    (tool,) = stage.rollouts()[0].tools
    assert (tool.arguments, tool.error) == ({"arguments": "{broken"}, "the arguments are not a JSON object")


def test_a_growing_conversation_is_one_rollout_and_equal_ones_are_a_group(stage: Stage) -> None:
    for _ in range(3):  # three samples of one task, answered alike
        stage.chat("one")
    for _ in range(3):  # each goes on
        stage.chat("one", "echo: one", "two")
    stage.chat("other")
    rollouts = stage.rollouts()
    assert sorted(len(r.transitions) for r in rollouts) == [1, 2, 2, 2]
    groups = {r.group_id for r in rollouts if len(r.transitions) == 2}
    assert len(groups) == 1
    assert all([t.t for t in r.transitions] == list(range(len(r.transitions))) for r in rollouts)


def test_responses_continue_by_their_id(stage: Stage) -> None:
    first = stage.client.responses.create(model="m", input="one")
    stage.client.responses.create(model="m", input="two", previous_response_id=first.id)
    (rollout,) = stage.rollouts()
    assert [t.output for t in rollout.transitions] == ["echo: one", "echo: two"]


@pytest.mark.parametrize("how", ["header", "path", "key"])
def test_a_rollout_is_named_by_header_path_or_key(stage: Stage, how: str) -> None:
    fields = {
        "task_id": "t1",
        "group": "g1",
        "inputs": {"question": "?"},
        "expected": {"answer": "7"},
        "tenant": "acme",
        "data_subject": "ann",
    }
    _, opened = stage.manage("/assay/rollouts", fields)
    options: dict[str, Any] = {"base_url": f"{stage.url}/v1", "api_key": "none", "max_retries": 0}
    options.update(
        {
            "header": {"default_headers": {"x-assay-rollout": opened["id"]}},
            "path": {"base_url": opened["base_url"]},
            "key": {"api_key": opened["api_key"]},
        }[how]
    )
    client = openai.OpenAI(**options)
    for text in ("one", "something else"):  # no growing conversation
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    assert stage.manage(f"/assay/rollouts/{opened['id']}/reward", {"reward": 0.05, "t": 0, "name": "tidy"})[0] == 200
    assert (
        stage.manage(f"/assay/rollouts/{opened['id']}/close", {"reward": 0.75, "prediction": {"answer": "7"}})[0] == 200
    )
    assert stage.manage("/feedback", {"rollout": opened["id"], "rating": 1})[0] == 200
    (rollout,) = stage.rollouts()
    assert (rollout.task_id, rollout.group_id, rollout.expected, rollout.tenant) == (
        "t1",
        "g1",
        {"answer": "7"},
        "acme",
    )
    assert (rollout.score, rollout.human_rating, rollout.status, rollout.prediction) == (
        0.75,
        1.0,
        "done",
        {"answer": "7"},
    )
    assert [t.step_rewards for t in rollout.transitions] == [{"tidy": 0.05}, {}]


def test_a_rollout_ends_by_header_and_is_reopened_by_its_name(stage: Stage) -> None:
    headers = {"x-assay-rollout": "my run 7", "x-assay-task": "t", "x-assay-end": "1"}
    for text in ("one", "two"):
        stage.chat(text, extra_headers=headers)
    (rollout,) = stage.rollouts()
    assert (rollout.status, rollout.task_id, rollout.metadata["client_id"], [t.t for t in rollout.transitions]) == (
        "done",
        "t",
        "my run 7",
        [0, 1],
    )


def test_invalid_rewards_are_refused_with_the_reason(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {})
    base = "/assay/rollouts"
    for body, status, why in (
        (b'{"reward": NaN}', 422, "finite"),
        (b'{"reward": Infinity, "t": 0}', 422, "finite"),
        ({"reward": 1.5}, 422, "between 0 and 1"),
        ({"reward": True}, 422, "finite number"),
        ({"reward": 0.5, "t": 0}, 422, "0 turns"),
        ({"reward": 0.5, "t": -1}, 422, "index of a turn"),
        ({}, 422, "finite number"),
        (b"not json", 422, "is not JSON"),
        (b"[1]", 422, "JSON object"),
    ):
        answered, reply = stage.manage(f"{base}/{opened['id']}/reward", body)
        assert (answered, why in reply["error"]["message"]) == (status, True), (body, reply)
    assert stage.manage(f"{base}/nobody/reward", {"reward": 1})[0] == 404
    assert stage.manage(f"{base}/nobody/close", {})[0] == 404
    assert stage.manage(f"{base}/{opened['id']}/close", {"status": "great"})[0] == 422
    assert stage.manage("/feedback", {"rollout": "nobody", "rating": 0.5})[0] == 404
    for path, body in (
        (f"{base}/nobody/reward", {"reward": 1}),
        (f"{base}/nobody/close", {}),
        ("/feedback", {"rollout": "nobody", "rating": 0.5}),
    ):
        assert "rollout 'nobody'" in str(
            stage.manage(path, body)[1]
        )  # the name that was given, not the id that the store made of it
    assert stage.manage("/feedback", {"rollout": opened["id"], "rating": 7})[0] == 422
    assert stage.manage(base, {"speed": 3})[0] == 422
    assert stage.manage(base, {"inputs": "text"})[0] == 422
    assert stage.manage(base, {"split": "x" * 1000})[0] == 422
    assert stage.rollouts()[0].score is None


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


def test_an_answer_that_breaks_off_between_chunks_is_stored_as_received(stage: Stage) -> None:
    with pytest.raises(Exception, match=r".*"):
        for _ in stage.chat("a long text that will not come to its end #die", stream=True):
            pass
    stage.settled(1)
    (transition,) = stage.rollouts()[0].transitions
    assert transition.error is not None
    assert transition.output.startswith("echo: a")
    assert stage.gateway.stats()["unrecorded"] == 0


def test_an_unreachable_upstream_or_invalid_answer_is_an_error_of_that_call(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        stage.chat("#die")
    assert caught.value.status_code == 502
    import urllib.request

    body = json.dumps({"messages": [{"role": "user", "content": "#garbage"}]}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{stage.url}/v1/chat/completions", data=body), timeout=30
    ) as answer:
        assert answer.read() == b"{this is no json"
    errors = [r.transitions[0].error for r in stage.rollouts()]
    assert "could not be read" in errors[1]  # type: ignore[operator]
    with Store(tmp_path / "gone.db") as store:
        gateway = Gateway(store, HttpUpstream("gone", "http://127.0.0.1:9"))
        with served(gateway.app()) as url:
            assert post(f"{url}/v1/chat/completions", {"messages": []})[0] == 502
            assert gateway.stats()["stored"] == 1


def test_a_client_that_disconnects_during_the_answer_is_recorded_as_such(stage: Stage) -> None:
    host, port = stage.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [{"role": "user", "content": "wait #hang"}], "stream": True}).encode()
    with socket.create_connection((host, int(port))) as raw:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        raw.sendall(head.encode() + body)
        assert raw.recv(1000)
    stage.settled(1)
    (transition,) = stage.rollouts()[0].transitions
    assert "client went away" in str(transition.error)


def test_large_bodies_unknown_paths_and_invalid_json_are_refused(stage: Stage) -> None:
    big = {"messages": [{"role": "user", "content": "x" * (20 << 20)}]}
    status, reply = post(f"{stage.url}/v1/chat/completions", big)
    assert (status, "larger than 10 MB" in reply["error"]["message"]) == (413, True)
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
        with pytest.raises(ConfigError, match="set a key"):
            Gateway(store, HttpUpstream("x", "http://x"), host="0.0.0.0")
        with pytest.raises(ConfigError, match="at least 8"):
            Gateway(store, HttpUpstream("x", "http://x"), key="short")
    with pytest.raises(ConfigError, match="must be an address"):
        upstream_of("m", base="localhost:8000")
    with pytest.raises(ConfigError, match="name a model"):
        upstream_of(None)


def test_the_callers_key_is_sent_to_the_upstream_if_the_gateway_has_none(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with (
        Store(tmp_path / "s.db") as store,
        served(upstream.app()) as behind,
        served(Gateway(store, HttpUpstream("x", behind)).app()) as url,
    ):
        openai.OpenAI(base_url=f"{url}/v1", api_key="mine").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}]
        )
        store.flush()
    assert upstream.headers[0]["Authorization"] == "Bearer mine"
    assert b"Bearer mine" not in (tmp_path / "s.db").read_bytes()


@pytest.mark.parametrize("stage", [{"idle_s": 0.2}], indirect=True)
def test_a_rollout_that_is_never_closed_ends_unscored_and_is_counted(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {"task_id": "t"})
    stage.chat("found by itself")
    for _ in range(100):
        if not stage.gateway.rollouts.open:
            break
        time.sleep(0.05)
    by_id = {r.id: r for r in stage.rollouts()}
    never = by_id.pop(opened["id"])
    assert (never.status, never.score, never.error) == ("error", None, "the rollout was never closed")
    assert [r.status for r in by_id.values()] == ["done"]
    assert stage.gateway.stats()["unclosed"] == 1


def test_another_model_answers_new_rollouts_while_open_ones_keep_theirs(stage: Stage) -> None:
    stage.chat("one")
    other = ScriptedUpstream(name="other")
    with served(other.app()) as behind:
        stage.gateway.serve_model(HttpUpstream("newer", behind))
        stage.chat("one", "echo: one", "two")
        stage.chat("a new one")
        assert get(f"{stage.url}/v1/models")["data"][0]["id"] == "other"
    assert [(r.model, [t.model for t in r.transitions]) for r in stage.rollouts()] == [
        ("echo", ["echo", "echo"]),
        ("newer", ["newer"]),
    ]
    assert (stage.upstream.calls, other.calls) == (2, 1)
    assert stage.manage("/assay/model", {"model": "embedded/nobody"})[0] == 500
    assert (
        stage.manage("/assay/model", {"model": "mistral/some", "upstream": "http://127.0.0.1:9"})[1]["model"]
        == "mistral/some"
    )
    assert isinstance(stage.gateway.upstream, LitellmUpstream)  # an address is not taken from a caller


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


@pytest.mark.slow
def test_200_streaming_clients_at_once_lose_nothing(stage: Stage) -> None:
    failed: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            answer = "".join(
                c.choices[0].delta.content or "" for c in stage.chat(f"client {number} says a few words", stream=True)
            )
            assert answer == f"echo: client {number} says a few words"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    stage.settled(200)
    outputs = {r.transitions[0].output for r in stage.rollouts()}
    assert outputs == {f"echo: client {number} says a few words" for number in range(200)}
    assert stage.gateway.stats()["unrecorded"] == 0


def test_a_call_that_could_not_be_stored_is_counted_as_unrecorded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(stage.gateway.store, "put_transition", refuse)
    assert stage.chat("hello").choices[0].message.content == "echo: hello"
    assert get(f"{stage.url}/assay/stats", **stage.owner)["unrecorded"] == 1


def test_litellm_answers_in_all_dialects_for_other_providers(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        through = LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "none"})
        with served(Gateway(store, through).app()) as url:
            messages = [{"role": "user", "content": "hello there"}]
            for stream in (False, True):
                for path, body in (
                    ("/v1/chat/completions", {"messages": messages}),
                    ("/v1/messages", {"messages": messages, "max_tokens": 20}),
                    ("/v1/responses", {"input": "hello there"}),
                ):
                    import urllib.request

                    data = json.dumps({"model": "x", "stream": stream, **body}).encode()
                    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=60) as answer:
                        assert answer.read()
            status, reply = post(
                f"{url}/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "#429"}]}
            )
            assert status == 429
            assert "scripted 429" in reply["error"]["message"]
        store.flush()
        rollouts = [store.rollout(r.id) for r in store.rollouts()]
    assert sum(len(r.transitions) for r in rollouts) == 7
    assert {t.output for r in rollouts for t in r.transitions if t.error is None} == {"echo: hello there"}


@pytest.mark.model
def test_the_embedded_model_answers_with_token_ids_and_logprobs(embedded: str, tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        gateway = Gateway(store, upstream_of(embedded))
        with served(gateway.app()) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            for stream in (False, True):
                answer = client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "Say hi."}],
                    max_tokens=8,
                    stream=stream,
                    temperature=0,
                )  # type: ignore[call-overload]
                if stream:
                    list(answer)
        store.flush()
        transitions = [store.rollout(r.id).transitions[0] for r in store.rollouts()]
    assert len(transitions) == 2
    for transition in transitions:
        assert transition.token_ids is not None
        assert transition.logprobs is not None
        assert len(transition.token_ids) == len(transition.logprobs) == transition.completion_tokens > 0
        assert transition.weights


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({}, None),
        ({"timings": {"predicted_n": 1}}, (7,)),
        ({"timings": {"predicted_n": 3}}, None),
        ({"usage": {"completion_tokens": 1}}, (7,)),
    ],
    ids=["no count", "all of them", "a letter of three", "by usage"],
)
def test_a_streamed_answer_has_all_its_token_ids_or_none(more: dict[str, Any], ids: tuple[int, ...] | None) -> None:
    choice = {
        "index": 0,
        "delta": {"content": "京"},
        "logprobs": {"content": [{"id": 7, "token": "京", "logprob": -0.5}]},
    }
    body, complete = read_events(
        "chat",
        [{"id": "x", "choices": [choice]}, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **more}],
    )
    assert complete
    assert body is not None
    assert answer_of("chat", body).token_ids == ids


def test_rollouts_left_open_by_a_killed_gateway_can_be_ended(stage: Stage) -> None:
    stage.manage("/assay/rollouts", {"id": "left"})
    stage.manage("/assay/rollouts", {"id": "empty"})
    stage.client.with_options(default_headers={"x-assay-rollout": "left"}).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}]
    )
    stage.chat("found by its conversation")
    stage.gateway.rollouts.open.clear()  # what a kill leaves: the store alone
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8, "status": "bogus"})[0] == 422
    assert [r.score for r in stage.rollouts()] == [None, None, None]
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8})[1]["status"] == "done"
    assert stage.manage("/assay/rollouts/left/close", {})[0] == 404
    assert close_abandoned(stage.gateway.store, idle_s=3600) == {"done": 0, "error": 0, "running": 2}
    assert close_abandoned(stage.gateway.store, idle_s=0) == {"done": 1, "error": 1, "running": 0}
    by_id = {r.metadata.get("client_id", "found"): r for r in stage.rollouts()}
    assert {name: (r.status, r.score, len(r.transitions)) for name, r in by_id.items()} == {
        "left": ("done", 0.8, 1), "empty": ("error", None, 0), "found": ("done", None, 1),
    }  # fmt: skip


@pytest.mark.parametrize("length", [10, 200_000], ids=["whole row", "changes alone"])
def test_a_score_in_the_store_is_kept_when_the_gateway_writes_its_last_row(stage: Stage, length: int) -> None:
    stage.chat("a" * length)
    store = stage.gateway.store
    assert close_abandoned(store, idle_s=0) == {
        "done": 1,
        "error": 0,
        "running": 0,
    }  # while the gateway still holds it open
    (rollout,) = stage.rollouts()
    rollout.score, rollout.coverage, rollout.rubric, rollout.transitions = 0.7, 1.0, "mine", []
    rollout.verdicts = [Verdict(criterion="right", grade=0.7)]
    store.put_rollout(rollout)
    store.flush()
    assert stage.gateway.rollouts.sweep(all_of_them=True) == 1
    (after,) = stage.rollouts()
    assert (after.status, after.score, after.coverage, after.rubric) == ("done", 0.7, 1.0, "mine")
    assert after.verdicts == rollout.verdicts


def test_a_score_is_removed_with_another_prediction(stage: Stage) -> None:
    stage.chat("a")
    store = stage.gateway.store
    close_abandoned(store, idle_s=0)
    (rollout,) = stage.rollouts()
    rollout.score, rollout.rubric, rollout.transitions = 0.7, "mine", []
    store.put_rollout(rollout)
    store.flush()
    (live,) = stage.gateway.rollouts.open.values()
    live.rollout.prediction = {"answer": "another"}
    stage.gateway.rollouts.sweep(all_of_them=True)
    (after,) = stage.rollouts()
    assert (after.prediction, after.score, after.rubric) == ({"answer": "another"}, None, "")


def test_keys_that_a_server_echoes_or_a_body_contains_are_not_stored(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with (
        Store(tmp_path / "s.db") as store,
        served(upstream.app()) as behind,
        served(Gateway(store, upstream_of("m", base=behind)).app()) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-verysecret-1", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "#401"}])
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"extra_body": {"api_key": "sk-verysecret-2", "top_k": 3}},
        )
        store.flush()
        transitions = [store.rollout(r.id).transitions[0] for r in store.rollouts()]
        assert "Bearer [key]" in next(t.error for t in transitions if t.error)
        assert "verysecret" not in str(transitions)
        assert [t.request["body"]["extra_body"] for t in transitions if not t.error] == [{"top_k": 3}]


@pytest.mark.parametrize("stage", [{"one_server": True}], indirect=True)
def test_another_model_of_the_same_server_keeps_its_address_and_key(stage: Stage) -> None:
    assert stage.manage("/assay/model", {"model": "my-lora"}) == (
        200,
        {"model": "my-lora", "weights": "", "adapters": []},
    )
    stage.chat("to the adapter")
    assert stage.upstream.calls == 1
    assert stage.upstream.headers[-1]["Authorization"] == "Bearer upstream-secret"
    assert [r.transitions[0].model for r in stage.rollouts()] == ["my-lora"]


@pytest.mark.slow
def test_bodies_nested_too_deeply_are_refused(stage: Stage) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    status, reply = post(f"{stage.url}/v1/chat/completions", {"messages": [{"role": "user", "content": deep}]})
    assert (status, "nested more than 200 deep" in str(reply)) == (422, True)
    wide = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 400}]
    assert post(f"{stage.url}/v1/chat/completions", {"messages": wide})[0] == 200
