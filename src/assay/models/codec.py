"""Requests and responses as JSON: the form of the response cache and of recorded calls.

A field is written under its own name. Left out are fields that are None, and empty ones where a missing field means the
same. `tests/models/test_codec.py` compares it with the records of earlier versions, which used DSPy's own serializer.

Token alternatives (top logprobs) are pruned to the likely ones that a caller reads: an engine that is asked for them
lists them at every token, 200 at 60 tokens take 659 kB, for one decision. Where a single output field is read
(`assay.models.scope.alternatives_of`), only the tokens of its value matter. The sampled tokens keep their
log-probabilities and ids.
"""

import dataclasses
import functools
import hashlib
import json
import math
import mimetypes
import re
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dspy import lm15

from assay.support.sections import sections_in

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


# -- Exact text of an answer, and the part of the provider's reply that it is read from. Does not call models.
#
# DSPy's engines parse part of a reply: an answer to a JSON schema may become an object (`DataPart`), and the arguments
# of a tool call always do. Their exact text is then only in the provider's reply. The message of that reply is
# therefore stored with the record.


_PARSED = (lm15.DataPart, lm15.ToolCallPart)
_TEXTS = (lm15.TextPart, lm15.RefusalPart)
_MEDIA = (lm15.ImagePart, lm15.AudioPart, lm15.VideoPart, lm15.DocumentPart, lm15.BinaryPart)


def text_of(response: lm15.Response | None) -> str:
    """Text of an answer: text parts, structured data as the server wrote it, refusals, and references to media.

    Empty if the model only called tools, only reasoned, or returned nothing. Tool calls and reasoning remain in the
    parts of the response.
    """
    if response is None:
        return ""
    text = "".join(written for part in response.message.parts if (written := _part_text(part, response)) is not None)
    return text + "".join(f"[{kind}: {address}]" for kind, address in _unmapped_media(response))


def _part_text(part: Any, response: lm15.Response) -> str | None:
    if isinstance(part, _TEXTS):
        return str(part.text)
    if isinstance(part, lm15.DataPart):
        return _data_text(part, response)
    if isinstance(part, _MEDIA):
        return f"[{part.type}: {_reference(part)}]"
    return None


def _data_text(part: lm15.DataPart, response: lm15.Response) -> str:
    """Text that the server wrote for a parsed value; the value as JSON if the reply is missing or differs."""
    written = reply_text(response.provider_data)
    try:
        if written and json.loads(written) == part.value:
            return written
    except (ValueError, RecursionError):
        pass
    return json.dumps(part.value, ensure_ascii=False)


def _reference(part: Any) -> str:
    """Reference to a media part: its address, file id or path, or the hash of inline data."""
    for name in ("url", "file_id", "path"):
        if (reference := getattr(part, name, None)) is not None:
            return str(reference)
    return f"sha256:{hashlib.sha256(str(part.data).encode()).hexdigest()}"


def _unmapped_media(response: lm15.Response) -> Iterator[tuple[str, str]]:
    """Images in a chat message, which DSPy's chat engine does not map to parts: pairs of kind and reference."""
    if response.provider_data is None:
        return
    message = _chat_message(response.provider_data)
    content = message.get("content")
    for item in (*_each(content if isinstance(content, list) else None), *_each(message.get("images"))):
        image = item.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, str) and url:
            inline = url.startswith("data:")
            yield "image", f"sha256:{hashlib.sha256(url.encode()).hexdigest()}" if inline else url


def _each(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def _chat_message(reply: Any) -> Mapping[str, Any]:
    choice = next(_each(reply.get("choices")), {}) if isinstance(reply, Mapping) else {}
    message = choice.get("message")
    return message if isinstance(message, Mapping) else {}


def reply_text(reply: Any) -> str:
    """Text of a provider's raw reply: chat completions, Responses, Anthropic messages and Gemini."""
    if not isinstance(reply, Mapping):
        return ""
    if "choices" in reply:
        content = _chat_message(reply).get("content")
        return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in _each(content))
    if "output" in reply:
        parts = (
            part
            for item in _each(reply["output"])
            if item.get("type") == "message"
            for part in _each(item.get("content"))
        )
        return "".join(str(part.get("text") or "") for part in parts if part.get("type") == "output_text")
    if "candidates" in reply:
        content = next(_each(reply["candidates"]), {}).get("content")
        written = _each(content.get("parts") if isinstance(content, Mapping) else None)
        return "".join(str(part.get("text") or "") for part in written if not part.get("thought"))
    return "".join(str(part.get("text") or "") for part in _each(reply.get("content")) if part.get("type") == "text")


