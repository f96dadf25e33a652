"""Reads LM requests of all supported APIs, and of DSPy, as OpenAI chat messages. `answers` reads the responses.

An HTTP request is stored unchanged as `{"dialect": D, "body": …}`. D is `chat` (OpenAI chat completions), `completions`
(OpenAI text completions), `responses` (OpenAI Responses), `messages` (Anthropic) or `gemini` (Google; `model` and
`stream` from the path are stored next to the body). A request without a dialect is DSPy's canonical request. Does not
call models.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.traces.messages import gemini
from assay.traces.messages.parts import (
    MAPPING,
    Answer,
    Message,
    chat_call,
    content_of,
    count_of,
    each,
    hashed,
    linked_calls,
    part_texts,
)

__all__ = [
    "DIALECTS",
    "Answer",
    "Message",
    "answer_of",
    "answer_to",
    "chat_messages",
    "chat_tools",
    "dialect_at",
    "each",
    "error_in",
    "error_of",
    "is_context_error",
    "part_texts",
    "tool_results",
]

# -- Reads LM responses of all supported APIs, and of DSPy, as an `Answer`. Does not call models.


def answer_of(dialect: str | None, body: Mapping[str, Any]) -> Answer:
    """Read the body of a response.

    Args:
        dialect: Dialect of the request; None for DSPy's canonical form.
    """
    readers = {
        "chat": _chat_answer,
        "completions": _chat_answer,
        "responses": _responses_answer,
        "messages": _anthropic_answer,
        "gemini": gemini.answer_of,
    }
    reader = readers.get(str(dialect), canonical_answer)
    return reader(body)


def _chat_answer(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    choice = next(each(body.get("choices")), {})
    answer.finish = choice.get("finish_reason")
    _chat_message(answer, choice.get("message") or {"content": choice.get("text")})
    usage = body.get("usage") or {}
    answer.prompt_tokens, answer.completion_tokens = (
        count_of(usage.get("prompt_tokens")),
        count_of(usage.get("completion_tokens")),
    )
    answer.thinking_tokens = count_of((usage.get("completion_tokens_details") or {}).get("reasoning_tokens"))
    logprobs = choice.get("logprobs") or {}
    plain = logprobs.get("token_logprobs")
    # text completions have a plain list
    if isinstance(plain, list) and plain and all(isinstance(logprob, int | float) for logprob in plain):
        answer.logprobs = tuple(map(float, plain))
    count = (
        count_of((body.get("timings") or {}).get("predicted_n"))
        if answer.completion_tokens is None
        else answer.completion_tokens
    )
    _read_tokens(answer, logprobs, count)
    return answer


def _read_tokens(answer: Answer, logprobs: Any, count: int | None) -> None:
    """Set token ids and logprobs of an answer if they are complete.

    Args:
        logprobs: Logprobs of a chat choice, or those that the embedded model adds to other dialects.
        count: Number of tokens of the answer; None if it is unknown.
    """
    tokens = list(each(logprobs.get("content"))) if isinstance(logprobs, Mapping) else []
    if tokens and all(token.get("logprob") is not None for token in tokens):
        answer.logprobs = tuple(float(token["logprob"]) for token in tokens)
    # the counts differ if a letter spans several tokens: llama.cpp then returns only the last of them
    if tokens and count == len(tokens) and all("id" in token for token in tokens):
        answer.token_ids = tuple(int(token["id"]) for token in tokens)


def _chat_message(answer: Answer, message: Mapping[str, Any]) -> None:
    content, audio = message.get("content"), message.get("audio") or {}
    answer.refusal = str(message.get("refusal") or "") or _refusals(content)
    answer.text = part_texts(content) or ("" if answer.refusal else str(audio.get("transcript") or ""))
    answer.reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
    for part in (*each(content), *each(message.get("images"))):
        answer.see_image(part.get("image_url"))
    if audio.get("id"):
        answer.media.append(f"audio: {audio['id']}")
    legacy = [{"function": message["function_call"]}] if isinstance(message.get("function_call"), Mapping) else []
    for call in (*each(message.get("tool_calls")), *legacy):
        function = definition if isinstance(definition := call.get("function"), Mapping) else {}
        answer.tools.append(
            (str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or ""))
        )


def _refusals(content: Any) -> str:
    return "".join(str(part.get("refusal") or "") for part in each(content))


def _responses_answer(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    for item in each(body.get("output")):
        kind = item.get("type")
        if kind == "message":
            answer.text += part_texts(item.get("content"))
            answer.refusal += _refusals(item.get("content"))
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else item.get("input")
            answer.tools.append((str(item.get("call_id") or ""), str(item.get("name") or ""), str(arguments or "")))
        elif kind == "reasoning":
            answer.reasoning += part_texts(item.get("content") or item.get("summary"))
        elif kind == "image_generation_call" and isinstance(item.get("result"), str):
            answer.media.append(f"image: {hashed(item['result'])}")
    reason = (body.get("incomplete_details") or {}).get("reason")
    answer.finish = "length" if reason == "max_output_tokens" else reason or ("tool_calls" if answer.tools else "stop")
    usage = body.get("usage") or {}
    answer.prompt_tokens, answer.completion_tokens = (
        count_of(usage.get("input_tokens")),
        count_of(usage.get("output_tokens")),
    )
    answer.thinking_tokens = count_of((usage.get("output_tokens_details") or {}).get("reasoning_tokens"))
    _read_tokens(answer, body.get("logprobs"), answer.completion_tokens)
    return answer


def _anthropic_answer(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    for part in each(body.get("content")):
        if part.get("type") == "text":
            answer.text += str(part.get("text") or "")
        elif part.get("type") == "thinking":
            answer.reasoning += str(part.get("thinking") or "")
        elif part.get("type") == "tool_use":
            answer.tools.append(
                (
                    str(part.get("id") or ""),
                    str(part.get("name") or ""),
                    json.dumps(part.get("input") or {}, ensure_ascii=False),
                )
            )
    reason = body.get("stop_reason")
    if reason == "refusal" and not answer.text:
        answer.refusal = str((body.get("stop_details") or {}).get("explanation") or "")
    answer.finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}.get(
        str(reason), reason
    )
    usage = body.get("usage") or {}
    counts = [
        count_of(usage.get(name)) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ]
    answer.prompt_tokens = sum(count or 0 for count in counts) if counts[0] is not None else None
    answer.completion_tokens = count_of(usage.get("output_tokens"))
    _read_tokens(answer, body.get("logprobs"), answer.completion_tokens)
    return answer


def as_text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Structured data of a canonical message as text; other parts unchanged."""
    return (
        {"type": "text", "text": json.dumps(part.get("value"), ensure_ascii=False)}
        if part.get("type") == "data"
        else part
    )


