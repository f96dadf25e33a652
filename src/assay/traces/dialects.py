"""One LM call in the dialects of the field and in DSPy's own form, read as OpenAI chat messages.

A request that came over HTTP is kept exactly, as `{"dialect": D, "body": …}` with D one of `chat` (OpenAI chat completions), `completions` (of
text, OpenAI), `responses` (OpenAI Responses), `messages` (Anthropic) and `gemini` (Google; `model` and `stream`, which its path says, stand beside
the body); one without a dialect is DSPy's canonical request. Does not talk to models.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.traces import gemini
from assay.traces.answers import MAPPING, Answer, Message, chat_call, content_of, count_of, each, hashed, part_texts
from assay.traces.linking import linked_calls

__all__ = [
    "DIALECTS", "Answer", "Message", "answer_of", "answer_to", "chat_messages", "chat_tools", "each", "error_in", "is_context_error",
    "part_texts", "told_error", "tool_results",
]  # fmt: skip

DIALECTS = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages", "gemini": gemini.PATH,
}  # fmt: skip
_TOO_LONG = frozenset({
    "context_length_exceeded", "exceed_context_size_error", "ContextWindowExceededError", "input_tokens",  # the last as vLLM's `param`
    "40303",  # FastChat
})  # fmt: skip


def chat_messages(request: Mapping[str, Any]) -> list[Message]:
    """The conversation that was sent, as OpenAI chat messages; what cannot be read as a conversation gives none."""
    body = request.get("body", request)
    if not isinstance(body, Mapping):
        return []
    readers = {
        "chat": _from_chat, "completions": _from_completions, "responses": _from_responses, "messages": _from_anthropic, "gemini": gemini.messages_of,
    }  # fmt: skip
    reader = readers.get(str(request.get("dialect")), _from_canonical)
    return list(reader(body))


def chat_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that were offered, in OpenAI's chat form."""
    tools = []
    body = request.get("body", request)
    if request.get("dialect") == "gemini":
        return list(gemini.tools_of(body)) if isinstance(body, Mapping) else []
    for tool in body.get("tools") or () if isinstance(body, Mapping) else ():
        told = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if told and told.get("name"):
            schema = told.get("parameters") or told.get("input_schema") or {"type": "object", "properties": {}}
            function = {"name": told["name"], "description": told.get("description") or "", "parameters": schema}
            tools.append({"type": "function", "function": function})
    return tools


def tool_results(messages: Sequence[Message]) -> dict[str, str]:
    """Results of tools by the id of their call, as later messages brought them back."""
    return {str(m.get("tool_call_id")): part_texts(m.get("content")) for m in messages if m.get("role") == "tool" and m.get("tool_call_id")}


def _from_chat(body: Mapping[str, Any]) -> Iterator[Message]:
    for message in each(body.get("messages")):
        role, content, called = message.get("role"), message.get("content"), message.get("tool_calls")
        kept: Message = {"role": "system" if role == "developer" else "user" if role is None else str(role)}
        for key in ("tool_call_id", "name"):
            if (value := message.get(key)) is not None:
                kept[key] = value
        kept["content"] = content_of(content) or str(message.get("refusal") or "")
        functions = [(c, c["function"]) for c in each(called) if isinstance(c.get("function"), MAPPING)] if called else ()
        if calls := [chat_call(str(c.get("id") or ""), str(f.get("name") or ""), str(f.get("arguments") or "")) for c, f in functions]:
            kept["tool_calls"] = calls
            kept["content"] = kept["content"] or None
        yield kept


