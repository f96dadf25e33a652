"""A streamed answer's events as the body that would have come unstreamed, in the three dialects. Does not talk to models."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from assay.traces.dialects import Message, each, part_texts

__all__ = ["read_events"]


def read_events(dialect: str, events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    """A streamed answer's events as the body that would have come unstreamed, and whether the stream came to its end.

    None where no event carried any of an answer.
    """
    return {"chat": _chat_events, "responses": _responses_events, "messages": _anthropic_events}[dialect](events)


def _chat_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] = {}
    text, calls, tokens, finish = [], dict[int, dict[str, Any]](), [], None
    for event in events:
        body.update({key: event[key] for key in ("id", "model", "created", "usage", "system_fingerprint", "timings") if event.get(key) is not None})
        choice = next((c for c in each(event.get("choices")) if c.get("index", 0) == 0), None)
        if choice is None:
            continue
        delta = choice.get("delta") or {}
        text.append(delta.get("content") or choice.get("text") or "")
        tokens += list(each((choice.get("logprobs") or {}).get("content")))
        finish = choice.get("finish_reason") or finish
        for part in each(delta.get("tool_calls")):
            call = calls.setdefault(part.get("index", len(calls)), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
    if not body:
        return None, False
    message: Message = {"role": "assistant", "content": "".join(text) or None if calls else "".join(text)}
    if calls:
        message["tool_calls"] = [calls[at] for at in sorted(calls)]
    choice_: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
    if tokens:
        choice_["logprobs"] = {"content": tokens}
    return {"object": "chat.completion", **body, "choices": [choice_]}, finish is not None


def _responses_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] | None = None
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event.get("type"), event.get("output_index", 0)
        if kind in ("response.completed", "response.incomplete", "response.failed") and isinstance(event.get("response"), Mapping):
            return dict(event["response"]), kind != "response.failed"
        if kind in ("response.created", "response.in_progress"):
            body = dict(event.get("response") or {})
        elif kind == "response.output_item.added":
            items[at] = json.loads(json.dumps(event.get("item") or {}))
        elif kind == "response.output_text.delta":
            item = items.setdefault(at, {"type": "message", "role": "assistant", "content": []})
            item["content"] = [{"type": "output_text", "text": part_texts(item.get("content")) + str(event.get("delta") or "")}]
        elif kind == "response.function_call_arguments.delta":
            item = items.setdefault(at, {"type": "function_call"})
            item["arguments"] = str(item.get("arguments") or "") + str(event.get("delta") or "")
    return (None if body is None else {**body, "output": [items[at] for at in sorted(items)]}), False


def _anthropic_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    ended = False
    for event in events:
        kind, at = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            body = dict(event.get("message") or {})
        elif kind == "content_block_start":
            blocks[at] = dict(event.get("content_block") or {})
        elif kind == "content_block_delta":
            delta, block = event.get("delta") or {}, blocks.setdefault(at, {"type": "text", "text": ""})
            if delta.get("type") == "text_delta":
                block["text"] = str(block.get("text") or "") + str(delta.get("text") or "")
            elif delta.get("type") == "thinking_delta":
                block["thinking"] = str(block.get("thinking") or "") + str(delta.get("thinking") or "")
            elif delta.get("type") == "input_json_delta":
                inputs[at] = inputs.get(at, "") + str(delta.get("partial_json") or "")
        elif kind == "message_delta" and body is not None:
            body.update({key: value for key, value in (event.get("delta") or {}).items() if value is not None})
            body["usage"] = {**(body.get("usage") or {}), **(event.get("usage") or {})}
        elif kind == "message_stop":
            ended = True
    if body is None:
        return None, False
    for at, text in inputs.items():
        try:
            blocks[at]["input"] = json.loads(text or "{}")
        except (ValueError, RecursionError):
            blocks[at]["input"] = {"arguments": text}  # not JSON: kept as it came
    return {**body, "content": [blocks[at] for at in sorted(blocks)]}, ended