def canonical_answer(body: Mapping[str, Any]) -> Answer:
    answer = _parts_answer(body)
    reply = body.get("provider_data")
    if isinstance(reply, Mapping):  # the provider's reply has the exact text; parts have parsed values
        exact_answer = _reply_answer(reply)
        if _same_json(exact_answer.text, answer.text):
            answer.text = exact_answer.text
        if [name for _, name, _ in exact_answer.tools] == [name for _, name, _ in answer.tools]:
            answer.tools = [
                (parsed[0], parsed[1], exact[2] or parsed[2])
                for parsed, exact in zip(answer.tools, exact_answer.tools, strict=True)
            ]
        answer.media = answer.media or exact_answer.media
    answer.finish = {"tool_call": "tool_calls"}.get(str(body.get("finish_reason")), body.get("finish_reason"))
    usage = body.get("usage") or {}
    answer.prompt_tokens, answer.completion_tokens = (
        count_of(usage.get("input_tokens")),
        count_of(usage.get("output_tokens")),
    )
    answer.thinking_tokens = count_of(usage.get("reasoning_tokens"))
    return answer


def _reply_answer(reply: Mapping[str, Any]) -> Answer:
    if "candidates" in reply:
        return gemini.answer_of(reply)
    return (_chat_answer if "choices" in reply else _responses_answer if "output" in reply else _anthropic_answer)(
        reply
    )


