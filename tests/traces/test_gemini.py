"""Calls in the dialect of Google's Gemini API: at the gateway, as read, and in exports."""

import http.client
import json
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli import group
from assay.datasets.tasks import task_key
from assay.support.scrubbing import fields
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.gateway.events import read_events
from assay.traces.gateway.upstreams import HttpUpstream, upstream_of
from assay.traces.messages.dialects import answer_of, chat_messages, chat_tools
from assay.traces.messages.final_answer import final_answer
from assay.traces.messages.gemini import is_google
from assay.traces.store.sealing import store_splits
from rigs.gateway import KEY, Stage, stage as stage
from rigs.serving import get, send

MODEL = "/v1beta/models/gemini-2.5-flash"
VERTEX = "/v1/projects/p/locations/l/publishers/google/models/gemini-2.5-flash"
STREAM = f"{MODEL}:streamGenerateContent"
GOOGLE = {"x-goog-api-key": KEY}
SCHEMA = {"type": "OBJECT", "properties": {"expression": {"type": "STRING"}}, "required": ["expression"]}
CALCULATOR = {"functionDeclarations": [{"name": "calculator", "description": "Multiplies.", "parameters": SCHEMA}]}
keyed = pytest.mark.parametrize("stage", [{"model": None, "key": KEY, "upstream_key": "secret"}], indirect=True)


