"""Google's Gemini API (`models/MODEL:generateContent`) as OpenAI chat messages. Does not talk to models.

Model and streaming are in the path, not in the body. Field names come in camel case or, as the API takes both, in snake case.
Source: ai.google.dev/api/generate-content.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from assay.traces.answers import Answer, Message, chat_call, content_of, count_of, each, hashed, part_texts
from assay.traces.linking import linked

__all__ = [
    "CALL_IDS", "PATH", "ROUTE", "answer_of", "asked_schema", "choices_of", "continue_call", "error_in", "field", "is_google", "listed",
    "messages_of", "model_in", "plain_types", "streams", "tool_choice", "tools_of", "with_model",
]  # fmt: skip

PATH = "/v1beta/models/MODEL:generateContent"
# Gemini's, of tuned models, and Vertex AI's (`/v1/projects/…/models/MODEL:generateContent`), as a route of aiohttp.
ROUTE = "/{version:v1[a-z0-9]*}/{resource:(?:[^:]+/)?(?:models|tunedModels|endpoints)/[^/:]+}:{verb:generateContent|streamGenerateContent}"
CALL_IDS = "gemini_"  # before the number of a tool call that came without an id
_GOOGLE = re.compile(r"^(?:/r/[^/]+)?/(?:upload/)?v1(?:alpha|beta)\d*/|/(?:models|tunedModels|endpoints)/[^/:]+:\w+$")
_MODEL = re.compile(r"(?<=/)(?:models|tunedModels|endpoints)/([^/:]+)(?=:\w+$)")
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})  # as Gemini writes them
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?([^.\[\]]+)")  # of a JSON path
_LONGEST = 10_000  # places of a list in arguments that are streamed
_UPPER = re.compile(r"[A-Z]")
_CODE = ("executableCode", "codeExecutionResult")  # what Google ran itself while it answered
_BLOCKED = frozenset({
    "SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION",
    "MODEL_ARMOR",
})  # fmt: skip


# -- addresses


def is_google(path: str) -> bool:
    """Whether a path is one of Google's APIs, which take a key in a header of their own, or as `key` in the address. It may name a rollout."""
    return _GOOGLE.search(path) is not None


def model_in(path: str) -> str:
    """The model that a path names."""
    found = _MODEL.search(path)
    return unquote(found[1]) if found else ""


def with_model(path: str, model: str) -> str:
    """The path with another model in it."""
    return _MODEL.sub(lambda _: f"models/{quote(model.removeprefix('models/'), safe='')}", path)


def streams(path: str) -> bool:
    """Whether a path asks for a stream."""
    return path.endswith(":streamGenerateContent")


# -- requests


def field(value: Any, name: str) -> Any:
    """A field by its name in camel case, also where it is written in snake case; None where it is not there."""
    if not isinstance(value, Mapping):
        return None
    found = value.get(name)
    return value.get(_UPPER.sub(lambda letter: f"_{letter[0].lower()}", name)) if found is None else found