def _same_json(text: str, other: str) -> bool:
    try:
        return text == other or bool(json.loads(text) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def _parts_answer(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    for part in each((body.get("message") or {}).get("parts")):
        kind = part.get("type")
        if kind in ("text", "data"):
            answer.text += str(as_text(part).get("text") or "")
        elif kind == "refusal":
            answer.refusal += str(part.get("text") or "")
        elif kind == "thinking":
            answer.reasoning += str(part.get("text") or "")
        elif kind == "tool_call":
            arguments = part.get("input")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            answer.tools.append((str(part.get("id") or ""), str(part.get("name") or ""), text))
        elif kind in ("image", "audio", "video", "document", "binary"):
            address = next((part[name] for name in ("url", "file_id", "path") if part.get(name)), None)
            answer.media.append(f"{kind}: {address or hashed(str(part.get('data')))}")
    return answer


# -- Dialects.


DIALECTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": gemini.PATH,
}
_FIELDS = {  # the field with the prompt
    "chat": "messages",
    "completions": "prompt",
    "responses": "input",
    "messages": "messages",
}
_TOO_LONG = frozenset(
    {
        "context_length_exceeded",
        "exceed_context_size_error",
        "ContextWindowExceededError",
        "input_tokens",  # vLLM, in `param`
        "40303",  # FastChat
    }
)


def dialect_at(path: str, body: Any) -> str | None:
    """The dialect of a request at any path that ends as one of the dialects' own, such as Azure's; None for another.

    Args:
        body: The request as JSON. Other requests at such a path, such as a message of a thread, have no prompt.
    """
    ends = (name for name in _FIELDS if path.rstrip("/").endswith(DIALECTS[name].removeprefix("/v1")))
    dialect = next(ends, None)
    return dialect if dialect is not None and isinstance(body, Mapping) and _FIELDS[dialect] in body else None


def chat_messages(request: Mapping[str, Any]) -> list[Message]:
    """The request as OpenAI chat messages; empty if it cannot be read as a conversation."""
    body = request.get("body", request)
    if not isinstance(body, Mapping):
        return []
    readers = {
        "chat": _from_chat,
        "completions": _from_completions,
        "responses": _from_responses,
        "messages": _from_anthropic,
        "gemini": gemini.messages_of,
    }
    reader = readers.get(str(request.get("dialect")), _from_canonical)
    return list(reader(body))


def chat_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool definitions of a request in OpenAI's chat format."""
    tools = []
    body = request.get("body", request)
    if request.get("dialect") == "gemini":
        return list(gemini.tools_of(body)) if isinstance(body, Mapping) else []
    for tool in each(body.get("tools")) if isinstance(body, Mapping) else ():
        definition = tool.get("function", tool)
        if isinstance(definition, Mapping) and definition.get("name"):
            schema = (
                definition.get("parameters") or definition.get("input_schema") or {"type": "object", "properties": {}}
            )
            function = {
                "name": definition["name"],
                "description": definition.get("description") or "",
                "parameters": schema,
            }
            tools.append({"type": "function", "function": function})
    return tools


def tool_results(messages: Sequence[Message]) -> dict[str, str]:
    """Text of tool results by the id of the tool call."""
    return {
        str(m.get("tool_call_id")): part_texts(m.get("content"))
        for m in messages
        if m.get("role") == "tool" and m.get("tool_call_id")
    }


def _from_chat(body: Mapping[str, Any]) -> Iterator[Message]:
    for message in each(body.get("messages")):
        role, content, called = message.get("role"), message.get("content"), message.get("tool_calls")
        result: Message = {"role": "system" if role == "developer" else "user" if role is None else str(role)}
        for key in ("tool_call_id", "name"):
            if (value := message.get(key)) is not None:
                result[key] = value
        result["content"] = content_of(content) or str(message.get("refusal") or "")
        functions = (
            [(c, c["function"]) for c in each(called) if isinstance(c.get("function"), MAPPING)] if called else ()
        )
        if calls := [
            chat_call(str(c.get("id") or ""), str(f.get("name") or ""), str(f.get("arguments") or ""))
            for c, f in functions
        ]:
            result["tool_calls"] = calls
            result["content"] = result["content"] or None
        yield result


def _from_completions(body: Mapping[str, Any]) -> Iterator[Message]:
    """Prompts as user messages; token lists as JSON text."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    for item in prompt if several and prompt else [prompt] if prompt else ():
        yield {"role": "user", "content": item if isinstance(item, str) else json.dumps(item)}


def _from_responses(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("instructions"):
        yield {"role": "system", "content": part_texts(body["instructions"])}
    items = body.get("input")
    if isinstance(items, str):
        yield {"role": "user", "content": items}
    answer: Message | None = None  # an answer is split into one item for its text and one for each tool call
    for item in each(items):
        kind = item.get("type", "message" if item.keys() - {"id"} else None)  # an id alone refers to an item
        role = "assistant" if kind == "function_call" else str(item.get("role", "user"))
        if kind == "function_call" or (kind == "message" and role == "assistant"):
            answer = answer or {"role": "assistant", "content": ""}
            if kind == "function_call":
                call = chat_call(
                    str(item.get("call_id") or ""), str(item.get("name") or ""), str(item.get("arguments") or "")
                )
                answer.setdefault("tool_calls", []).append(call)
            else:
                answer["content"] += part_texts(item.get("content"))
            continue
        if answer is not None and kind in ("function_call_output", "message"):
            yield _without_empty_content(answer)
            answer = None
        if kind == "function_call_output":
            yield {
                "role": "tool",
                "tool_call_id": str(item.get("call_id") or ""),
                "content": part_texts(item.get("output")),
            }
        elif kind == "message":
            yield {"role": "system" if role == "developer" else role, "content": content_of(item.get("content"))}
    if answer is not None:
        yield _without_empty_content(answer)


def _without_empty_content(message: Message) -> Message:
    return {**message, "content": message["content"] or None} if message.get("tool_calls") else message


def _from_anthropic(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        yield {"role": "system", "content": part_texts(body["system"])}
    for message in each(body.get("messages")):
        content, role = message.get("content"), str(message.get("role", "user"))
        parts = list(each(content))
        for part in parts:
            if part.get("type") == "tool_result":
                yield {
                    "role": "tool",
                    "tool_call_id": str(part.get("tool_use_id") or ""),
                    "content": part_texts(part.get("content")),
                }
        calls = [
            chat_call(
                str(part.get("id") or ""),
                str(part.get("name") or ""),
                json.dumps(part.get("input") or {}, ensure_ascii=False),
            )
            for part in parts
            if part.get("type") == "tool_use"
        ]
        text = content_of(
            content
            if isinstance(content, str)
            else [p for p in parts if p.get("type") not in ("tool_use", "tool_result", "thinking")]
        )
        if calls:
            yield {"role": role, "content": text or None, "tool_calls": calls}
        elif text or not parts:
            yield {"role": role, "content": text}


def _from_canonical(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        system = body["system"]
        yield {"role": "system", "content": system if isinstance(system, str) else part_texts(list(system))}
    for message in each(body.get("messages")):
        parts, role = list(each(message.get("parts"))), str(message.get("role", "user"))
        if "parts" not in message:
            yield {"role": role, "content": content_of(message.get("content") or message.get("text"))}
        elif role == "tool":
            for part in parts:
                content = part.get("content")
                yield {
                    "role": "tool",
                    "tool_call_id": str(part.get("id") or ""),
                    "content": part_texts(list(content) if content else ""),
                }
        elif all(part.get("type") == "text" and "text" in part for part in parts):  # the common case
            yield {"role": role, "content": part_texts(parts)}
        else:
            answer = canonical_answer({"message": message})
            text = content_of([as_text(part) for part in parts if part.get("type") not in ("tool_call", "thinking")])
            yield {**answer.message, "role": role, "content": text or None if answer.tools else text}


def answer_to(request: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
    """Read a response. Gemini's tool calls have no ids; they get those that the next request uses.

    Args:
        request: The request of the response.
        body: Body of the response.
    """
    answer = answer_of(request.get("dialect"), body)
    if request.get("dialect") == "gemini" and not all(call_id for call_id, _, _ in answer.tools):
        answer.tools = linked_calls(chat_messages(request), answer.tools, gemini.CALL_IDS)
    return answer


def error_in(dialect: str, body: Mapping[str, Any]) -> Any:
    """The error in a reply with status 200: its `error`, or why it has no answer; None if it has an answer."""
    if error := error_of(body):
        return error
    if dialect == "responses":
        return (
            f"the response was {body['status']}"
            if body.get("status") in ("failed", "cancelled")
            else None
            if isinstance(body.get("output"), list)
            else "no output"
        )
    if dialect == "messages":
        return None if isinstance(body.get("content"), list) else "no content"
    if dialect == "gemini":
        return gemini.error_in(body)
    choice = next(iter(body.get("choices") or ()), None)
    answers = isinstance(choice, Mapping) and (
        isinstance(choice.get("message"), Mapping) or isinstance(choice.get("text"), str)
    )
    return None if answers else "no choice with a message"


def error_of(body: Mapping[str, Any]) -> Any:
    """The error in a body or stream event, or None.

    It is nested (OpenAI chat, Anthropic), in the response (OpenAI Responses), in a choice (OpenRouter), or flat (OpenAI
    Responses, vLLM, SGLang, FastAPI).
    """
    response, choice = body.get("response"), next(each(body.get("choices")), {})
    nested = (
        body.get("error") or (response.get("error") if isinstance(response, Mapping) else None) or choice.get("error")
    )
    if nested:
        return nested
    if choice.get("finish_reason") == "error":
        return "it ended with an error"
    flat = body.get("type") == "error" or body.get("object") == "error" or body.keys() == {"detail"}
    return (
        {key: body[key] for key in ("code", "type", "param", "message", "detail") if body.get(key) is not None}
        if flat
        else None
    )


def is_context_error(error: Any) -> bool:
    """Whether the code, type or parameter of an error means that the request exceeds the context length.

    Recognises OpenAI, litellm, vLLM, llama.cpp and FastChat.
    """
    return isinstance(error, Mapping) and not _TOO_LONG.isdisjoint(
        str(error.get(key)) for key in ("code", "type", "param")
    )
