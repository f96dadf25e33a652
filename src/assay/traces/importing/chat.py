"""What tracers wrote of messages, tools and answers, as OpenAI chat: the form in which imported calls are kept.

Reads the parts of the OpenTelemetry GenAI conventions, OpenAI (chat, completions, responses), Anthropic, Bedrock, Gemini, LangChain
and OpenInference. What has no chat form stays as it came; a text that is no message of any of them is a text. Reads no files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.ending import argument_value, ends_run
from assay.traces.importing.pydantic_ai import is_native, native_conversation, native_settings, native_tools
from assay.traces.importing.tools import tools_of
from assay.traces.importing.values import as_text, parsed
from assay.traces.linking import linked

__all__ = ["answers_of", "as_arguments", "as_inputs", "as_prediction", "body_of", "text_of"]

Message = dict[str, Any]
_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "model": "assistant", "function": "tool"}
_FINISH = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
}
_CALLS = ("tool_call", "tool_use", "toolUse", "functionCall", "function_call")
_RESULTS = ("tool_call_response", "tool_result", "toolResult", "function_call_output", "functionResponse", "function_response")
_WRAPPED = ("message_content", "toolUse", "functionCall", "function_call", "toolResult", "functionResponse", "function_response")
_SETTINGS = (
    "model", "temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "seed", "stop", "n", "frequency_penalty",
    "presence_penalty", "tool_choice", "response_format", "parallel_tool_calls", "reasoning_effort", "logprobs", "top_logprobs",
)  # fmt: skip


# -- messages


def text_of(content: Any) -> str:
    """The text of a message's content."""
    parts = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in parts if isinstance(part, str | dict))


def _call(told: Mapping[str, Any]) -> dict[str, Any]:
    inner = told.get("tool_call")
    told = inner if isinstance(inner, dict) else told
    function = told["function"] if isinstance(told.get("function"), dict) else told
    arguments: Any = next((function[key] for key in ("arguments", "args", "input") if function.get(key) is not None), {})
    found = next((told[key] for key in ("id", "call_id", "toolUseId") if told.get(key)), "")
    text = arguments if isinstance(arguments, str) else as_text(arguments)
    return {"id": str(found), "type": "function", "function": {"name": as_text(function.get("name")), "arguments": text}}


