"""Converts pydantic-ai's own message format, which MLflow records, to chat messages. Does not read files.

Source: pydantic_ai/messages.py; the position of the instructions follows pydantic_ai/models/openai.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.support.values import json_text

__all__ = ["is_native", "native_conversation", "native_settings", "native_tools"]

Message = dict[str, Any]


def is_native(value: Any) -> bool:
    """Whether a value is a `ModelRequest` or `ModelResponse`."""
    parts = value.get("parts") if isinstance(value, Mapping) else None
    return (
        isinstance(parts, list)
        and bool(parts)
        and all(isinstance(part, Mapping) and "part_kind" in part for part in parts)
    )


def native_conversation(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages of a conversation. The instructions of the latest request follow the system prompts, as when
    sent.
    """
    chat = [message for native in messages for message in _messages(native)]
    instructions = next((native["instructions"] for native in reversed(messages) if native.get("instructions")), None)
    if instructions:
        position = next((position for position, message in enumerate(chat) if message["role"] != "system"), len(chat))
        chat.insert(position, {"role": "system", "content": str(instructions)})
    return chat


def _messages(native: Mapping[str, Any]) -> Iterator[Message]:
    """One message per part of a request; one message for all parts of a response."""
    parts = [part for part in native["parts"] if isinstance(part, Mapping)]
    if native.get("kind") != "response" and not any(
        part.get("part_kind") in ("text", "tool-call", "thinking") for part in parts
    ):
        for part in parts:
            yield from _request_messages(part)
        return
    text = "".join(str(part.get("content") or "") for part in parts if part.get("part_kind") == "text")
    thought = "".join(str(part.get("content") or "") for part in parts if part.get("part_kind") == "thinking")
    calls = [_native_call(part) for part in parts if part.get("part_kind") == "tool-call"]
    yield {
        "role": "assistant",
        "content": text or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thought} if thought else {}),
    }


def _request_messages(part: Mapping[str, Any]) -> Iterator[Message]:
    kind, content = part.get("part_kind"), part.get("content")
    if kind == "system-prompt":
        yield {"role": "system", "content": _text(content)}
    elif kind == "user-prompt":
        yield {
            "role": "user",
            "content": [_user_part(item) for item in content] if isinstance(content, list) else _text(content),
        }
    elif kind == "tool-return" or (kind == "retry-prompt" and part.get("tool_name")):
        yield {"role": "tool", "tool_call_id": str(part.get("tool_call_id") or ""), "content": _text(content)}
    elif content is not None:
        yield {"role": "user", "content": _text(content)}


def _user_part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("kind") == "image-url":
        return {"type": "image_url", "image_url": {"url": str(part.get("url"))}}
    return dict(part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)}


def _native_call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("args")
    text = arguments if isinstance(arguments, str) else json_text(arguments or {})
    function = {"name": str(part.get("tool_name") or ""), "arguments": text or "{}"}
    return {"id": str(part.get("tool_call_id") or ""), "type": "function", "function": function}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json_text(content)


def native_tools(parameters: Any) -> list[dict[str, Any]]:
    """Tools of `ModelRequestParameters`: the agent's tools and the output tools that end a run with a typed answer."""
    tools = []
    for tool in [*_listed(parameters, "function_tools"), *_listed(parameters, "output_tools")]:
        described = {"description": tool["description"]} if tool.get("description") else {}
        schema = {"parameters": tool["parameters_json_schema"]} if tool.get("parameters_json_schema") else {}
        tools.append({"type": "function", "function": {"name": str(tool.get("name")), **described, **schema}})
    return tools


def native_settings(parameters: Any) -> dict[str, Any]:
    """Settings in `ModelRequestParameters`: a tool must be called if text is not allowed."""
    return (
        {"tool_choice": "required"}
        if isinstance(parameters, Mapping) and parameters.get("allow_text_output") is False
        else {}
    )


def _listed(parameters: Any, name: str) -> list[Mapping[str, Any]]:
    items = parameters.get(name) if isinstance(parameters, Mapping) else None
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
