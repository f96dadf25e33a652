"""Reading calls in the dialect of Google's Gemini API: answers, streams, addresses."""

from typing import Any

import pytest
from gemini_calls import CALCULATOR, MODEL, VERTEX, content

from assay.models.unrecorded import is_lm_request
from assay.traces.gateway.events import read_events
from assay.traces.messages.dialects import answer_of, chat_messages, chat_tools, error_in
from assay.traces.messages.gemini import is_google

# -- reading


def test_a_partly_blocked_answer_keeps_the_received_text() -> None:
    body = {"candidates": [{"content": {"parts": [{"text": "Take two"}]}, "finishReason": "SAFETY"}]}
    assert (answer_of("gemini", body).output, answer_of("gemini", body).refusal, answer_of("gemini", body).finish) == (
        "Take two",
        "",
        "content_filter",
    )


def test_a_reply_without_a_candidate_is_not_an_answer() -> None:
    assert error_in("gemini", {"usageMetadata": {}}) == "no candidate"
    assert error_in("gemini", {"error": {"code": 503, "message": "overloaded"}}) == {
        "code": 503,
        "message": "overloaded",
    }


def test_media_are_kept_by_reference() -> None:
    parts = [
        {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
        {"fileData": {"mimeType": "audio/wav", "fileUri": "gs://b/a.wav"}},
    ]
    answer = answer_of("gemini", {"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]})
    assert answer.media[0].startswith("image: sha256:")
    assert answer.media[1] == "audio: gs://b/a.wav"
    (message,) = chat_messages(
        {"dialect": "gemini", "body": {"contents": {"role": "user", "parts": [{"text": "See"}, *parts]}}}
    )
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
    assert tool["function"] == {
        "name": "calculator", "description": "Multiplies.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    }  # fmt: skip


def event(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "candidates": [{"content": {"parts": list(parts), "role": "model"}, "index": 0, **more}],
        "modelVersion": "m",
    }


# -- streams


def test_streamed_arguments_are_merged_into_one_call() -> None:
    """Vertex AI's `streamFunctionCallArguments`: a part a value, by its path; texts come in pieces."""

    def partial(path: str, **value: Any) -> dict[str, Any]:
        return {"functionCall": {"partialArgs": [{"jsonPath": path, **value}], "willContinue": True}}

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
    assert body["candidates"][0]["content"]["parts"] == [
        {
            "functionCall": {
                "name": "light",
                "args": {"brightness": 50, "room": {"the name": "Living room"}, "colors": [None, {"on": False}]},
            }
        },
        {"functionCall": {"name": "next", "args": {"a": 1}}},
    ]


@pytest.mark.parametrize("path", ["$", "$.a.b", "$[0]", "$.a[99999999]"])
def test_a_contradictory_path_of_streamed_arguments_is_ignored(path: str) -> None:
    first = {
        "functionCall": {"name": "f", "partialArgs": [{"jsonPath": "$.a", "stringValue": "x"}], "willContinue": True}
    }
    wrong = {"functionCall": {"partialArgs": [{"jsonPath": path, "numberValue": 1}]}}
    body, _ = read_events("gemini", [event(first, wrong)])
    assert body is not None
    assert body["candidates"][0]["content"]["parts"][0]["functionCall"]["name"] == "f"


def test_a_stream_without_a_finish_reason_is_incomplete_unless_the_prompt_was_blocked() -> None:
    assert not read_events("gemini", [event({"text": "a"})])[1]
    assert read_events("gemini", [{"promptFeedback": {"blockReason": "SAFETY"}}]) == (
        {"promptFeedback": {"blockReason": "SAFETY"}},
        True,
    )
    assert read_events("gemini", [{"error": {"code": 500}}]) == (None, False)


# -- elsewhere


@pytest.mark.parametrize(
    ("path", "google"),
    [
        (f"{MODEL}:generateContent", True),
        (f"{VERTEX}:countTokens", True),
        ("/v1beta/files", True),
        ("/upload/v1beta/files", True),
        ("/v1/models", False),
        ("/v1/chat/completions", False),
        ("/v1/batches/b-1:cancel", False),
    ],
)
def test_googles_paths_are_recognised(path: str, google: bool) -> None:
    assert is_google(path) is google


def test_calls_that_nothing_records_are_counted() -> None:
    assert is_lm_request("POST", f"{MODEL}:streamGenerateContent?alt=sse", {"contents": []})
    assert is_lm_request("POST", "/v1beta/interactions", {"model": "gemini-2.5-flash", "input": "hi"})
    assert not is_lm_request("POST", f"{MODEL}:countTokens", {"contents": []})