def _from_completions(body: Mapping[str, Any]) -> Iterator[Message]:
    """Each prompt as a user's message; tokens as JSON."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    for one in prompt if several and prompt else [prompt] if prompt else ():
        yield {"role": "user", "content": one if isinstance(one, str) else json.dumps(one)}


def _from_responses(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("instructions"):
        yield {"role": "system", "content": part_texts(body["instructions"])}
    given = body.get("input")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
    said: Message | None = None  # one answer comes back as an item for its text and one for each call
    for item in each(given):
        kind = item.get("type", "message")
        role = "assistant" if kind == "function_call" else str(item.get("role", "user"))
        if kind == "function_call" or (kind == "message" and role == "assistant"):
            said = said or {"role": "assistant", "content": ""}
            if kind == "function_call":
                call = chat_call(str(item.get("call_id") or ""), str(item.get("name") or ""), str(item.get("arguments") or ""))
                said.setdefault("tool_calls", []).append(call)
            else:
                said["content"] += part_texts(item.get("content"))
            continue
        if said is not None and kind in ("function_call_output", "message"):
            yield _said(said)
            said = None
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": part_texts(item.get("output"))}
        elif kind == "message":
            yield {"role": "system" if role == "developer" else role, "content": content_of(item.get("content"))}
    if said is not None:
        yield _said(said)


def _said(message: Message) -> Message:
    return {**message, "content": message["content"] or None} if message.get("tool_calls") else message


def _from_anthropic(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        yield {"role": "system", "content": part_texts(body["system"])}
    for message in each(body.get("messages")):
        content, role = message.get("content"), str(message.get("role", "user"))
        parts = list(each(content))
        for part in parts:
            if part.get("type") == "tool_result":
                yield {"role": "tool", "tool_call_id": str(part.get("tool_use_id") or ""), "content": part_texts(part.get("content"))}
        calls = [
            chat_call(str(part.get("id") or ""), str(part.get("name") or ""), json.dumps(part.get("input") or {}, ensure_ascii=False))
            for part in parts
            if part.get("type") == "tool_use"
        ]
        said = content_of(content if isinstance(content, str) else [p for p in parts if p.get("type") not in ("tool_use", "tool_result", "thinking")])
        if calls:
            yield {"role": role, "content": said or None, "tool_calls": calls}
        elif said or not parts:
            yield {"role": role, "content": said}


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
                yield {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": part_texts(list(content) if content else "")}
        elif all(part.get("type") == "text" and "text" in part for part in parts):  # as most are
            yield {"role": role, "content": part_texts(parts)}
        else:
            answer = _canonical_answer({"message": message})
            said = content_of([_as_text(part) for part in parts if part.get("type") not in ("tool_call", "thinking")])
            yield {**answer.message, "role": role, "content": said or None if answer.tools else said}


def answer_of(dialect: str | None, body: Mapping[str, Any]) -> Answer:
    """What a response says, in the dialect of its request (None: DSPy's canonical form)."""
    readers = {
        "chat": _chat_answer, "completions": _chat_answer, "responses": _responses_answer, "messages": _anthropic_answer, "gemini": gemini.answer_of,
    }  # fmt: skip
    reader = readers.get(str(dialect), _canonical_answer)
    return reader(body)


def answer_to(request: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
    """What a response says, its tool calls under the ids that the next request knows them by: Gemini gives them none."""
    answer = answer_of(request.get("dialect"), body)
    if request.get("dialect") == "gemini" and not all(call_id for call_id, _, _ in answer.tools):
        answer.tools = linked_calls(chat_messages(request), answer.tools, gemini.CALL_IDS)
    return answer


def error_in(dialect: str, body: Mapping[str, Any]) -> Any:
    """What a reply with status 200 says instead of an answer: its `error`, or why there is nothing to read; None where it is an answer."""
    if error := told_error(body):
        return error
    if dialect == "responses":
        return "the response failed" if body.get("status") == "failed" else None if isinstance(body.get("output"), list) else "no output"
    if dialect == "messages":
        return None if isinstance(body.get("content"), list) else "no content"
    if dialect == "gemini":
        return gemini.error_in(body)
    choice = next(iter(body.get("choices") or ()), None)
    answers = isinstance(choice, Mapping) and (isinstance(choice.get("message"), Mapping) or isinstance(choice.get("text"), str))
    return None if answers else "no choice with a message"


def told_error(body: Mapping[str, Any]) -> Any:
    """The error that a body or an event of a stream tells: nested (OpenAI's chat, Anthropic), in the response (OpenAI's Responses), in a choice
    (OpenRouter), or flat (OpenAI's Responses, vLLM, SGLang, FastAPI)."""
    response, choice = body.get("response"), next(each(body.get("choices")), {})
    nested = body.get("error") or (response.get("error") if isinstance(response, Mapping) else None) or choice.get("error")
    if nested:
        return nested
    if choice.get("finish_reason") == "error":
        return "it ended with an error"
    flat = body.get("type") == "error" or body.get("object") == "error" or body.keys() == {"detail"}
    return {key: body[key] for key in ("code", "type", "param", "message", "detail") if body.get(key) is not None} if flat else None


def is_context_error(error: Any) -> bool:
    """Whether an error object says by its code or type, as OpenAI, vLLM and llama.cpp name it, that the request was too long."""
    return isinstance(error, Mapping) and not _TOO_LONG.isdisjoint(str(error.get(key)) for key in ("code", "type", "param"))


def _chat_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    choice = next(each(body.get("choices")), {})
    found.finish = choice.get("finish_reason")
    _chat_message(found, choice.get("message") or {"content": choice.get("text")})
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))
    found.thinking_tokens = count_of((usage.get("completion_tokens_details") or {}).get("reasoning_tokens"))
    told = choice.get("logprobs") or {}
    plain = told.get("token_logprobs")
    if isinstance(plain, list) and plain and all(isinstance(logprob, int | float) for logprob in plain):  # of a completion
        found.logprobs = tuple(map(float, plain))
    made = count_of((body.get("timings") or {}).get("predicted_n")) if found.completion_tokens is None else found.completion_tokens
    _read_tokens(found, told, made)
    return found


def _read_tokens(found: Answer, logprobs: Any, made: int | None) -> None:
    """Token ids and logprobs of an answer, where they are all there.

    Args:
        logprobs: chat's of a choice, or those that stand beside an embedded model's answer in another dialect.
        made: tokens of the answer.
    """
    tokens = list(each(logprobs.get("content"))) if isinstance(logprobs, Mapping) else []
    if tokens and all(token.get("logprob") is not None for token in tokens):
        found.logprobs = tuple(float(token["logprob"]) for token in tokens)
    if tokens and made == len(tokens) and all("id" in token for token in tokens):  # of a letter of several llama.cpp tells the last one alone
        found.token_ids = tuple(int(token["id"]) for token in tokens)


