"""Reads LM requests of all supported APIs, and of DSPy, as OpenAI chat messages. `answers` reads the responses.

An HTTP request is stored unchanged as `{"dialect": D, "body": …}`. D is `chat` (OpenAI chat completions), `completions`
(OpenAI text completions), `responses` (OpenAI Responses), `messages` (Anthropic) or `gemini` (Google; `model` and
`stream` from the path are stored next to the body). A request without a dialect is DSPy's canonical request. Does not
call models.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from assay.traces.messages import gemini
from assay.traces.messages.parts import (
    MAPPING,
    Answer,
    Message,
    arguments_text,
    chat_call,
    chat_tool,
    content_of,
    count_of,
    each,
    hashed,
    linked_calls,
    part_texts,
    tool_message,
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
    return _ANSWERS.get(str(dialect), canonical_answer)(body)


def _chat_answer(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    choice = next(each(body.get("choices")), {})
    answer.finish = choice.get("finish_reason")
    _chat_message(answer, choice.get("message") or {"content": choice.get("text")})
    usage, logprobs = body.get("usage") or {}, choice.get("logprobs") or {}
    thinking = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    answer.count(usage.get("prompt_tokens"), usage.get("completion_tokens"), thinking)
    plain = logprobs.get("token_logprobs")
    # text completions have a plain list
    if isinstance(plain, list) and plain and all(isinstance(logprob, int | float) for logprob in plain):
        answer.logprobs = tuple(map(float, plain))
    count = answer.completion_tokens
    _read_tokens(answer, logprobs, count_of((body.get("timings") or {}).get("predicted_n")) if count is None else count)
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
        answer.call(call.get("id"), function.get("name"), function.get("arguments"))


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
            arguments = item.get("arguments" if kind == "function_call" else "input")
            answer.call(item.get("call_id"), item.get("name"), arguments)
        elif kind == "reasoning":
            answer.reasoning += part_texts(item.get("content") or item.get("summary"))
        elif kind == "image_generation_call" and isinstance(item.get("result"), str):
            answer.media.append(f"image: {hashed(item['result'])}")
    reason = (body.get("incomplete_details") or {}).get("reason")
    answer.finish = "length" if reason == "max_output_tokens" else reason or ("tool_calls" if answer.tools else "stop")
    usage = body.get("usage") or {}
    thinking = (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
    answer.count(usage.get("input_tokens"), usage.get("output_tokens"), thinking)
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
            answer.call(part.get("id"), part.get("name"), arguments_text(part.get("input")))
    reason, usage = body.get("stop_reason"), body.get("usage") or {}
    if reason == "refusal" and not answer.text:
        answer.refusal = str((body.get("stop_details") or {}).get("explanation") or "")
    answer.finish = _ANTHROPIC_ENDS.get(str(reason), reason)
    prompt = count_of(usage.get("input_tokens"))
    cached = [count_of(usage.get(f"cache_{name}_input_tokens")) or 0 for name in ("read", "creation")]
    answer.count(None if prompt is None else prompt + sum(cached), usage.get("output_tokens"))
    _read_tokens(answer, body.get("logprobs"), answer.completion_tokens)
    return answer


def as_text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Structured data of a canonical message as text; other parts unchanged."""
    is_data = part.get("type") == "data"
    return {"type": "text", "text": json.dumps(part.get("value"), ensure_ascii=False)} if is_data else part


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
    answer.count(*(usage.get(f"{name}_tokens") for name in ("input", "output", "reasoning")))
    return answer


def _reply_answer(reply: Mapping[str, Any]) -> Answer:
    marks = {"candidates": "gemini", "choices": "chat", "output": "responses"}
    return answer_of(next((dialect for mark, dialect in marks.items() if mark in reply), "messages"), reply)


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
            text = arguments if isinstance(arguments, str) else arguments_text(arguments)
            answer.call(part.get("id"), part.get("name"), text)
        elif kind in ("image", "audio", "video", "document", "binary"):
            address = next((part[name] for name in ("url", "file_id", "path") if part.get(name)), None)
            answer.media.append(f"{kind}: {address or hashed(str(part.get('data')))}")
    return answer


