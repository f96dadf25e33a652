"""Requests as bodies of OpenAI's chat API, for engines of this process, text models and media.

What the API has no field for is refused, except settings that only advise: `top_k`, a thinking budget, caching.
"""

import base64
import json
import mimetypes
from collections.abc import Iterable, Iterator
from typing import Any

from dspy import lm15

_AS_THEY_ARE = (
    *("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "service_tier", "store"),
)  # fields of `lm15.Config` that the API has under the same name
_AUDIO = {"mpeg": "mp3", "wave": "wav"}  # formats of the API by MIME type
_MEDIA = (lm15.ImagePart, lm15.AudioPart, lm15.VideoPart, lm15.DocumentPart, lm15.BinaryPart)


def chat_body(request: lm15.Request, *, media: bool = False) -> dict[str, Any]:
    """The body of a chat request, without its model.

    Args:
        media: audio and documents are written in the API's form; else they are refused as other media are.
    Raises:
        lm15.UnsupportedFeatureError: the chat API cannot carry a part or tool of the request.
    """
    config = request.config
    body: dict[str, Any] = {"messages": list(_messages(request, media))}
    body |= {name: value for name in _AS_THEY_ARE if (value := getattr(config, name)) is not None}
    if config.max_tokens is not None:
        body["max_completion_tokens"] = config.max_tokens
    if config.stop:
        body["stop"] = list(config.stop)
    if config.logprobs is not None:
        body["logprobs"] = True
        if config.logprobs > 0:
            body["top_logprobs"] = config.logprobs
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    if config.tool_choice is not None:
        body["tool_choice"] = _choice(config.tool_choice)
        if config.tool_choice.parallel is not None:
            body["parallel_tool_calls"] = config.tool_choice.parallel
    if config.response_format:
        body["response_format"] = _format(config.response_format)
    if config.reasoning is not None:
        body["reasoning_effort"] = "none" if config.reasoning.is_off else config.reasoning.effort
    if config.user_id is not None:
        body["user"] = config.user_id
    return body | (config.extensions or {})


def _messages(request: lm15.Request, media: bool) -> Iterator[dict[str, Any]]:
    if request.system:
        text = request.system if isinstance(request.system, str) else _text(request.system)
        yield {"role": "system", "content": text}
    for message in request.messages:
        yield from _rows(message, media)


def _rows(message: lm15.Message, media: bool) -> list[dict[str, Any]]:
    """The messages of the API that one message becomes: each result of a tool is one of its own."""
    if message.role == "tool":
        results = [part for part in message.parts if isinstance(part, lm15.ToolResultPart)]
        return [{"role": "tool", "tool_call_id": part.id, "content": _result(part)} for part in results]
    if message.role == "assistant":
        thoughts = (lm15.RefusalPart, lm15.ThinkingPart)
        written = [part for part in message.parts if isinstance(part, (lm15.TextPart, *thoughts))]
        texts = [part.text for part in written if part.text or isinstance(part, lm15.TextPart)]
        calls = [_call(part) for part in message.parts if isinstance(part, lm15.ToolCallPart)]
        row: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
        return [{**row, "tool_calls": calls} if calls else row]
    role = "system" if message.role == "developer" else message.role
    return [{"role": role, "content": content}] if (content := _content(message, media)) != [] else []


def _content(message: lm15.Message, media: bool) -> str | list[dict[str, Any]]:
    parts = [part for part in message.parts if not isinstance(part, lm15.ToolCallPart | lm15.ToolResultPart)]
    if len(parts) == 1 and isinstance(parts[0], lm15.TextPart | lm15.DataPart):
        return _text(parts)
    return [
        _image(part)
        if isinstance(part, lm15.ImagePart)
        else _sound_or_file(part)
        if media and isinstance(part, lm15.AudioPart | lm15.DocumentPart)
        else {"type": "text", "text": _text([part])}
        for part in parts
        if not isinstance(part, lm15.ThinkingPart)
    ]


def _text(parts: Iterable[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, _MEDIA):
            raise lm15.UnsupportedFeatureError(f"the chat API has no place for a part of type {part.type} here")
        if isinstance(part, lm15.DataPart):
            texts.append(json.dumps(part.value, separators=(",", ":"), ensure_ascii=False))
        elif isinstance(part, lm15.CitationPart):
            texts.append(" — ".join(text for text in (part.title, part.url, part.text) if text))
        elif isinstance(part, lm15.TextPart | lm15.ThinkingPart):
            texts.append(part.text)
    return "\n".join(texts)


def _image(part: lm15.ImagePart) -> dict[str, Any]:
    if part.file_id is not None:
        raise lm15.UnsupportedFeatureError("the chat API takes no file ids of images: pass an address or the data")
    address = part.url
    if address is None:
        data = part.data if part.data is not None else base64.b64encode(part.path.read_bytes()).decode()
        address = f"data:{part.media_type};base64,{data}"
    return {"type": "image_url", "image_url": {"url": address, **({"detail": part.detail} if part.detail else {})}}


def _sound_or_file(part: lm15.AudioPart | lm15.DocumentPart) -> dict[str, Any]:
    if isinstance(part, lm15.AudioPart) and part.data is not None:
        form = part.media_type.partition("/")[2].removeprefix("x-")
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": _AUDIO.get(form, form)}}
    if part.file_id is not None:
        return {"type": "file", "file": {"file_id": part.file_id}}
    if part.data is None:
        raise lm15.UnsupportedFeatureError(f"the chat API takes a part of type {part.type} by its data or file id")
    name = f"file{mimetypes.guess_extension(part.media_type or '') or ''}"
    return {"type": "file", "file": {"filename": name, "file_data": f"data:{part.media_type};base64,{part.data}"}}


def _result(part: lm15.ToolResultPart) -> str:
    text = _text(part.content)
    return f"[error] {text}" if part.is_error else text


def _call(part: lm15.ToolCallPart) -> dict[str, Any]:
    arguments = json.dumps(part.input, separators=(",", ":"))
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, lm15.FunctionTool):
        raise lm15.UnsupportedFeatureError(f"the chat API has no built-in tool {tool.name}")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _choice(choice: lm15.ToolChoice) -> Any:
    if choice.mode == "none" or not choice.allowed:
        return choice.mode
    named = [{"type": "function", "function": {"name": name}} for name in choice.allowed]
    if len(named) == 1 and choice.mode == "required":
        return named[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}


def _format(described: dict[str, Any]) -> dict[str, Any]:
    if described["type"] == "json_object":
        return {"type": "json_object"}
    schema = {"name": described.get("name") or "response", "schema": described["schema"]}
    return {"type": "json_schema", "json_schema": schema | {k: described[k] for k in ("strict",) if k in described}}