def _chat_message(found: Answer, message: Mapping[str, Any]) -> None:
    content, audio = message.get("content"), message.get("audio") or {}
    found.refusal = str(message.get("refusal") or "") or _refusals(content)
    found.text = part_texts(content) or ("" if found.refusal else str(audio.get("transcript") or ""))
    found.reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
    for part in (*each(content), *each(message.get("images"))):
        found.see_image(part.get("image_url"))
    if audio.get("id"):
        found.media.append(f"audio: {audio['id']}")
    legacy = [{"function": message["function_call"]}] if isinstance(message.get("function_call"), Mapping) else []
    for call in (*each(message.get("tool_calls")), *legacy):
        function = call.get("function") or {}
        found.tools.append((str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or "")))


def _refusals(content: Any) -> str:
    return "".join(str(part.get("refusal") or "") for part in each(content))


def _responses_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for item in each(body.get("output")):
        kind = item.get("type")
        if kind == "message":
            found.text += part_texts(item.get("content"))
            found.refusal += _refusals(item.get("content"))
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else item.get("input")
            found.tools.append((str(item.get("call_id") or ""), str(item.get("name") or ""), str(arguments or "")))
        elif kind == "reasoning":
            found.reasoning += part_texts(item.get("content") or item.get("summary"))
        elif kind == "image_generation_call" and isinstance(item.get("result"), str):
            found.media.append(f"image: {hashed(item['result'])}")
    reason = (body.get("incomplete_details") or {}).get("reason")
    found.finish = "length" if reason == "max_output_tokens" else reason or ("tool_calls" if found.tools else "stop")
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens"))
    found.thinking_tokens = count_of((usage.get("output_tokens_details") or {}).get("reasoning_tokens"))
    _read_tokens(found, body.get("logprobs"), found.completion_tokens)
    return found


def _anthropic_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for part in each(body.get("content")):
        if part.get("type") == "text":
            found.text += str(part.get("text") or "")
        elif part.get("type") == "thinking":
            found.reasoning += str(part.get("thinking") or "")
        elif part.get("type") == "tool_use":
            found.tools.append((str(part.get("id") or ""), str(part.get("name") or ""), json.dumps(part.get("input") or {}, ensure_ascii=False)))
    reason = body.get("stop_reason")
    if reason == "refusal" and not found.text:
        found.refusal = str((body.get("stop_details") or {}).get("explanation") or "")
    found.finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}.get(str(reason), reason)
    usage = body.get("usage") or {}
    counts = [count_of(usage.get(name)) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
    found.prompt_tokens = sum(count or 0 for count in counts) if counts[0] is not None else None
    found.completion_tokens = count_of(usage.get("output_tokens"))
    _read_tokens(found, body.get("logprobs"), found.completion_tokens)
    return found


def _as_text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Structured data of a canonical message as text; other parts as they are."""
    return {"type": "text", "text": json.dumps(part.get("value"), ensure_ascii=False)} if part.get("type") == "data" else part


def _canonical_answer(body: Mapping[str, Any]) -> Answer:
    found = _parts_answer(body)
    reply = body.get("provider_data")
    if isinstance(reply, Mapping):  # the provider's own message: parts hold parsed values
        said = _reply_answer(reply)
        if _same_json(said.text, found.text):
            found.text = said.text
        if [name for _, name, _ in said.tools] == [name for _, name, _ in found.tools]:
            found.tools = [(own[0], own[1], exact[2] or own[2]) for own, exact in zip(found.tools, said.tools, strict=True)]
        found.media = found.media or said.media
    found.finish = {"tool_call": "tool_calls"}.get(str(body.get("finish_reason")), body.get("finish_reason"))
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens"))
    found.thinking_tokens = count_of(usage.get("reasoning_tokens"))
    return found


def _reply_answer(reply: Mapping[str, Any]) -> Answer:
    if "candidates" in reply:
        return gemini.answer_of(reply)
    return (_chat_answer if "choices" in reply else _responses_answer if "output" in reply else _anthropic_answer)(reply)


def _same_json(text: str, other: str) -> bool:
    try:
        return text == other or bool(json.loads(text) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def _parts_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for part in each((body.get("message") or {}).get("parts")):
        kind = part.get("type")
        if kind in ("text", "data"):
            found.text += str(_as_text(part).get("text") or "")
        elif kind == "refusal":
            found.refusal += str(part.get("text") or "")
        elif kind == "thinking":
            found.reasoning += str(part.get("text") or "")
        elif kind == "tool_call":
            arguments = part.get("input")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            found.tools.append((str(part.get("id") or ""), str(part.get("name") or ""), text))
        elif kind in ("image", "audio", "video", "document", "binary"):
            address = next((part[name] for name in ("url", "file_id", "path") if part.get(name)), None)
            found.media.append(f"{kind}: {address or hashed(str(part.get('data')))}")
    return found