def content(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


def ask(stage: Stage, *contents: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    return stage.post(f"{MODEL}:generateContent", {"contents": list(contents), **more}, **GOOGLE)


# -- through the gateway


@keyed
def test_a_call_is_forwarded_unchanged_and_becomes_a_transition(stage: Stage) -> None:
    more = {
        "systemInstruction": {"parts": [{"text": "Be kind."}]},
        "generationConfig": {"temperature": 0.3, "maxOutputTokens": 50},
    }
    status, reply = ask(stage, content("hello"), **more)
    assert (status, reply["candidates"][0]["content"]["parts"]) == (200, [{"text": "echo: hello"}])
    rollout, call = stage.rollout(), stage.call()
    body = {"contents": [content("hello")], **more}
    assert call.request == {"dialect": "gemini", "model": "gemini-2.5-flash", "stream": False, "body": body}
    assert call.response == {"body": reply}
    assert (call.output, call.prompt_tokens, call.completion_tokens, call.error) == ("echo: hello", 7, 2, None)
    messages = [(message["role"], message["content"]) for message in chat_messages(call.request)]
    assert messages == [("system", "Be kind."), ("user", "hello")]
    assert (rollout.inputs, rollout.prediction) == ({"prompt": "hello"}, {"answer": "echo: hello"})


@keyed
@pytest.mark.parametrize("query", ["?alt=sse", ""])
def test_a_stream_is_forwarded_unchanged_and_stored_like_an_unstreamed_answer(stage: Stage, query: str) -> None:
    body = {"contents": [content("use the tool #both")], "tools": [CALCULATOR]}
    unstreamed = ask(stage, *body["contents"], tools=body["tools"])[1]
    raw = stage.stream(STREAM + query, body, **GOOGLE)
    stage.upstream.restart(at=1)
    direct = Stage(stage.gateway, stage.upstream, stage.behind, stage.behind)
    assert raw == direct.stream(STREAM + query, body)
    first, second = stage.calls()
    assert (second.request["stream"], second.error) == (True, None)
    assert second.response == {"body": {**unstreamed, "responseId": "gen-2"}}
    assert [(tool.name, tool.arguments) for tool in first.tools] == [("calculator", {"expression": "6*7"})] * 2
    assert second.tools == first.tools


@keyed
def test_a_function_that_must_be_called_ends_the_run_with_its_arguments(stage: Stage) -> None:
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calculator"]}}
    ask(stage, content("answer"), tools=[CALCULATOR], toolConfig=config)
    assert stage.rollout().prediction == {"answer": "6*7"}
    assert final_answer(stage.calls()).value == "6*7"


@keyed
@pytest.mark.parametrize("query", ["?alt=sse", ""])
def test_an_interrupted_stream_is_incomplete_and_keeps_the_received_parts(stage: Stage, query: str) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        stage.stream(STREAM + query, {"contents": [content("a long story to tell #die")]}, **GOOGLE)
    assert stage.call().error is not None
    assert stage.call().output.startswith("echo: a")


@keyed
def test_googles_key_is_accepted_in_its_places_and_in_no_others(stage: Stage) -> None:
    for query in ("", "?key=wrong-key-12"):
        status, reply = stage.post(f"{MODEL}:generateContent{query}", {"contents": [content("hello")]})
        assert (status, reply["error"]["code"], "x-goog-api-key" in reply["error"]["message"]) == (401, 401, True)
    assert stage.upstream.calls == 0
    assert stage.post(f"{MODEL}:generateContent?key={KEY}", {"contents": [content("hello")]})[0] == 200
    assert send("GET", f"{stage.url}/assay/stats?key={KEY}")[0] == 401
    assert get(f"{stage.url}/assay/stats", **GOOGLE)["calls"] == 1


def test_credentials_of_vertex_tools_are_removed_from_a_request() -> None:
    auth = {
        "apiAuth": {"apiKeyConfig": {"apiKeyString": "s3cr3t-of-search-1"}},
        "authConfig": {"apiKeyConfig": {"api_key_string": "s3cr3t-2-of-it"}},
    }
    assert "s3cr3t" not in json.dumps(fields({"tools": [{"retrieval": {"externalApi": auth}}]}))


@pytest.mark.parametrize("variable", ["GEMINI_API_KEY", "GOOGLE_API_KEY"])
def test_googles_models_are_called_at_google_in_their_dialect(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "AIza-of-the-environment")
    upstream = upstream_of("gemini/gemini-2.5-flash")
    assert isinstance(upstream, HttpUpstream)
    assert (upstream.base, upstream.model) == ("https://generativelanguage.googleapis.com", "gemini-2.5-flash")
    assert upstream.key == "AIza-of-the-environment"
    assert (upstream.dialects, upstream.other is not None) == (("gemini",), True)


# -- reading


def test_media_are_kept_by_reference() -> None:
    parts = [
        {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
        {"fileData": {"mimeType": "audio/wav", "fileUri": "gs://b/a.wav"}},
    ]
    answer = answer_of("gemini", {"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]})
    assert answer.media[0].startswith("image: sha256:")
    assert answer.media[1] == "audio: gs://b/a.wav"
    contents = {"role": "user", "parts": [{"text": "See"}, *parts]}
    (message,) = chat_messages({"dialect": "gemini", "body": {"contents": contents}})
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "file"]


def test_results_belong_to_the_function_that_they_name() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("a", "b")]
    results = [{"functionResponse": {"name": name, "response": {"result": name}}} for name in ("b", "a")]
    contents = [content("go"), {"role": "model", "parts": calls}, {"role": "user", "parts": results}]
    messages = chat_messages({"dialect": "gemini", "body": {"contents": contents}})
    by_id = {call["id"]: call["function"]["name"] for call in messages[1]["tool_calls"]}
    assert [(by_id[m["tool_call_id"]], m["content"]) for m in messages[2:]] == [("b", "b"), ("a", "a")]


def test_tools_have_schemas_that_chat_templates_read() -> None:
    (tool,) = chat_tools({"dialect": "gemini", "body": {"tools": [CALCULATOR, {"googleSearch": {}}]}})
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    assert tool["function"] == {"name": "calculator", "description": "Multiplies.", "parameters": parameters}


# -- streams


def event(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    candidate = {"content": {"parts": list(parts), "role": "model"}, "index": 0, **more}
    return {"candidates": [candidate], "modelVersion": "m"}


def partial(path: str, *, name: str | None = None, **value: Any) -> dict[str, Any]:
    call = {"partialArgs": [{"jsonPath": path, **value}], "willContinue": True}
    return {"functionCall": call if name is None else {"name": name, **call}}


def test_streamed_arguments_are_merged_into_one_call() -> None:
    """Vertex AI's `streamFunctionCallArguments`: a part a value, by its path; texts come in pieces."""
    events = [
        event({"functionCall": {"name": "light", "willContinue": True}}),
        event(partial("$.brightness", numberValue=50)),
        event(
            partial("$.room['the name']", stringValue="Living ", willContinue=True),
            partial("$.room['the name']", stringValue="room"),
        ),
        event(partial("$.colors[1].on", boolValue=False), partial("$.colors[0]", nullValue="NULL_VALUE")),
        event({"functionCall": {}}),
        event({"functionCall": {"name": "next", "args": {"a": 1}}}, finishReason="STOP"),
    ]
    body, complete = read_events("gemini", events)
    assert complete
    assert body is not None
    merged = {"brightness": 50, "room": {"the name": "Living room"}, "colors": [None, {"on": False}]}
    assert [part["functionCall"] for part in body["candidates"][0]["content"]["parts"]] == [
        {"name": "light", "args": merged},
        {"name": "next", "args": {"a": 1}},
    ]


@pytest.mark.parametrize("path", ["$", "$.a.b", "$[0]", "$.a[99999999]"])
def test_a_contradictory_path_of_streamed_arguments_is_ignored(path: str) -> None:
    body, _ = read_events("gemini", [event(partial("$.a", name="f", stringValue="x"), partial(path, numberValue=1))])
    assert body is not None
    assert body["candidates"][0]["content"]["parts"][0]["functionCall"]["name"] == "f"


def test_a_stream_without_a_finish_reason_is_incomplete_unless_the_prompt_was_blocked() -> None:
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}}
    assert not read_events("gemini", [event({"text": "a"})])[1]
    assert read_events("gemini", [blocked]) == (blocked, True)
    assert read_events("gemini", [{"error": {"code": 500}}]) == (None, False)


def test_googles_paths_are_recognised() -> None:
    for path in (f"{MODEL}:generateContent", f"{VERTEX}:countTokens", "/v1beta/files", "/upload/v1beta/files"):
        assert is_google(path)
    for path in ("/v1/models", "/v1/chat/completions", "/v1/batches/b-1:cancel"):
        assert not is_google(path)


# -- exports

QUESTION = "Write to ann.smith@acme-mail.de: how much is 6*7?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with a run that calls a function after a thought and answers then."""
    call = {"functionCall": {"name": "calculator", "args": {"expression": "6*7"}}}
    thought = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, call]}
    answered = {"functionResponse": {"name": "calculator", "response": {"result": "42"}}}
    asked = [content(QUESTION)]
    turns = ((asked, thought), ([*asked, thought, {"role": "user", "parts": [answered]}], content("42", "model")))
    given: dict[str, Any] = {"inputs": {"question": QUESTION}, "expected": {"answer": "42"}, "score": 1.0}
    with Store(tmp_path_factory.mktemp("gemini") / "assay.db") as opened:
        store_splits(opened, {"train": [task_key(given["inputs"])]})
        opened.put_rollout(Rollout(id="r1", task_id="t", status="done", split="train", model="m", **given))
        for t, (contents, answer) in enumerate(turns):
            body = {"candidates": [{"content": answer, "finishReason": "STOP"}]}
            request = {"dialect": "gemini", "body": {"contents": contents, "tools": [CALCULATOR]}}
            read = answer_of("gemini", body)
            recorded: dict[str, Any] = {"output": read.output, "tools": read.tool_calls(), "response": {"body": body}}
            opened.put_transition("r1", Transition(t=t, model="m", request=request, **recorded))
        opened.flush()
        return opened.url


def exported(store: str, kind: str, **options: Any) -> list[dict[str, Any]]:
    gates = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
    folder = assay.export(kind, kind, store=store, gates=gates, privacy="patterns", **options).path
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def test_exports_have_the_conversation_and_its_reasoning_and_hide_personal_data(store: str) -> None:
    rows = exported(store, "transitions")
    assert [(row["reasoning"], row["input"]["dialect"]) for row in rows] == [("Hm.", "gemini"), ("", "gemini")]
    (whole,) = exported(store, "sft", model="nobody/unknown", tools="native", whole=True)  # messages as they are
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "ann.smith" not in json.dumps([rows, whole])


def test_traces_show_prints_the_calls_of_a_run(store: str) -> None:
    result = CliRunner().invoke(group, ["traces", "show", "r1", "--store", store])
    assert result.exit_code == 0, result.output
    for printed in ('assistant:  [calls calculator({"expression": "6*7"})]', "reasoning: Hm.", "-> 42"):
        assert printed in result.output