def failure_in(reply: Any, text: str) -> str | None:
    """Description of the failure in a provider's reply with status 200; None if the reply is an answer or missing.

    Args:
        text: text that was parsed from the reply.
    """
    if not isinstance(reply, Mapping):
        return None
    first = next(_each(reply.get("choices")), {})
    extra = first.get("provider_specific_fields")  # fields that litellm does not know
    extra_error = extra.get("error") if isinstance(extra, Mapping) else None
    if error := reply.get("error") or first.get("error") or extra_error:
        return f"an error: {str(error)[:300]}"
    native_error = isinstance(extra, Mapping) and extra.get("native_finish_reason") == "error"
    if first.get("finish_reason") == "error" or native_error:
        return "an error as its finish reason"
    return None if text or _is_answer(reply) else f"no answer in it: {str(dict(reply))[:300]}"


def _is_answer(reply: Mapping[str, Any]) -> bool:
    """Whether a reply has the shape of an answer; an empty answer has it too."""
    known = [key for key in ("choices", "output", "content", "candidates") if isinstance(reply.get(key), list)]
    if not known or known[0] in ("output", "content"):  # these lists are empty if the model returned nothing
        return bool(known)
    first = next(iter(reply[known[0]]), None)
    return isinstance(first, Mapping) and (
        known[0] == "candidates" or isinstance(first.get("message"), Mapping) or "text" in first
    )


def reason_in(reply: Any) -> str:
    """The provider's own word for why an answer ended, in its reply or in a stored response; empty if there is none."""
    if not isinstance(reply, Mapping):
        return ""
    choice, candidate = next(_each(reply.get("choices")), {}), next(_each(reply.get("candidates")), {})
    cut, prompt = reply.get("incomplete_details"), reply.get("promptFeedback")
    words = (
        reply.get("provider_reason"),
        choice.get("native_finish_reason"),
        choice.get("finish_reason"),
        reply.get("stop_reason"),
        cut.get("reason") if isinstance(cut, Mapping) else None,
        candidate.get("finishReason"),
        prompt.get("blockReason") if isinstance(prompt, Mapping) else None,
    )
    return next((str(word) for word in words if word), "")


def with_completion(response: lm15.Response) -> lm15.Response:
    """The response with the text of a text completion, which DSPy's chat engine does not read."""
    reply = response.provider_data
    first = next(_each(reply.get("choices")), {}) if isinstance(reply, Mapping) else {}
    if "message" in first or not isinstance(first.get("text"), str):
        return response
    return dataclasses.replace(
        response, message=dataclasses.replace(response.message, parts=(lm15.TextPart(first["text"]),))
    )


def stored_response(response: lm15.Response, *, logprobs: bool = True) -> dict[str, Any]:
    """The canonical response in the form that is stored.

    Of the provider's reply only the message is stored, and only if the parts do not contain its exact text: token
    alternatives, usage and ids would be stored twice, and are most of its size.
    """
    if not logprobs and response.logprobs is not None:
        response = dataclasses.replace(response, logprobs=None)
    record: dict[str, Any] = response_to_dict(response)
    word = reason_in(response.provider_data)
    if word != record["finish_reason"] not in ("stop", "tool_call"):
        record["provider_reason"] = word
    if any(isinstance(part, _PARSED) for part in response.message.parts) or any(_unmapped_media(response)):
        message = _message_alone(response.provider_data)
        if message is not None:
            record["provider_data"] = message
    return record


def _message_alone(reply: Any) -> dict[str, Any] | None:
    if not isinstance(reply, Mapping):
        return None
    if message := _chat_message(reply):
        return {"choices": [{"message": dict(message)}]}
    lists = {key: reply[key] for key in ("output", "content") if isinstance(reply.get(key), list)}
    if "candidates" in reply:
        lists = {"candidates": [{"content": next(_each(reply["candidates"]), {}).get("content")}]}
    return lists or None


def streamable(response: lm15.Response) -> lm15.Response:
    """The response with structured data and refusals as text parts, because DSPy's stream has no events for them."""
    parts = response.message.parts
    if not any(isinstance(part, lm15.DataPart | lm15.RefusalPart) for part in parts):
        return response
    texts = tuple(
        lm15.TextPart(_part_text(part, response) or "", continuation=part.continuation)
        if isinstance(part, lm15.DataPart | lm15.RefusalPart)
        else part
        for part in parts
    )
    return dataclasses.replace(response, message=dataclasses.replace(response.message, parts=texts))


