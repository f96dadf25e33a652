"""Models that do not speak the caller's dialect: the embedded one, and those behind litellm.

Most tests use a scripted chat server, one the model itself.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.traces.gateway.events import read_events
from assay.traces.gateway.translation import chat_of, chat_request, to_dialect
from assay.traces.gateway.upstreams import EmbeddedUpstream, upstream_of
from assay.traces.messages.dialects import answer_of
from rigs.gateway import PARAMETERS, PATHS, TOOL, Stage, body_of, opened_stage, through_litellm
from rigs.serving import get
from rigs.upstream import ScriptedUpstream

SCHEMA = {"type": "OBJECT", "properties": {"expression": {"type": "STRING"}}, "required": ["expression"]}
CALCULATOR = {"functionDeclarations": [{"name": "calculator", "description": "Multiplies.", "parameters": SCHEMA}]}
ANSWERS = {  # the text of an answer and the number of its calls, by prompt
    "hello": ("echo: hello", 0),
    "use the tool": ("", 1),
    "use the tool #both": ("twice, then", 2),
}


def as_embedded(behind: str) -> EmbeddedUpstream:
    """A scripted server that is called like an embedded model."""
    return EmbeddedUpstream("embedded/echo", behind, model="echo", key="", tools=True)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with opened_stage(tmp_path, ScriptedUpstream(name="/home/me/model.gguf"), upstream=as_embedded) as opened:
        yield opened


@pytest.fixture(params=[as_embedded, through_litellm])
def gemini(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A gateway that is asked in Gemini's dialect."""
    with opened_stage(tmp_path, upstream=request.param) as opened:
        yield opened


def body(dialect: str, text: str, **more: Any) -> dict[str, Any]:
    return body_of(dialect, text, **{"model": "embedded/echo", **more})


def merged(dialect: str, events: list[Any]) -> dict[str, Any]:
    streamed, complete = read_events(dialect, events)
    assert complete
    assert streamed is not None
    return streamed


def sent_events(raw: bytes) -> list[Any]:
    return [json.loads(line[5:]) for line in raw.splitlines() if line.startswith(b"data:")]


# -- the dialects of OpenAI and Anthropic


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_an_unknown_model_name_is_a_404_that_lists_the_models(stage: Stage, dialect: str) -> None:
    status, reply = stage.post(dialect, body_of(dialect, "hello", model="gpt-4o"))
    assert status == 404
    assert "'gpt-4o'" in reply["error"]["message"]
    assert "embedded/echo" in reply["error"]["message"]


def test_models_are_listed_by_name(stage: Stage) -> None:
    assert [model.id for model in stage.client.models.list()] == ["embedded/echo"]
    for path in ("/v1/models", "/models", "/r/a/models"):
        assert [model["id"] for model in get(stage.url + path)["data"]] == ["embedded/echo"]


