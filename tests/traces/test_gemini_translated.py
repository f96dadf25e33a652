"""Gemini's dialect in front of models that do not speak it: the embedded one, and those behind litellm."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.traces import Rollout, Store
from assay.traces.gateway.events import read_events
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.translation import chat_of, chat_request, to_dialect
from assay.traces.gateway.upstreams import EmbeddedUpstream, LitellmUpstream
from assay.traces.messages.dialects import answer_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

SCHEMA = {"type": "OBJECT", "properties": {"expression": {"type": "STRING"}}, "required": ["expression"]}
CALCULATOR = {"functionDeclarations": [{"name": "calculator", "description": "Multiplies.", "parameters": SCHEMA}]}
MUST = {"functionCallingConfig": {"mode": "ANY"}}


def contents_of(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "parts": [{"text": text}]}]


class Place:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url

    def ask(self, body: dict[str, Any], model: str = "echo") -> tuple[int, dict[str, Any]]:
        return post(f"{self.url}/v1beta/models/{model}:generateContent", body)

    def streamed(self, body: dict[str, Any], query: str) -> tuple[dict[str, Any] | None, bool]:
        """What the events or the list of a stream say."""
        url = f"{self.url}/v1beta/models/echo:streamGenerateContent{query}"
        with urllib.request.urlopen(urllib.request.Request(url, data=json.dumps(body).encode()), timeout=120) as answer:
            raw = answer.read()
        events = (
            [json.loads(line[5:]) for line in raw.splitlines() if line.startswith(b"data:")]
            if query
            else json.loads(raw)
        )
        return read_events("gemini", events)

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]


@pytest.fixture(params=["embedded", "litellm"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Both are asked as chat; a scripted server answers."""
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream().app()) as behind:
        embedded = EmbeddedUpstream("embedded/echo", behind, model="echo", key="", tools=True)
        upstream = (
            embedded
            if request.param == "embedded"
            else LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "none"})
        )
        gateway = Gateway(store, upstream)
        with served(gateway.app()) as url:
            yield Place(gateway, url)


@pytest.mark.parametrize("text", ["hello", "use the tool", "use the tool #both"])
def test_an_answer_is_the_same_unstreamed_as_events_and_as_a_list(place: Place, text: str) -> None:
    body = {
        "contents": contents_of(text),
        "tools": [CALCULATOR],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
    }
    status, unstreamed = place.ask(body)
    assert status == 200
    answer = answer_of("gemini", unstreamed)
    expected = {"hello": ("echo: hello", 0), "use the tool": ("", 1), "use the tool #both": ("twice, then", 2)}[text]
    assert (answer.text, [(name, arguments) for _, name, arguments in answer.tools]) == (
        expected[0],
        [("calculator", '{"expression": "6*7"}')] * expected[1],
    )
    assert (answer.finish, answer.prompt_tokens) == ("tool_calls" if expected[1] else "stop", 7)
    for query in ("?alt=sse", ""):
        streamed, complete = place.streamed(body, query)
        assert complete
        assert streamed is not None
        again = answer_of("gemini", streamed)
        assert (again.text, [call[1:] for call in again.tools], again.finish) == (
            answer.text,
            [call[1:] for call in answer.tools],
            answer.finish,
        )
    transitions = [transition for rollout in place.rollouts() for transition in rollout.transitions]
    assert [(t.error, t.output, len(t.tools)) for t in transitions] == [(None, *expected)] * 3


def test_a_conversation_with_results_is_one_rollout(place: Place) -> None:
    contents = contents_of("use the tool")
    answer = place.ask({"contents": contents, "tools": [CALCULATOR]})[1]["candidates"][0]["content"]
    call = answer["parts"][0]["functionCall"]
    result = {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"result": "42"}}}
    contents += [answer, {"role": "user", "parts": [result]}]
    assert answer_of("gemini", place.ask({"contents": contents, "tools": [CALCULATOR]})[1]).text == "echo: 42"
    (rollout,) = place.rollouts()
    assert ([tool.result for tool in rollout.tools], rollout.prediction) == (["42"], {"answer": "echo: 42"})


def test_gemini_answers_follow_the_requested_schema(place: Place) -> None:
    schema = {"type": "OBJECT", "properties": {"value": {"type": "INTEGER"}}}
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    assert (
        answer_of("gemini", place.ask({"contents": contents_of("hello"), "generationConfig": config})[1]).text
        == '{"value": 1}'
    )
    assert place.rollouts()[0].transitions[0].constrained


@pytest.mark.parametrize(
    "more",
    [
        {"cachedContent": "cachedContents/1"},
        {"tools": [{"googleSearch": {}}]},
        {"generationConfig": {"candidateCount": 2}},
    ],
)
def test_features_that_only_google_has_are_refused(place: Place, more: dict[str, Any]) -> None:
    status, reply = place.ask({"contents": contents_of("hello"), **more})
    assert (status, reply["error"]["code"], reply["error"]["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert "cannot answer this" in reply["error"]["message"]


def test_errors_of_the_model_are_forwarded(place: Place) -> None:
    status, reply = place.ask({"contents": contents_of("hello #429")})
    assert (status, "scripted 429" in reply["error"]["message"]) == (429, True)


# -- the embedded model


def test_the_answer_is_constrained_to_a_call_if_functions_must_be_called() -> None:
    body = {"contents": contents_of("six times seven?"), "tools": [CALCULATOR], "toolConfig": MUST, "stream": True}
    chat = chat_request("gemini", body, "echo", tools=False)
    schema = chat["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["name"] == {"const": "calculator"}
    assert schema["properties"]["arguments"]["properties"] == {"expression": {"type": "string", "maxLength": 400}}
    assert chat["stream"] is False


def test_token_ids_and_logprobs_are_in_the_place_that_gemini_has_for_them() -> None:
    tokens = [
        {"id": 7, "token": "4", "logprob": -0.5, "bytes": [52]},
        {"id": 8, "token": "2", "logprob": -0.25, "bytes": [50]},
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "42"},
        "finish_reason": "length",
        "logprobs": {"content": tokens},
    }
    chat = {"id": "c", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    answer = answer_of("gemini", to_dialect("gemini", chat, "embedded/echo"))
    assert (answer.text, answer.token_ids, answer.logprobs, answer.finish) == ("42", (7, 8), (-0.5, -0.25), "length")


def test_settings_have_their_names_in_chat() -> None:
    config = {
        "temperature": 0, "topP": 0.9, "topK": 5, "seed": 3, "maxOutputTokens": 9, "stopSequences": ["x"],
        "responseMimeType": "application/json",
    }  # fmt: skip
    forced = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calculator"]}}
    chat = chat_of(
        {"contents": contents_of("hello"), "generationConfig": config, "tools": [CALCULATOR], "toolConfig": forced},
        "m",
        stream=False,
    )
    expected = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "max_tokens": 9,
        "stop": ["x"],
        "response_format": {"type": "json_object"},
    }
    assert {name: chat[name] for name in expected} == expected
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "calculator"}}
    for mode, choice in (("ANY", "required"), ("NONE", "none"), ("AUTO", None)):
        config = {"functionCallingConfig": {"mode": mode}}
        assert (
            chat_of({"contents": [], "tools": [CALCULATOR], "toolConfig": config}, "m", stream=False).get("tool_choice")
            == choice
        )