def response_of(model: str, answer: Any) -> lm15.Response:
    """The response in an answer of a model: a `Response`, a reply in OpenAI's form, or the list of DSPy's outputs."""
    if isinstance(answer, list | tuple) and answer and isinstance(answer[0], lm15.Response):
        answer = answer[0]
    if isinstance(answer, lm15.Response):
        return answer
    if isinstance(answer, list | tuple):
        outputs = [output if isinstance(output, Mapping) else {"text": output} for output in answer]
        messages = [
            {"role": "assistant", "content": output.get("text"), "tool_calls": _plain(output.get("tool_calls"))}
            for output in outputs
        ]
        answer = {
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {k: v for k, v in message.items() if v is not None}}
                for message in messages[:1]
            ]
        }
    reply = _plain(answer)
    try:
        return lm15.response_from_openai_chat(reply, model=model)
    except Exception:  # a reply of another shape, of which at least the text is kept
        choice = (reply.get("choices") or [{}])[0] if isinstance(reply, Mapping) else {}
        message = choice.get("message") or {}
        text = message.get("content") or choice.get("text") or ("" if isinstance(reply, Mapping) else str(reply))
        usage = (reply.get("usage") if isinstance(reply, Mapping) else None) or {}
        return lm15.Response(
            id=None, model=model, message=lm15.Message.assistant([lm15.TextPart(str(text))]), finish_reason="stop",
            usage=lm15.Usage(input_tokens=usage.get("prompt_tokens"), output_tokens=usage.get("completion_tokens")),
        )  # fmt: skip


def _plain(value: Any, depth: int = 12) -> Any:
    """A reply as dictionaries and lists."""
    if depth == 0 or value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in value]
    return {key: _plain(item, depth - 1) for key, item in vars(value).items()} if hasattr(value, "__dict__") else value


LEAST = 1e-4  # probability; without alternatives below it, none of 132 stored decisions changed by more than 1e-4
_LEAST_LOG = math.log(LEAST)


def value_tokens(tokens: Sequence[str], field: str) -> range:
    """Indices of the tokens that write the value of an output field, including the token that ends it.

    Reads every prompt format. The last occurrence counts, and of its value the first line. Empty if the field is not
    found.
    """
    text, starts = "", []
    for token in tokens:
        starts.append(len(text))
        text += token
    sections = sections_in(text, (field,))
    if not sections:
        return range(0)
    at, written = sections[-1].start, text[sections[-1].start : sections[-1].end]
    quoted = written.startswith('"')
    at += quoted
    end = at + len(re.split(r"[\"\n]" if quoted else r"\n", written[quoted:], maxsplit=1)[0])
    inside = [index for index, start in enumerate(starts) if start <= end and at < start + len(tokens[index])]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def pruned_reply(reply: dict[str, Any], *, requested: bool, field: str | None) -> None:
    """Remove the alternatives that no caller reads from a raw chat completion, in place, before it is parsed.

    Args:
        requested: whether the caller requested alternatives; llama.cpp lists one per token in any case.
        field: output field whose alternatives are read; None keeps those of all tokens.
    """
    for choice in reply.get("choices") or ():
        content = ((choice or {}).get("logprobs") or {}).get("content") or []
        indices = _indices([str(token.get("token", "")) for token in content], field) if requested else range(0)
        for index, token in enumerate(content):
            alternatives = token.get("top_logprobs") or [] if index in indices else []
            token["top_logprobs"] = [top for top in alternatives if top["logprob"] >= _LEAST_LOG]


def pruned(response: "lm15.Response", field: str | None) -> "lm15.Response":
    """`pruned_reply` for a parsed response of any engine; returns the same object if nothing is removed."""
    tokens = response.logprobs
    if not tokens or not any(token.top for token in tokens):
        return response
    indices = _indices([token.token for token in tokens], field)
    if all(
        index in indices and all(top.logprob >= _LEAST_LOG for top in token.top)
        for index, token in enumerate(tokens)
        if token.top
    ):
        return response
    lean = (
        dataclasses.replace(
            token, top=tuple(top for top in token.top if top.logprob >= _LEAST_LOG) if index in indices else ()
        )
        for index, token in enumerate(tokens)
    )
    return dataclasses.replace(response, logprobs=tuple(lean))


def _indices(tokens: Sequence[str], field: str | None) -> range:
    """Indices of the field's value tokens; of all tokens without a field, or if the field is not found."""
    return (value_tokens(tokens, field) if field else None) or range(len(tokens))