def _file(part: Mapping[str, Any]) -> Any:
    """An image by its address or in base64 as OpenAI's `image_url`; other files as they came."""
    if part.get("modality") == "image" and part.get("uri"):
        return {"type": "image_url", "image_url": {"url": part["uri"]}}
    if part.get("modality") == "image" and part.get("type") == "blob":
        return {"type": "image_url", "image_url": {"url": f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content')}"}}
    return dict(part)


class _Parts:
    """What the parts of one message hold."""

    def __init__(self) -> None:
        self.content: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[Message] = []
        self.reasoning: list[str] = []

    @property
    def said(self) -> Any:
        """A single text as it is, more than that as a list of parts; None beside tool calls where nothing was said."""
        if not self.content:
            return None if self.calls else ""
        one = self.content[0] if len(self.content) == 1 else {}
        return (one["text"] or (None if self.calls else "")) if one.get("type") == "text" else self.content

    def take(self, part: Any) -> None:
        if not isinstance(part, dict):
            self.content += [] if part is None else [{"type": "text", "text": as_text(part)}]
            return
        kind = part.get("type")
        if kind is None and (wrap := next((key for key in _WRAPPED if isinstance(part.get(key), dict)), None)):
            part = part[wrap]
            kind = part.get("type") if wrap == "message_content" else wrap
        if kind in ("text", "input_text", "output_text", None) and ("text" in part or "content" in part):
            self.content.append({"type": "text", "text": as_text(part["text"] if "text" in part else part["content"])})
        elif kind in _CALLS:
            self.calls.append(_call(part))
        elif kind in _RESULTS:
            found = next((part[key] for key in ("response", "result", "content", "output") if part.get(key) is not None), None)
            called = next((part[key] for key in ("id", "tool_use_id", "toolUseId", "call_id") if part.get(key)), "")
            self.results.append({"role": "tool", "tool_call_id": str(called), "content": _said(found)})
        elif kind == "refusal":
            self.content.append({"type": "text", "text": as_text(next((part[key] for key in ("refusal", "content", "text") if part.get(key)), ""))})
        elif kind in ("reasoning", "thinking"):
            self.reasoning.append(as_text(next((part[key] for key in ("content", "thinking", "text") if part.get(key) is not None), "")))
        else:
            self.content.append(_file(part))


def _said(value: Any) -> str:
    """What a tool gave back: its texts where it is a list of them."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return text_of(value)
    return as_text(value)


def _messages(told: Any, default: str) -> Iterator[Message]:
    """One message of any tracer, as one or, where it carries results of tools, several chat messages."""
    if not isinstance(told, dict):
        yield {"role": default, "content": as_text(told)}
        return
    if is_native(told):
        yield from native_conversation([told])
        return
    inner = told.get("message", told.get("kwargs") if "lc" in told else None)
    told = inner if isinstance(inner, dict) else told
    role = told.get("role") or (told.get("type") if told.get("type") != "message" else None) or default
    role = _ROLES.get(role, str(role)) if isinstance(role, str) else default
    parts = _Parts()
    content = next((told[key] for key in ("parts", "contents", "content") if told.get(key) is not None), None)
    for part in content if isinstance(content, list) else [content]:
        parts.take(part)
    calls = told.get("tool_calls")
    if isinstance(calls, list):
        known = {call["id"] for call in parts.calls if call["id"]}  # some write calls both as parts and apart
        parts.calls += [call for told_call in calls if isinstance(told_call, dict) and (call := _call(told_call))["id"] not in known]
    yield from parts.results
    if parts.results and not parts.content and not parts.calls:
        return
    found: Message = {"role": role, "content": parts.said}
    if role == "tool":
        found["tool_call_id"] = str(told.get("tool_call_id") or told.get("id") or "")
    elif isinstance(told.get("name"), str):
        found["name"] = told["name"]
    if parts.calls:
        found["tool_calls"] = parts.calls
    if isinstance(told.get("refusal"), str) and told["refusal"]:
        found["refusal"] = told["refusal"]
    if reasoning := told.get("reasoning_content") or "\n".join(parts.reasoning):
        found["reasoning_content"] = reasoning
    yield found


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("message"), dict) or "lc" in value or is_native(value):
        return True
    return "role" in value or ("type" in value and ("content" in value or "call_id" in value))


def _conversation(value: Any) -> list[Message] | None:
    """A list of messages, or None where this is none."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # LangChain's batch of one
    if isinstance(value, dict) and _is_message(value):
        value = [value]
    if not isinstance(value, list) or not value or not all(_is_message(item) for item in value):
        return None
    if all(map(is_native, value)):
        return native_conversation(value)
    value = [item for item in value if not _defines(item)]
    items = [{"role": "tool" if "output" in m else "assistant", "parts": [m]} if "call_id" in m else m for m in value]
    return linked([message for item in items for message in _messages(item, "user")])


def _defines(message: Any) -> bool:
    """Whether this is a tool's definition, as Langfuse writes those that LangChain offered: in a message of role `tool`."""
    if not isinstance(message, dict) or message.get("role") != "tool" or message.get("tool_call_id"):
        return False
    content = parsed(message.get("content"))
    return isinstance(content, dict) and content.get("type") == "function" and isinstance(content.get("function"), dict)


def body_of(value: Any) -> dict[str, Any]:
    """The body of a request: `messages`, and `tools` and settings where they stand beside them."""
    told = parsed(value)
    if told is None or told == "":
        return {"messages": []}
    if isinstance(told, dict) and told and set(told) <= {"args", "kwargs"}:
        given = told.get("args")
        return body_of(told.get("kwargs") or (given[0] if isinstance(given, list) and len(given) == 1 else given))
    if not isinstance(told, dict) or (_is_message(told) and "messages" not in told):
        tools = tools_of([message["content"] for message in told if _defines(message)]) if isinstance(told, list) else []
        return {
            **({"tools": tools} if tools else {}),
            "messages": _conversation(told) or [{"role": "user", "content": value if isinstance(value, str) else as_text(told)}],
        }
    keys = ("messages", "contents") if isinstance(value, str) else ("messages", "input", "contents", "prompt", "prompts")
    given = next((told[key] for key in keys if told.get(key) is not None), told["input"] if isinstance(told.get("input"), list) else None)
    if given is None:  # an object that somebody asked with
        return {"messages": [{"role": "user", "content": value if isinstance(value, str) else as_text(told)}]}
    given = parsed(given)
    found = _conversation(given)
    if found is None:
        found = [m for item in (given if isinstance(given, list) else [given]) for m in _messages(item, "user")]
    system = next((told[key] for key in ("system", "instructions", "system_instruction", "systemInstruction") if told.get(key)), None)
    if system is not None:
        found = [*_messages({**(system if isinstance(system, dict) else {"content": system}), "role": "system"}, "system"), *found]
    parameters = told.get("model_request_parameters")  # pydantic-ai's
    own = {**(given_settings if isinstance(given_settings := told.get("model_settings"), dict) else {}), **native_settings(parameters), **told}
    settings = {key: own[key] for key in _SETTINGS if own.get(key) is not None}
    listed = [message["content"] for message in given if _defines(message)] if isinstance(given, list) else []
    config = told.get("toolConfig")  # Bedrock's
    tools = tools_of(told.get("tools") or (config.get("tools") if isinstance(config, dict) else None) or listed) or native_tools(parameters)
    return {**settings, "messages": found, **({"tools": tools} if tools else {})}


# -- answers


def answers_of(value: Any, reasons: Any = None) -> list[dict[str, Any]]:
    """The choices of an answer: `index`, `message`, `finish_reason` each. Empty where nothing was said.

    Args:
        reasons: why each choice stopped, where it does not say so itself.
    """
    told = parsed(value)
    known = _is_answer(told, strict=isinstance(value, str))
    found = [] if told is None or told == "" else list(_choices(told)) if known else [({"content": as_text(value)}, None)]
    reasons = reasons if isinstance(reasons, list) else [reasons]
    choices = []
    for index, (message, reason) in enumerate(found):
        said = next((m for m in _messages(message, "assistant") if m["role"] != "tool"), {"role": "assistant", "content": ""})
        reason = reason or (reasons[index] if index < len(reasons) else None)
        choices.append({"index": index, "message": {**said, "role": "assistant"}, "finish_reason": _FINISH.get(str(reason), reason)})
    return choices


_BLOCKS = ("text", "thinking", "tool_use")  # Anthropic's, of one answer
_SURE = ("choices", "candidates", "generations", "role", "parts", "tool_calls")


def _is_answer(told: Any, *, strict: bool) -> bool:
    """Whether this is an answer in some API's form. `strict`: it was a text, which may as well be a model's own JSON."""
    if isinstance(told, list):
        if not strict and told and all(isinstance(item, str) for item in told):
            return True
        return bool(told) and all(isinstance(item, dict) and (_is_block(item) or _is_answer(item, strict=strict)) for item in told)
    if not isinstance(told, dict):
        return False
    if any(key in told for key in _SURE) or (_is_message(told) and not strict):
        return True
    return not strict and bool(told) and ("message" in told or isinstance(told.get("output"), list) or set(told) <= {"content", "text"})


def _is_block(told: Any) -> bool:
    return isinstance(told, dict) and told.get("type") in _BLOCKS and "role" not in told


def _choices(told: Any) -> Iterator[tuple[Any, Any]]:
    """Each choice as its message, in its tracer's own form, and why it stopped."""
    if isinstance(told, list):
        if all(_is_block(item) for item in told):
            yield {"content": told}, None
            return
        for item in told:
            yield from _choices(item)
        return
    if not isinstance(told, dict):
        yield {"content": told}, None
        return
    listed = next((told[key] for key in ("choices", "candidates", "generations") if isinstance(told.get(key), list)), None)
    if listed is not None:
        for item in listed[0] if listed and isinstance(listed[0], list) else listed:
            yield from _choices(item)
        return
    if isinstance(told.get("output"), list):  # OpenAI's responses
        parts = [p for item in told["output"] if isinstance(item, dict) for p in _output_parts(item)]
        yield {"parts": parts}, "tool_calls" if any(p.get("type") == "function_call" for p in parts) else "stop"
        return
    reason = next((told[key] for key in ("finish_reason", "stop_reason", "finishReason", "stopReason") if told.get(key)), None)
    inner = parsed(told["message"]) if "message" in told else told
    inner = inner.get("content") if isinstance(inner, dict) and isinstance(inner.get("content"), dict) else inner
    if isinstance(inner, dict) and "content" not in inner and "parts" not in inner and "text" in inner:
        inner = {**inner, "content": inner["text"]}
    yield (inner if isinstance(inner, dict) else {"content": inner}), reason


def _output_parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if item.get("type") == "function_call":
        return [item]
    content = item.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


# -- what went into a whole run and came out


def as_inputs(value: Any) -> dict[str, Any]:
    """An input as fields: an object is its own; one user message is `input`, a conversation `messages`; a call its arguments."""
    told = parsed(value)
    if told in (None, "", []):
        return {}
    found = _conversation(told)
    if found is not None:
        asked = [message for message in found if message["role"] not in ("system", "developer")]
        one = len(asked) == 1 and asked[0]["role"] == "user"
        return {"input": asked[0]["content"]} if one else {"messages": found}
    if isinstance(told, dict) and "args" in told and set(told) <= {"args", "kwargs"}:
        given, named = told["args"], told.get("kwargs")
        if not given:
            return dict(named) if isinstance(named, dict) else {}
        if not named and isinstance(given, list) and len(given) == 1:
            return as_inputs(given[0]) or {"input": given[0]}
    return {str(key): item for key, item in told.items()} if isinstance(told, dict) else {"input": told}


def as_prediction(value: Any) -> dict[str, Any] | None:
    """An output as fields: an object is its own, anything else is `output`; None where there is none."""
    told = parsed(value)
    if told in (None, "", []):
        return None
    found = _conversation(told)
    if found is not None:
        return _last_answer(found)
    return {str(key): item for key, item in told.items()} if isinstance(told, dict) else {"output": told}


def _last_answer(messages: list[Message]) -> dict[str, Any] | None:
    """What a conversation ended with: its last text, else the arguments of the tool call that ended it (whose result may stand after it);
    None where it ends by asking for other tools."""
    asked = next((message for message in reversed(messages) if message["role"] != "tool"), messages[-1])
    calls = [call["function"] for call in asked.get("tool_calls") or ()]
    if (final := next((call for call in calls if ends_run(call["name"])), None)) is not None:
        return {"output": argument_value(final["arguments"])}
    said = text_of(messages[-1]["content"])
    return {"output": said} if said or not messages[-1].get("tool_calls") else None


def as_arguments(value: Any) -> dict[str, Any]:
    """Arguments of a tool by name; what is no object is kept under `arguments`."""
    told = parsed(value)
    if told is None or told == "":
        return {}
    if isinstance(told, dict) and set(told) == {"args", "kwargs"}:
        named = dict(told["kwargs"]) if isinstance(told["kwargs"], dict) else {}
        return {**({"args": told["args"]} if told["args"] else {}), **named}
    return {str(key): item for key, item in told.items()} if isinstance(told, dict) else {"arguments": told}
