"""Requests as bodies of OpenAI's chat API: DSPy's public reader of such bodies gives the request back."""

from typing import Any

import pytest
from dspy import lm15
from dspy.lm15 import Message, Request

from assay.models.codec import chat_body

_ASKED = Message.user("2+2?")
_CALLED = Message.assistant([lm15.TextPart("I add."), lm15.ToolCallPart("1", "add", {"a": 2, "b": [2, {"c": None}]})])
_RESULT = Message(role="tool", parts=(lm15.ToolResultPart("1", (lm15.TextPart("4"),)),))
_SHOWN = Message.user([lm15.TextPart("this?"), lm15.ImagePart(url="http://x/y.png", detail="low")])
_INLINE = Message.user([lm15.ImagePart(data="aGk=", media_type="image/jpeg"), lm15.TextPart("and this?")])
_TOOLS = (lm15.FunctionTool("add", "adds", {"type": "object", "properties": {}}), lm15.FunctionTool("sub"))


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
    request = Request(model="m", messages=messages, system=system, tools=_TOOLS, config=lm15.Config(**settings))
    assert lm15.request_from_openai_chat({"model": "m", **chat_body(request)}) == request


@pytest.mark.parametrize(
    "part", [lm15.AudioPart(data="aGk="), lm15.DocumentPart(url="http://x"), lm15.ImagePart(file_id="f")]
)
def test_media_that_the_api_does_not_take_are_refused(part: Any) -> None:
    with pytest.raises(lm15.UnsupportedFeatureError):
        chat_body(Request(model="m", messages=(Message(role="user", parts=(part,)),)))
