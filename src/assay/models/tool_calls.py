"""Tool calls that a model wrote as text: small models omit the marks by which llama.cpp detects tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SPACE = re.compile(r"\s*")
_MARKS = re.compile(r"</?tool_call>|```(?:json)?|\[\[ ## \w+ ## \]\]")  # what models and prompts write around an object


def with_tool_calls(reply: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reply with tool calls, if its whole text is JSON objects that name an offered tool and its arguments."""
    message = ((reply.get("choices") or [{}])[0] or {}).get("message") or {}
    text = message.get("content")
    if message.get("tool_calls") or not isinstance(text, str):
        return reply
    names = {str(tool.get("function", {}).get("name")) for tool in tools}
    parsed = [_call(value, names) for value in _objects(_MARKS.sub(" ", text))]
    if not parsed or None in parsed:
        return reply
    calls = [
        {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for at, (name, arguments) in enumerate(call for call in parsed if call is not None)
    ]
    choice = {
        **reply["choices"][0],
        "finish_reason": "tool_calls",
        "message": {**message, "content": None, "tool_calls": calls},
    }
    return {**reply, "choices": [choice, *reply["choices"][1:]]}


def _objects(text: str) -> list[Any]:
    """The JSON values that a text consists of; empty if it contains anything else."""
    values, at, decoder = list[Any](), 0, json.JSONDecoder()
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
    return values


def _call(value: Any, names: set[str]) -> tuple[str, dict[str, Any]] | None:
    if (
        not isinstance(value, dict)
        or value.get("name") not in names
        or not set(value) <= {"name", "arguments", "parameters"}
    ):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return (str(value["name"]), arguments) if isinstance(arguments, dict) else None
