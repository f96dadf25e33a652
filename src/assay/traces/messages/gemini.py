"""Reads Google's Gemini API (`models/MODEL:generateContent`) as OpenAI chat messages. Does not call models.

Model and streaming are in the path, not in the body. The API accepts field names in camel case and in snake case.
Source: ai.google.dev/api/generate-content.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from assay.traces.messages.parts import (
    Answer,
    Message,
    arguments_text,
    chat_call,
    chat_tool,
    content_of,
    count_of,
    each,
    hashed,
    linked,
    part_texts,
    tool_message,
)

PATH = "/v1beta/models/MODEL:generateContent"
# aiohttp route for Gemini, tuned models and Vertex AI (`/v1/projects/…/models/MODEL:generateContent`)
ROUTE = "/{version:v1[a-z0-9]*}/{resource:(?:[^:]+/)?(?:models|tunedModels|endpoints)/[^/:]+}:{verb:generateContent|streamGenerateContent}"  # noqa: E501
CALL_IDS = "gemini_"  # prefix of the ids for tool calls without one
_GOOGLE = re.compile(r"^(?:/r/[^/]+)?/(?:upload/)?v1(?:alpha|beta)\d*/|/(?:models|tunedModels|endpoints)/[^/:]+:\w+$")
_MODEL = re.compile(r"(?<=/)(?:models|tunedModels|endpoints)/([^/:]+)(?=:\w+$)")
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})  # Gemini's spelling
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?([^.\[\]]+)")  # step of a JSON path
_LONGEST = 10_000  # maximum length of a list in streamed arguments
_UPPER = re.compile(r"[A-Z]")
_CODE = ("executableCode", "codeExecutionResult")  # code that Google ran during the answer
_BLOCKED = frozenset(
    {
        "SAFETY",
        "RECITATION",
        "LANGUAGE",
        "BLOCKLIST",
        "PROHIBITED_CONTENT",
        "SPII",
        "IMAGE_SAFETY",
        "IMAGE_PROHIBITED_CONTENT",
        "IMAGE_RECITATION",
        "MODEL_ARMOR",
    }
)


def is_google(path: str) -> bool:
    """Whether a path belongs to one of Google's APIs, which take the key in their own header or as `key` in the query.

    The path may start with a rollout prefix.
    """
    return _GOOGLE.search(path) is not None


def model_in(path: str) -> str:
    """The model name in a path; empty without one."""
    match = _MODEL.search(path)
    return unquote(match[1]) if match else ""


def with_model(path: str, model: str) -> str:
    """The path with its model replaced."""
    return _MODEL.sub(lambda _: f"models/{quote(model.removeprefix('models/'), safe='')}", path)


def streams(path: str) -> bool:
    """Whether a path requests a stream."""
    return path.endswith(":streamGenerateContent")


def field(value: Any, name: str) -> Any:
    """Value of a field, in camel case or snake case; None if it is missing.

    Args:
        name: Name in camel case.
    """
    if not isinstance(value, Mapping):
        return None
    result = value.get(name)
    return value.get(_UPPER.sub(lambda letter: f"_{letter[0].lower()}", name)) if result is None else result


def listed(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects of a list. The API also accepts a single object in place of a list."""
    return each([value] if isinstance(value, Mapping) else value)


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The request as chat messages; tool calls and results without ids are linked in order."""
    messages = linked(list(_messages(body)), CALL_IDS)
    return [{key: value for key, value in message.items() if key != "name"} for message in messages]


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    if (system := field(body, "systemInstruction")) is not None:
        text = part_texts(list(listed(system.get("parts"))) if isinstance(system, Mapping) else system)
        yield {"role": "system", "content": text}
    for content in listed(body.get("contents")):
        role, parts = "assistant" if content.get("role") == "model" else "user", list(listed(content.get("parts")))
        for part in parts:
            if isinstance(response := field(part, "functionResponse"), Mapping):
                result = tool_message(response.get("id"), _result(response.get("response")))
                yield {**result, "name": response.get("name")}
        calls = [chat_call(*_call(part)) for part in parts if field(part, "functionCall") is not None]
        visible = [_chat_part(part) for part in parts if not part.get("thought") and _is_content(part)]
        text = content_of(visible)
        if calls:
            yield {"role": role, "content": text or None, "tool_calls": calls}
        elif visible or not parts:
            yield {"role": role, "content": text}


def _is_content(part: Mapping[str, Any]) -> bool:
    return all(field(part, name) is None for name in ("functionCall", "functionResponse", *_CODE))


def _call(part: Mapping[str, Any]) -> tuple[Any, Any, str]:
    call = field(part, "functionCall")
    call = call if isinstance(call, Mapping) else {}
    return call.get("id"), call.get("name"), arguments_text(call.get("args"))


def _result(response: Any) -> str:
    """Text of a function's result. The API requires an object; clients wrap plain values as `result` or `output`."""
    if isinstance(response, Mapping) and len(response) == 1 and (name := next(iter(response))) in ("result", "output"):
        response = response[name]
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    for name, data in (("inlineData", "data"), ("fileData", "fileUri")):
        if isinstance(data_part := field(part, name), Mapping):
            kind = str(field(data_part, "mimeType") or "")
            address = str(field(data_part, data) or "")
            url = f"data:{kind};base64,{address}" if name == "inlineData" else address
            if kind.startswith("image/"):
                return {"type": "image_url", "image_url": {"url": url}}
            return {"type": "file", "file": {"file_data" if name == "inlineData" else "file_id": url}}
    return dict(part)


