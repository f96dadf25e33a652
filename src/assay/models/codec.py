"""Requests and responses as JSON: the form of the response cache and of recorded calls.

A field is written under its own name. Left out are fields that are None, and empty ones where a missing field means the
same. `tests/models/test_codec.py` compares it with the records of earlier versions, which used DSPy's own serializer.
"""

import dataclasses
import functools
import json
import mimetypes
import uuid
from collections.abc import Hashable, Mapping
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


_AUDIO = {"mpeg": "mp3", "wave": "wav"}  # formats of the API by MIME type


def chat_body(request: lm15.Request, *, media: bool = False) -> dict[str, Any]:
    """The body of a chat request, without its model.

    Args:
        media: audio and documents are written in the API's form, which DSPy refuses as it does other media.
    Raises:
        lm15.UnsupportedFeatureError: the chat API cannot carry a part or tool of the request.
    """
    blocks: dict[str, dict[str, Any]] = {}

    def marked(part: Any) -> Any:
        """A text in place of audio or a document, which is replaced by its block below."""
        if not isinstance(part, lm15.AudioPart | lm15.DocumentPart) or (block := _sound_or_file(part)) is None:
            return part
        blocks[mark := uuid.uuid4().hex] = block
        return lm15.TextPart(mark)

    if media:
        messages = (dataclasses.replace(one, parts=tuple(map(marked, one.parts))) for one in request.messages)
        request = dataclasses.replace(request, messages=tuple(messages))
    body: dict[str, Any] = json.loads(_dialect().build_request(request, False).body)
    del body["model"]
    for row in body["messages"] if blocks else ():
        if isinstance(content := row["content"], list):
            row["content"] = [blocks.get(part.get("text"), part) for part in content]
        elif content in blocks:
            row["content"] = [blocks[content]]
    return body


@functools.cache
def _dialect() -> Any:
    """Writes bodies, and sends nothing."""
    return lm15.OpenAIChatLM(api_key="none")


def _sound_or_file(part: lm15.AudioPart | lm15.DocumentPart) -> dict[str, Any] | None:
    """The API's block of a part; None if it takes none by an address."""
    if isinstance(part, lm15.AudioPart) and part.data is not None:
        form = part.media_type.partition("/")[2].removeprefix("x-")
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": _AUDIO.get(form, form)}}
    if part.file_id is not None:
        return {"type": "file", "file": {"file_id": part.file_id}}
    if part.data is None:
        return None
    name = f"file{mimetypes.guess_extension(part.media_type or '') or ''}"
    return {"type": "file", "file": {"filename": name, "file_data": f"data:{part.media_type};base64,{part.data}"}}
