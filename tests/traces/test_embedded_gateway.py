"""An embedded model behind the gateway: every dialect, with real SDKs.

Most tests use a scripted chat server, one the model itself.
"""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.traces import Rollout, Store
from assay.traces.gateway.events import read_events
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.translation import chat_request
from assay.traces.gateway.upstreams import EmbeddedUpstream, upstream_of
from rigs.serving import get, post, served
from rigs.upstream import ScriptedUpstream

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Calculates.", "parameters": PARAMETERS}}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


class Place:
    """A gateway over an upstream, and a client of it."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An upstream that is called like an embedded model: a scripted server with the chat dialect."""
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream(name="/home/me/model.gguf").app()) as behind:
        gateway = Gateway(store, EmbeddedUpstream("embedded/echo", behind, model="echo", key="", tools=True))
        with served(gateway.app()) as url:
            yield Place(gateway, url)


def body_of(dialect: str, text: str, **more: Any) -> dict[str, Any]:
    prompt = {"input": text} if dialect == "responses" else {"messages": [{"role": "user", "content": text}]}
    return {"model": "embedded/echo", **prompt, **({"max_tokens": 60} if dialect == "messages" else {}), **more}


@pytest.mark.parametrize("dialect", PATHS)
def test_an_unknown_model_name_is_a_404_that_lists_the_models(place: Place, dialect: str) -> None:
    status, reply = post(place.url + PATHS[dialect], body_of(dialect, "hello", model="gpt-4o"))
    assert status == 404
    assert "'gpt-4o'" in reply["error"]["message"]
    assert "embedded/echo" in reply["error"]["message"]
    if dialect == "chat":
        with pytest.raises(openai.NotFoundError, match="embedded/echo"):
            place.client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hello"}])


def test_models_are_listed_by_name(place: Place) -> None:
    assert [model.id for model in place.client.models.list()] == ["embedded/echo"]
    for path in ("/v1/models", "/models", "/r/a/models"):
        assert [model["id"] for model in get(place.url + path)["data"]] == ["embedded/echo"]


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_a_call_cannot_select_adapters(dialect: str) -> None:
    body = {"prompt": "a", "messages": [], "lora": [{"id": 0, "scale": 0}], "id_slot": 0}
    assert not {"lora", "id_slot"} & chat_request(dialect, body, "m", tools=True).keys()


@pytest.mark.parametrize("text", ["say this back to me", "use the tool", "use the tool #both"])
def test_the_openai_sdk_streams_responses(place: Place, text: str) -> None:
    tools: Any = [{"type": "function", "name": "calculator", "parameters": PARAMETERS}]
    streamed = ""
    with place.client.responses.stream(model="embedded/echo", input=text, tools=tools) as stream:
        for event in stream:
            streamed += event.delta if event.type == "response.output_text.delta" else ""
        final = stream.get_final_response()
    calls = [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
    expected = {
        "say this back to me": ("echo: say this back to me", 0),
        "use the tool": ("", 1),
        "use the tool #both": ("twice, then", 2),
    }[text]
    assert (final.output_text, streamed, len(calls)) == (expected[0], expected[0], expected[1])
    assert set(calls) <= {("calculator", '{"expression": "6*7"}')}
    (rollout,) = place.rollouts()
    assert [tool.arguments for tool in rollout.tools] == [{"expression": "6*7"}] * expected[1]
    stored = rollout.transitions[0].response["body"]  # type: ignore[index]
    assert (stored["id"], [item["id"] for item in stored["output"]]) == (final.id, [item.id for item in final.output])


@pytest.mark.parametrize("text", ["hello", "use the tool", "use the tool #both"])
def test_a_streamed_anthropic_message_equals_the_unstreamed_one(place: Place, text: str) -> None:
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    _, unstreamed = post(place.url + PATHS["messages"], body_of("messages", text, tools=tools))
    data = json.dumps(body_of("messages", text, tools=tools, stream=True)).encode()
    with urllib.request.urlopen(
        urllib.request.Request(place.url + PATHS["messages"], data=data), timeout=120
    ) as answer:
        lines = [line[5:] for line in answer.read().split(b"\n") if line.startswith(b"data:")]
    streamed, complete = read_events("messages", [json.loads(line) for line in lines])
    assert complete
    assert streamed is not None
    for block in (*unstreamed["content"], *streamed["content"]):
        block.pop("id", None)  # the scripted server numbers its calls
    assert (streamed["content"], streamed["stop_reason"]) == (unstreamed["content"], unstreamed["stop_reason"])


def test_requests_that_an_embedded_model_cannot_answer_are_refused(place: Place) -> None:
    status, reply = post(f"{place.url}/v1/responses", body_of("responses", "hello", previous_response_id="resp_1"))
    assert (status, "send all messages" in reply["error"]["message"]) == (400, True)


def test_a_template_without_tools_gets_calls_and_results_as_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    assert chat_request("chat", {"messages": talk}, "echo", tools=False)["messages"] == [
        {"role": "assistant", "content": '{"name": "calculator", "arguments": {"expression": "6*7"}}'},
        {"role": "user", "content": "The tool's result: 42"},
    ]
    assert chat_request("chat", {"messages": talk}, "echo", tools=True)["messages"] == talk


def test_the_embedded_model_itself_streams_calls_tools_and_gives_token_ids(small_embedded: str, tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        gateway = Gateway(store, upstream_of(small_embedded))
        with served(gateway.app()) as url:
            place = Place(gateway, url)
            # greedy: a sampled emoji spans several tokens, of which llama.cpp returns one, so the ids are not stored
            question = "What is two plus two?"
            with place.client.responses.stream(
                model=small_embedded, input=question, max_output_tokens=8, temperature=0
            ) as stream:
                for _ in stream:
                    pass
                assert stream.get_final_response().output_text
            status, reply = post(
                f"{url}/v1/messages", body_of("messages", question, model=small_embedded, max_tokens=8, temperature=0)
            )
            assert (status, reply["model"]) == (200, small_embedded)
            for streams in (False, True):
                settings: Any = {
                    "model": small_embedded,
                    "tools": [TOOL],
                    "tool_choice": "required",
                    "temperature": 0,
                    "stream": streams,
                }
                answer: Any = place.client.chat.completions.create(
                    messages=[{"role": "user", "content": "What is 6*7?"}], **settings
                )
                parts = list(answer) if streams else []
                calls = parts[0].choices[0].delta.tool_calls if streams else answer.choices[0].message.tool_calls
                assert calls[0].function.name == "calculator"
                assert json.loads(calls[0].function.arguments).keys() == {"expression"}
            listed = [model.id for model in place.client.models.list()]
        transitions = [transition for rollout in place.rollouts() for transition in rollout.transitions]
    assert listed == [small_embedded]
    assert [t.constrained for t in transitions] == [False, False, True, True]
    for transition in transitions:
        assert transition.error is None
        assert transition.token_ids is not None, transition.output
        assert transition.logprobs is not None
        assert len(transition.token_ids) == len(transition.logprobs) == transition.completion_tokens > 0
