"""Requests and responses as JSON: the form of the response cache and of recorded calls.

A field is written under its own name. Left out are fields that are None, and empty ones where a missing field means the
same. `tests/models/test_codec.py` compares it with the records of earlier versions, which used DSPy's own serializer.
"""

import base64
import dataclasses
import functools
import json
import mimetypes
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dspy import lm15

_PARTS: dict[str, Any] = {
    str(field.default): kind
    for kind in (
        *(lm15.TextPart, lm15.ThinkingPart, lm15.RefusalPart, lm15.CitationPart, lm15.DataPart),
        *(lm15.ImagePart, lm15.AudioPart, lm15.VideoPart, lm15.DocumentPart, lm15.BinaryPart),
        *(lm15.ToolCallPart, lm15.ToolResultPart),
    )
    for field in dataclasses.fields(kind)
    if field.name == "type"
}
# Of these an empty text, list or object is left out too: it means "not set".
_OPTIONAL = (
    *(lm15.Request, lm15.Response, lm15.Config, lm15.ToolChoice, lm15.Reasoning, lm15.CacheConfig, lm15.Usage),
    *(lm15.FunctionTool, lm15.BuiltinTool),
)
_REQUIRED = ("value", "parameters", "content", "parts", "bytes", "asked", "applied")  # written if empty
_DEFAULTS = {"is_error": (False,), "logprobs_complete": (True,)}  # left out


def request_to_dict(request: lm15.Request) -> dict[str, Any]:
    """A request as JSON values."""
    return _fields(request)


def response_to_dict(response: lm15.Response) -> dict[str, Any]:
    """A response as JSON values, without the provider's reply."""
    return _fields(dataclasses.replace(response, provider_data=None))


def response_from_dict(record: Mapping[str, Any]) -> lm15.Response:
    """A response from JSON values. Fields that `lm15.Response` does not have are ignored.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    values = dict(record)
    values["message"] = _made(lm15.Message, values["message"], parts=_part, continuation=_continuation)
    values["usage"] = _made(lm15.Usage, values.get("usage") or {})
    return _made(lm15.Response, {"id": None, **values}, logprobs=_logprob, adaptations=_adaptation)


def _fields(value: Any) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, left_out in _rules(cast(Hashable, type(value))):
        item = getattr(value, name)
        if item is None and name != "value":
            continue
        if isinstance(item, tuple):
            item = [_fields(one) if dataclasses.is_dataclass(one) else one for one in item]
        elif dataclasses.is_dataclass(item):
            item = _fields(item)
        elif isinstance(item, Path):
            item = str(item)
        if item not in left_out:
            written[name] = item
    return written


@functools.cache
def _rules(kind: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """The fields of a class, each with the values that are left out."""
    empty: tuple[Any, ...] = ("", [], {}) if kind in _OPTIONAL else ([],)
    names = [field.name for field in dataclasses.fields(kind)]
    return [(name, _DEFAULTS.get(name, () if name in _REQUIRED else empty)) for name in names]


def _made(kind: Any, record: Mapping[str, Any], **items: Any) -> Any:
    """An object of a class from its fields. `items` makes the items of the named lists."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    values = {name: value for name, value in record.items() if name in names}
    for name, make in items.items():
        if isinstance(values.get(name), list):
            values[name] = tuple(make(item) for item in values[name])
    return kind(**values)


def _part(record: Mapping[str, Any]) -> Any:
    kind = _PARTS.get(record["type"])
    if kind is None:
        raise ValueError(f"unknown type of part {record['type']!r}")
    return _made(kind, record, content=_part, continuation=_continuation)


def _continuation(record: Mapping[str, Any]) -> Any:
    return _made(lm15.ContinuationState, record)


def _logprob(record: Mapping[str, Any]) -> Any:
    return _made(lm15.TokenLogprob, record, top=_top, bytes=int)


def _top(record: Mapping[str, Any]) -> Any:
    return _made(lm15.TopLogprob, record, bytes=int)


def _adaptation(record: Mapping[str, Any]) -> Any:
    return _made(lm15.Adaptation, record)


# -- Requests as bodies of OpenAI's chat API, for engines of this process, text models and media.
#
# What the API has no field for is refused, except settings that only advise: `top_k`, a thinking budget, caching.


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