def tools_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Function definitions in OpenAI's chat format. Google's built-in tools, such as search, are not included."""
    for tool in listed(body.get("tools")):
        for declaration in listed(field(tool, "functionDeclarations")):
            schema = field(declaration, "parametersJsonSchema") or plain_types(declaration.get("parameters"))
            if declaration.get("name"):
                yield chat_tool(declaration, schema)


def plain_types(schema: Any) -> Any:
    """A schema with the type names of JSON Schema."""
    if isinstance(schema, list):
        return [plain_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value.lower() if key == "type" and value in _TYPES else plain_types(value) for key, value in schema.items()
    }


def choices_of(body: Mapping[str, Any]) -> int:
    """Number of requested answers."""
    return count_of(field(field(body, "generationConfig"), "candidateCount")) or 1


def tool_choice(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Functions that must be called, as `{"mode": "required", "allowed": NAMES}`; None if the model may choose."""
    calling = field(field(body, "toolConfig"), "functionCallingConfig")
    if str(field(calling, "mode")).upper() != "ANY":
        return None
    return {"mode": "required", "allowed": field(calling, "allowedFunctionNames")}


def output_schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """JSON schema to which the answer is constrained; None without one."""
    config = field(body, "generationConfig")
    schema = field(config, "responseJsonSchema") or plain_types(field(config, "responseSchema"))
    return schema if isinstance(schema, dict) else None


def answer_of(body: Mapping[str, Any]) -> Answer:
    """Read the first candidate. A blocked prompt or answer is a refusal."""
    answer = Answer()
    candidate = next(each(body.get("candidates")), {})
    content = candidate.get("content")
    for part in listed(content.get("parts")) if isinstance(content, Mapping) else ():
        _read_part(answer, part)
    prompt, reason = field(body, "promptFeedback"), field(candidate, "finishReason")
    blocked = reason in _BLOCKED
    why = field(candidate, "finishMessage") or reason
    if not blocked:
        why = field(prompt, "blockReasonMessage") or field(prompt, "blockReason")
    if why and not (answer.text or answer.tools or answer.media):
        answer.refusal = str(why)
    ends = {"STOP": "tool_calls" if answer.tools else "stop", "MAX_TOKENS": "length"}
    answer.finish = "content_filter" if blocked or (not candidate and why) else ends.get(str(reason), reason)
    _read_counts(answer, body, candidate)
    return answer


