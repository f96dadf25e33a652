"""Reads LM responses of all supported APIs, and of DSPy, as an `Answer`. Does not call models."""

import json
from collections.abc import Mapping
from typing import Any

from assay.traces.messages import gemini
from assay.traces.messages.parts import Answer, count_of, each, hashed, part_texts


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
