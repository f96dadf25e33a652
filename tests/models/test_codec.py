"""Requests and responses as DSPy's own serializer stores them, and requests as bodies of OpenAI's chat API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dspy import lm15
from dspy.lm15 import Message, Request, Response
from dspy_internals import serializer

from assay.models.codec import chat_body, response_from_dict, response_to_dict

_STATE = (lm15.ContinuationState("openai", "opaque", {}), lm15.ContinuationState("a", "b", {"x": [1]}))
_PARTS = (
    lm15.TextPart(""),
    lm15.TextPart("Zoë", continuation=_STATE),
    lm15.ThinkingPart("first"),
    lm15.RefusalPart("no"),
    lm15.CitationPart(url="http://x", text="q"),
    lm15.CitationPart(title="t"),
    *(lm15.DataPart(value) for value in (None, [], {}, "", 0, False, {"a": [{}]})),
    lm15.DataPart({"a": 1}, probabilities={"a": {"x": 1, "y": 0}}, method="provider_classification"),
    lm15.ImagePart(url="http://x/y.png"),
    lm15.ImagePart(data="aGk=", detail="low"),
    lm15.ImagePart(file_id="f"),
    lm15.ImagePart(path=Path(__file__)),
    lm15.AudioPart(data="aGk="),
    lm15.VideoPart(url="http://v"),
    lm15.DocumentPart(data="aGk="),
    lm15.BinaryPart(data="aGk=", media_type="x/y"),
    lm15.ToolCallPart("1", "f", {}),
    lm15.ToolCallPart("1", "f", {"a": None, "b": [], "c": {"d": ""}}, continuation=_STATE),
    lm15.ToolResultPart("1", (lm15.TextPart(""), lm15.ImagePart(url="http://x")), name="f", is_error=True),
    lm15.ToolResultPart("1", (lm15.DataPart([]),), continuation=_STATE),
)
_LOGPROBS = (
    lm15.TokenLogprob("", 0, bytes=()),
    lm15.TokenLogprob("a", -1.5, bytes=(97,), token_id=0, top=(lm15.TopLogprob("b", -2, (98,)),)),
)
_ADAPTATIONS = (
    lm15.Adaptation("config.seed", "dropped", "no seeds", asked=[]),
    lm15.Adaptation("config.x", "defaulted", "needed", applied=False),
)


def _messages(part: Any) -> Iterator[Message]:
    for role in ("user", "assistant", "tool"):
        try:
            yield Message(role=role, parts=(part,), continuation=_STATE)
        except (TypeError, ValueError):  # not in a message of this role
            continue


def _responses() -> Iterator[Response]:
    for part in _PARTS:
        for message in _messages(part):
            if message.role == "assistant":
                ended = "tool_call" if isinstance(part, lm15.ToolCallPart) else "stop"
                plain = Response(id=None, model="m", message=message, finish_reason=ended, usage=lm15.Usage())
                usage = lm15.Usage(0, 2, reasoning_tokens=0)
                yield plain
                yield Response(
                    id="1", model="m", message=message, finish_reason=ended, usage=usage, logprobs=_LOGPROBS,
                    adaptations=_ADAPTATIONS, logprobs_complete=False, provider_data={"choices": []},
                )  # fmt: skip


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def test_a_response_is_written_as_in_earlier_versions_and_read_as_it_was() -> None:
    for response in _responses():
        record = response_to_dict(response)
        assert _text(record) == _text(serializer().response_to_dict(response))
        read = response_from_dict(json.loads(_text(record)))
        assert read == serializer().response_from_dict(json.loads(_text(record)))
        assert response_to_dict(read) == record


def test_all_kinds_of_parts_are_tried() -> None:
    kinds = {name for name in dir(lm15) if name.endswith("Part")}
    assert {type(part).__name__ for part in _PARTS} == kinds


def test_fields_that_assay_adds_to_a_record_are_read_or_ignored() -> None:
    response = next(_responses())
    reply = {"choices": [{"message": {"content": "4"}}]}
    read = response_from_dict({**response_to_dict(response), "provider_data": reply, "provider_reason": "cut"})
    assert (read.provider_data, read.message) == (reply, response.message)


@pytest.mark.parametrize(
    "record", [{}, {"model": "m", "finish_reason": "stop", "message": {"role": "assistant", "parts": [{"type": "x"}]}}]
)
def test_a_record_that_is_no_response_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        response_from_dict(record)


_ASKED = Message.user("2+2?")
_CALLED = Message.assistant([lm15.TextPart("I add."), lm15.ToolCallPart("1", "add", {"a": 2, "b": [2, {"c": None}]})])
_RESULT = Message(role="tool", parts=(lm15.ToolResultPart("1", (lm15.TextPart("4"),)),))
_SHOWN = Message.user([lm15.TextPart("this?"), lm15.ImagePart(url="http://x/y.png", detail="low")])
_INLINE = Message.user([lm15.ImagePart(data="aGk=", media_type="image/jpeg"), lm15.TextPart("and this?")])
_FUNCTIONS = (lm15.FunctionTool("add", "adds", {"type": "object", "properties": {}}), lm15.FunctionTool("sub"))


@pytest.mark.parametrize(
    "messages", [(_ASKED,), (_ASKED, _CALLED, _RESULT), (_SHOWN, Message.assistant("a cat"), _INLINE)]
)
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "seed": 0, "stop": ("a", "b"), "user_id": "u"},
        {"frequency_penalty": 0.1, "presence_penalty": 0.2, "logprobs": 3, "store": False},
        {"logprobs": 0, "reasoning": lm15.Reasoning("low"), "extensions": {"metadata": {"a": "b"}}},
        {"response_format": {"type": "json_object"}, "tool_choice": lm15.ToolChoice("required", parallel=False)},
        {"response_format": {"type": "json_schema", "name": "o", "schema": {"type": "object"}, "strict": True}},
        {"tool_choice": lm15.ToolChoice("required", ("add",))},
        {"tool_choice": lm15.ToolChoice("auto", ("add", "sub"))},
        {"tool_choice": lm15.ToolChoice("none"), "reasoning": lm15.Reasoning("off")},
    ],
)
def test_a_body_is_read_as_the_request(
    messages: tuple[Message, ...], system: str | None, settings: dict[str, Any]
) -> None:
    request = Request(model="m", messages=messages, system=system, tools=_FUNCTIONS, config=lm15.Config(**settings))
    assert lm15.request_from_openai_chat({"model": "m", **chat_body(request)}) == request


@pytest.mark.parametrize(
    "part", [lm15.AudioPart(data="aGk="), lm15.DocumentPart(url="http://x"), lm15.ImagePart(file_id="f")]
)
def test_media_that_the_api_does_not_take_are_refused(part: Any) -> None:
    with pytest.raises(lm15.UnsupportedFeatureError):
        chat_body(Request(model="m", messages=(Message(role="user", parts=(part,)),)))