def listed(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects of a list; the API takes a single one in place of a list too."""
    return each([value] if isinstance(value, Mapping) else value)


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The conversation that was sent; calls and results without an id are linked in order."""
    found = linked(list(_messages(body)), CALL_IDS)
    return [{key: value for key, value in message.items() if key != "name"} for message in found]


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    if (system := field(body, "systemInstruction")) is not None:
        yield {"role": "system", "content": part_texts(list(listed(system.get("parts"))) if isinstance(system, Mapping) else system)}
    for content in listed(body.get("contents")):
        role, parts = "assistant" if content.get("role") == "model" else "user", list(listed(content.get("parts")))
        for part in parts:
            if isinstance(told := field(part, "functionResponse"), Mapping):
                yield {"role": "tool", "tool_call_id": str(told.get("id") or ""), "name": told.get("name"), "content": _result(told.get("response"))}
        calls = [chat_call(*_call(part)) for part in parts if field(part, "functionCall") is not None]
        shown = [_chat_part(part) for part in parts if not part.get("thought") and _is_content(part)]
        said = content_of(shown)
        if calls:
            yield {"role": role, "content": said or None, "tool_calls": calls}
        elif shown or not parts:
            yield {"role": role, "content": said}


def _is_content(part: Mapping[str, Any]) -> bool:
    return all(field(part, name) is None for name in ("functionCall", "functionResponse", *_CODE))


def _call(part: Mapping[str, Any]) -> tuple[str, str, str]:
    told = field(part, "functionCall")
    told = told if isinstance(told, Mapping) else {}
    return str(told.get("id") or ""), str(told.get("name") or ""), json.dumps(told.get("args") or {}, ensure_ascii=False)


def _result(response: Any) -> str:
    """What a function gave back: the API asks for an object, in which clients put a plain value under one name."""
    if isinstance(response, Mapping) and len(response) == 1 and (name := next(iter(response))) in ("result", "output"):
        response = response[name]
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    for name, data in (("inlineData", "data"), ("fileData", "fileUri")):
        if isinstance(told := field(part, name), Mapping):
            kind = str(field(told, "mimeType") or "")
            address = str(field(told, data) or "")
            url = f"data:{kind};base64,{address}" if name == "inlineData" else address
            if kind.startswith("image/"):
                return {"type": "image_url", "image_url": {"url": url}}
            return {"type": "file", "file": {"file_data" if name == "inlineData" else "file_id": url}}
    return dict(part)


def tools_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The functions that were offered, in OpenAI's chat form; not Google's own tools, such as its search."""
    for tool in listed(body.get("tools")):
        for one in listed(field(tool, "functionDeclarations")):
            schema = field(one, "parametersJsonSchema") or plain_types(one.get("parameters")) or {"type": "object", "properties": {}}
            function = {"name": one.get("name"), "description": one.get("description") or "", "parameters": schema}
            if function["name"]:
                yield {"type": "function", "function": function}


def plain_types(schema: Any) -> Any:
    """A schema with JSON Schema's names of types."""
    if isinstance(schema, list):
        return [plain_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: value.lower() if key == "type" and value in _TYPES else plain_types(value) for key, value in schema.items()}


def choices_of(body: Mapping[str, Any]) -> int:
    """How many answers are asked for."""
    return count_of(field(field(body, "generationConfig"), "candidateCount")) or 1


def tool_choice(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Functions that must be called, as `{"mode": "required", "allowed": NAMES}`; None where the model may choose."""
    calling = field(field(body, "toolConfig"), "functionCallingConfig")
    if str(field(calling, "mode")).upper() != "ANY":
        return None
    return {"mode": "required", "allowed": field(calling, "allowedFunctionNames")}


def asked_schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that the answer is constrained to; None without one."""
    config = field(body, "generationConfig")
    schema = field(config, "responseJsonSchema") or plain_types(field(config, "responseSchema"))
    return schema if isinstance(schema, dict) else None


# -- answers


def answer_of(body: Mapping[str, Any]) -> Answer:
    """What the first candidate says. What was blocked, in the prompt or in the answer, is a refusal."""
    found = Answer()
    candidate = next(each(body.get("candidates")), {})
    content = candidate.get("content")
    for part in listed(content.get("parts")) if isinstance(content, Mapping) else ():
        _read_part(found, part)
    prompt, reason = field(body, "promptFeedback"), field(candidate, "finishReason")
    blocked = reason in _BLOCKED
    why = (field(candidate, "finishMessage") or reason) if blocked else field(prompt, "blockReasonMessage") or field(prompt, "blockReason")
    if why and not (found.text or found.tools or found.media):
        found.refusal = str(why)
    if blocked or (not candidate and why):
        found.finish = "content_filter"
    else:
        found.finish = {"STOP": "tool_calls" if found.tools else "stop", "MAX_TOKENS": "length"}.get(str(reason), reason)
    _read_counts(found, body, candidate)
    return found


def _read_part(found: Answer, part: Mapping[str, Any]) -> None:
    text = part.get("text")
    if field(part, "functionCall") is not None:
        found.tools.append(_call(part))
    elif isinstance(text, str) and part.get("thought"):
        found.reasoning += text
    elif isinstance(text, str):
        found.text += text
    elif isinstance(told := field(part, "inlineData"), Mapping):
        found.media.append(f"{_kind(told)}: {hashed(str(told.get('data')))}")
    elif isinstance(told := field(part, "fileData"), Mapping):
        found.media.append(f"{_kind(told)}: {field(told, 'fileUri')}")


def continue_call(whole: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Adds the next part of a function call whose arguments are streamed, as Vertex AI does where it is asked to.

    `willContinue` stands in the call until its last part has come.
    """
    names = ("partialArgs", "partial_args", "willContinue", "will_continue")
    whole.update({key: value for key, value in told.items() if key not in names})
    for part in listed(field(told, "partialArgs")):
        steps = [int(number) if number else name or quoted for quoted, number, name in _STEP.findall(str(field(part, "jsonPath")).removeprefix("$"))]
        value = next((field(part, name) for name in ("stringValue", "numberValue", "boolValue") if field(part, name) is not None), None)
        if steps:
            _put_at(whole.setdefault("args", {}), steps, value)
    whole.pop("willContinue", None)
    if field(told, "willContinue"):
        whole["willContinue"] = True


def _put_at(node: Any, steps: list[Any], value: Any) -> None:
    """Puts a value into objects and lists, which are made where they are missing; a text goes on with the text that is there."""
    for at, step in enumerate(steps):
        last = at == len(steps) - 1
        if isinstance(node, list) and isinstance(step, int) and step < _LONGEST:
            node += [None] * (step + 1 - len(node))
            before = node[step]
        elif isinstance(node, dict) and isinstance(step, str):
            before = node.get(step)
        else:
            return  # a path that does not fit what came before
        if last:
            node[step] = before + value if isinstance(before, str) and isinstance(value, str) else value
        elif not isinstance(before, list | dict):
            node[step] = before = [] if isinstance(steps[at + 1], int) else {}
        node = before


def _kind(told: Mapping[str, Any]) -> str:
    return str(field(told, "mimeType") or "file").partition("/")[0]


def _read_counts(found: Answer, body: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    """Tokens and logprobs. The API counts thoughts apart from the answer, and what its own tools read apart from the prompt."""
    usage = field(body, "usageMetadata")
    names = ("promptTokenCount", "toolUsePromptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
    prompt, read, said, thought = (count_of(field(usage, name)) for name in names)
    found.prompt_tokens = None if prompt is None else prompt + (read or 0)
    found.completion_tokens = None if said is None and thought is None else (said or 0) + (thought or 0)
    found.thinking_tokens = thought
    tokens = list(each(field(field(candidate, "logprobsResult"), "chosenCandidates")))
    logprobs = [field(token, "logProbability") for token in tokens]
    if tokens and all(isinstance(logprob, int | float) for logprob in logprobs):
        found.logprobs = tuple(map(float, logprobs))
        ids = [count_of(field(token, "tokenId")) for token in tokens]
        if said == len(tokens) and None not in ids:
            found.token_ids = tuple(token for token in ids if token is not None)


def error_in(body: Mapping[str, Any]) -> str | None:
    """Why a reply has nothing to read; None where it is an answer, or says why the prompt was blocked."""
    answers = next(each(body.get("candidates")), None) is not None or field(field(body, "promptFeedback"), "blockReason")
    return None if answers else "no candidate"