_ANTHROPIC_ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_ANSWERS = {
    "chat": _chat_answer,
    "completions": _chat_answer,
    "responses": _responses_answer,
    "messages": _anthropic_answer,
    "gemini": gemini.answer_of,
}

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
    body, reader = request.get("body", request), _MESSAGES.get(str(request.get("dialect")), _from_canonical)
    return list(reader(body)) if isinstance(body, Mapping) else []


def chat_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool definitions of a request in OpenAI's chat format."""
    body = request.get("body", request)
    if not isinstance(body, Mapping):
        return []
    if request.get("dialect") == "gemini":
        return list(gemini.tools_of(body))
    functions = [tool.get("function", tool) for tool in each(body.get("tools"))]
    return [
        chat_tool(function, function.get("parameters") or function.get("input_schema"))
        for function in functions
        if isinstance(function, Mapping) and function.get("name")
    ]


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
        result |= {key: value for key in ("tool_call_id", "name") if (value := message.get(key)) is not None}
        result["content"] = content_of(content) or str(message.get("refusal") or "")
        functions = [(c, c["function"]) for c in each(called) if isinstance(c.get("function"), MAPPING)]
        if functions:
            result["tool_calls"] = [chat_call(c.get("id"), f.get("name"), f.get("arguments")) for c, f in functions]
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
                call = chat_call(item.get("call_id"), item.get("name"), item.get("arguments"))
                answer.setdefault("tool_calls", []).append(call)
            else:
                answer["content"] += part_texts(item.get("content"))
            continue
        if answer is not None and kind in ("function_call_output", "message"):
            yield _without_empty_content(answer)
            answer = None
        if kind == "function_call_output":
            yield tool_message(item.get("call_id"), part_texts(item.get("output")))
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
                yield tool_message(part.get("tool_use_id"), part_texts(part.get("content")))
        called = [part for part in parts if part.get("type") == "tool_use"]
        calls = [chat_call(p.get("id"), p.get("name"), arguments_text(p.get("input"))) for p in called]
        visible = [part for part in parts if part.get("type") not in ("tool_use", "tool_result", "thinking")]
        text = content_of(content if isinstance(content, str) else visible)
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
                yield tool_message(part.get("id"), part_texts(list(part.get("content") or ())))
        elif all(part.get("type") == "text" and "text" in part for part in parts):  # the common case
            yield {"role": role, "content": part_texts(parts)}
        else:
            answer = canonical_answer({"message": message})
            text = content_of([as_text(part) for part in parts if part.get("type") not in ("tool_call", "thinking")])
            yield {**answer.message, "role": role, "content": text or None if answer.tools else text}


_MESSAGES: dict[str, Callable[[Mapping[str, Any]], Iterable[Message]]] = {
    "chat": _from_chat,
    "completions": _from_completions,
    "responses": _from_responses,
    "messages": _from_anthropic,
    "gemini": gemini.messages_of,
}


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
    if dialect == "responses" and body.get("status") in ("failed", "cancelled"):
        return f"the response was {body['status']}"
    if dialect == "responses":
        return None if isinstance(body.get("output"), list) else "no output"
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
    choice = next(each(body.get("choices")), {})
    for part in (body, body.get("response"), choice):
        if isinstance(part, Mapping) and (nested := part.get("error")):
            return nested
    if choice.get("finish_reason") == "error":
        return "it ended with an error"
    if body.get("type") == "error" or body.get("object") == "error" or body.keys() == {"detail"}:
        names = ("code", "type", "param", "message", "detail")
        return {name: body[name] for name in names if body.get(name) is not None}
    return None


def is_context_error(error: Any) -> bool:
    """Whether the code, type or parameter of an error means that the request exceeds the context length.

    Recognises OpenAI, litellm, vLLM, llama.cpp and FastChat.
    """
    return isinstance(error, Mapping) and not _TOO_LONG.isdisjoint(
        str(error.get(key)) for key in ("code", "type", "param")
    )