def test_the_openai_sdk_streams_responses(stage: Stage) -> None:
    tools: Any = [{"type": "function", "name": "calculator", "parameters": PARAMETERS}]
    for text, (expected, count) in ANSWERS.items():
        streamed = ""
        with stage.client.responses.stream(model="embedded/echo", input=text, tools=tools) as stream:
            for event in stream:
                streamed += event.delta if event.type == "response.output_text.delta" else ""
            final = stream.get_final_response()
        calls = [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
        assert (final.output_text, streamed) == (expected, expected)
        assert calls == [("calculator", '{"expression": "6*7"}')] * count
        (call,) = stage.rollouts()[-1].transitions
        assert [tool.arguments for tool in call.tools] == [{"expression": "6*7"}] * count
        stored = call.response["body"]  # type: ignore[index]
        assert [stored["id"], *(item["id"] for item in stored["output"])] == [
            final.id,
            *(item.id for item in final.output),
        ]


def test_a_streamed_anthropic_message_equals_the_unstreamed_one(stage: Stage) -> None:
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    for text in ANSWERS:
        request = body("messages", text, tools=tools)
        _, unstreamed = stage.post("messages", request)
        streamed = merged("messages", sent_events(stage.stream("messages", request)))
        for block in (*unstreamed["content"], *streamed["content"]):
            block.pop("id", None)  # the scripted server numbers its calls
        assert (streamed["content"], streamed["stop_reason"]) == (unstreamed["content"], unstreamed["stop_reason"])


def test_requests_that_an_embedded_model_cannot_answer_are_refused(stage: Stage) -> None:
    status, reply = stage.post("responses", body("responses", "hello", previous_response_id="resp_1"))
    assert (status, "send all messages" in reply["error"]["message"]) == (400, True)


# -- Gemini's dialect


def ask(stage: Stage, text: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return stage.post(PATHS["gemini"].replace("/m:", "/echo:"), body_of("gemini", text, **more))


def test_an_answer_is_the_same_unstreamed_as_events_and_as_a_list(gemini: Stage) -> None:
    more = {"tools": [CALCULATOR], "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    path = PATHS["gemini"].replace("/m:generateContent", "/echo:streamGenerateContent")
    for text, (expected, count) in ANSWERS.items():
        status, unstreamed = ask(gemini, text, **more)
        assert (status, answer_of("gemini", unstreamed).prompt_tokens) == (200, 7)
        events = sent_events(gemini.stream(f"{path}?alt=sse", body_of("gemini", text, **more)))
        listed = json.loads(gemini.stream(path, body_of("gemini", text, **more)))
        for reply in (unstreamed, merged("gemini", events), merged("gemini", listed)):
            answer = answer_of("gemini", reply)
            calls = [(name, arguments) for _, name, arguments in answer.tools]
            assert calls == [("calculator", '{"expression": "6*7"}')] * count
            assert (answer.text, answer.finish) == (expected, "tool_calls" if count else "stop")
    recorded = [(call.error, call.output, len(call.tools)) for call in gemini.calls()]
    assert recorded == [(None, *answer) for answer in ANSWERS.values() for _ in range(3)]


def test_a_conversation_with_results_is_one_rollout(gemini: Stage) -> None:
    contents = body_of("gemini", "use the tool")["contents"]
    answer = ask(gemini, "", contents=contents, tools=[CALCULATOR])[1]["candidates"][0]["content"]
    call = answer["parts"][0]["functionCall"]
    result = {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"result": "42"}}}
    contents += [answer, {"role": "user", "parts": [result]}]
    reply = ask(gemini, "", contents=contents, tools=[CALCULATOR])[1]
    assert answer_of("gemini", reply).text == "echo: 42"
    rollout = gemini.rollout()
    assert ([tool.result for tool in rollout.tools], rollout.prediction) == (["42"], {"answer": "echo: 42"})


def test_gemini_answers_follow_the_requested_schema(gemini: Stage) -> None:
    schema = {"type": "OBJECT", "properties": {"value": {"type": "INTEGER"}}}
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    assert answer_of("gemini", ask(gemini, "hello", generationConfig=config)[1]).text == '{"value": 1}'
    assert gemini.call().constrained


def test_features_that_only_google_has_are_refused_and_errors_forwarded(gemini: Stage) -> None:
    for more in (
        {"cachedContent": "cachedContents/1"},
        {"tools": [{"googleSearch": {}}]},
        {"generationConfig": {"candidateCount": 2}},
    ):
        status, reply = ask(gemini, "hello", **more)
        assert (status, reply["error"]["code"], reply["error"]["status"]) == (400, 400, "INVALID_ARGUMENT")
        assert "cannot answer this" in reply["error"]["message"]
    status, reply = ask(gemini, "hello #429")
    assert (status, "scripted 429" in reply["error"]["message"]) == (429, True)


# -- the request for the embedded model, and its answer


def test_a_call_cannot_select_adapters() -> None:
    chosen = {"prompt": "a", "messages": [], "lora": [{"id": 0, "scale": 0}], "id_slot": 0}
    for dialect in ("chat", "completions"):
        assert not {"lora", "id_slot"} & chat_request(dialect, chosen, "m", tools=True).keys()


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


def test_the_answer_is_constrained_to_a_call_if_functions_must_be_called() -> None:
    must = {"functionCallingConfig": {"mode": "ANY"}}
    request = body_of("gemini", "six times seven?", tools=[CALCULATOR], toolConfig=must, stream=True)
    chat = chat_request("gemini", request, "echo", tools=False)
    schema = chat["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["name"] == {"const": "calculator"}
    assert schema["properties"]["arguments"]["properties"] == {"expression": {"type": "string", "maxLength": 400}}
    assert chat["stream"] is False


def test_settings_of_gemini_have_their_names_in_chat() -> None:
    config = {
        "temperature": 0, "topP": 0.9, "topK": 5, "seed": 3, "maxOutputTokens": 9, "stopSequences": ["x"],
        "responseMimeType": "application/json",
    }  # fmt: skip
    expected = {
        "temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 3, "max_tokens": 9, "stop": ["x"],
        "response_format": {"type": "json_object"},
    }  # fmt: skip
    chosen = {"type": "function", "function": {"name": "calculator"}}
    for mode, choice in (
        ({"mode": "ANY", "allowedFunctionNames": ["calculator"]}, chosen),
        ({"mode": "ANY"}, "required"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "AUTO"}, None),
    ):
        more = {"generationConfig": config, "tools": [CALCULATOR], "toolConfig": {"functionCallingConfig": mode}}
        chat = chat_of(body_of("gemini", "hello", **more), "m", stream=False)
        assert {name: chat[name] for name in expected} == expected
        assert chat.get("tool_choice") == choice


def test_token_ids_and_logprobs_are_in_the_place_that_gemini_has_for_them() -> None:
    tokens = [
        {"id": 7, "token": "4", "logprob": -0.5, "bytes": [52]},
        {"id": 8, "token": "2", "logprob": -0.25, "bytes": [50]},
    ]
    message = {"role": "assistant", "content": "42"}
    choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": tokens}}
    chat = {"id": "c", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    answer = answer_of("gemini", to_dialect("gemini", chat, "embedded/echo"))
    assert (answer.text, answer.token_ids, answer.logprobs, answer.finish) == ("42", (7, 8), (-0.5, -0.25), "length")


def test_the_embedded_model_itself_streams_calls_tools_and_gives_token_ids(small_embedded: str, tmp_path: Path) -> None:
    with opened_stage(tmp_path, upstream=lambda _: upstream_of(small_embedded)) as stage:
        # greedy: a sampled emoji spans several tokens, of which llama.cpp returns one, so the ids are not stored
        chosen: Any = {"model": small_embedded, "temperature": 0}
        question = "What is two plus two?"
        with stage.client.responses.stream(input=question, max_output_tokens=8, **chosen) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text
        status, reply = stage.post("messages", body_of("messages", question, **{**chosen, "max_tokens": 8}))
        assert (status, reply["model"]) == (200, small_embedded)
        messages: Any = [{"role": "user", "content": "What is 6*7?"}]
        for streams in (False, True):
            answer: Any = stage.client.chat.completions.create(
                messages=messages, tools=[TOOL], tool_choice="required", stream=streams, **chosen
            )
            parts = list(answer) if streams else []
            calls = parts[0].choices[0].delta.tool_calls if streams else answer.choices[0].message.tool_calls
            assert calls[0].function.name == "calculator"
            assert json.loads(calls[0].function.arguments).keys() == {"expression"}
        assert [model.id for model in stage.client.models.list()] == [small_embedded]
        transitions = stage.calls()
    assert [t.constrained for t in transitions] == [False, False, True, True]
    for transition in transitions:
        assert transition.error is None
        assert transition.token_ids is not None, transition.output
        assert transition.logprobs is not None
        assert len(transition.token_ids) == len(transition.logprobs) == transition.completion_tokens > 0