def _read_part(answer: Answer, part: Mapping[str, Any]) -> None:
    text = part.get("text")
    if field(part, "functionCall") is not None:
        answer.call(*_call(part))
    elif isinstance(text, str) and part.get("thought"):
        answer.reasoning += text
    elif isinstance(text, str):
        answer.text += text
    elif isinstance(data := field(part, "inlineData"), Mapping):
        answer.media.append(f"{_kind(data)}: {hashed(str(data.get('data')))}")
    elif isinstance(data := field(part, "fileData"), Mapping):
        answer.media.append(f"{_kind(data)}: {field(data, 'fileUri')}")


def continue_call(call: dict[str, Any], part_of_call: Mapping[str, Any]) -> None:
    """Add the next part of a function call with streamed arguments (an option of Vertex AI).

    Args:
        call: The call so far; it has `willContinue` until its last part was added.
        part_of_call: The next part.
    """
    names = ("partialArgs", "partial_args", "willContinue", "will_continue")
    call.update({key: value for key, value in part_of_call.items() if key not in names})
    for part in listed(field(part_of_call, "partialArgs")):
        steps = [
            int(number) if number else name or quoted
            for quoted, number, name in _STEP.findall(str(field(part, "jsonPath")).removeprefix("$"))
        ]
        values = (field(part, name) for name in ("stringValue", "numberValue", "boolValue"))
        value = next((value for value in values if value is not None), None)
        if steps:
            _set_at(call.setdefault("args", {}), steps, value)
    call.pop("willContinue", None)
    if field(part_of_call, "willContinue"):
        call["willContinue"] = True


def _set_at(node: Any, steps: list[Any], value: Any) -> None:
    """Set a value at a path, creating missing objects and lists. Text is appended to existing text."""
    for at, step in enumerate(steps):
        last = at == len(steps) - 1
        if isinstance(node, list) and isinstance(step, int) and step < _LONGEST:
            node += [None] * (step + 1 - len(node))
            before = node[step]
        elif isinstance(node, dict) and isinstance(step, str):
            before = node.get(step)
        else:
            return  # the path contradicts earlier parts
        if last:
            node[step] = before + value if isinstance(before, str) and isinstance(value, str) else value
        elif not isinstance(before, list | dict):
            node[step] = before = [] if isinstance(steps[at + 1], int) else {}
        node = before


def _kind(part: Mapping[str, Any]) -> str:
    return str(field(part, "mimeType") or "file").partition("/")[0]


def _read_counts(answer: Answer, body: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    """Set token counts and logprobs. The API counts thoughts separately from the answer, and tool input from the
    prompt.
    """
    usage = field(body, "usageMetadata")
    names = ("promptTokenCount", "toolUsePromptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
    prompt, read, answered, thought = (count_of(field(usage, name)) for name in names)
    written = None if answered is None and thought is None else (answered or 0) + (thought or 0)
    answer.count(None if prompt is None else prompt + (read or 0), written, thought)
    tokens = list(each(field(field(candidate, "logprobsResult"), "chosenCandidates")))
    logprobs = [field(token, "logProbability") for token in tokens]
    if tokens and all(isinstance(logprob, int | float) for logprob in logprobs):
        answer.logprobs = tuple(map(float, logprobs))
        ids = [count_of(field(token, "tokenId")) for token in tokens]
        if answered == len(tokens) and None not in ids:
            answer.token_ids = tuple(token for token in ids if token is not None)


def error_in(body: Mapping[str, Any]) -> str | None:
    """Why a reply has no answer; None if it has one or the reason why the prompt was blocked."""
    blocked = field(field(body, "promptFeedback"), "blockReason")
    return None if blocked or next(each(body.get("candidates")), None) is not None else "no candidate"
