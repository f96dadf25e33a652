"""Assembles a streamed answer's events into the body of the unstreamed answer, in all dialects. Does not call models.

Deltas are merged by one rule for all fields: texts are joined, objects are merged, list items continue the item of
their index. Fields that a provider adds to its answers are therefore kept.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from assay.traces.messages.dialects import each, error_of
from assay.traces.messages.gemini import continue_call, field, listed

Body = dict[str, Any]
# Text fields that arrive whole; other texts arrive in parts.
_UNSPLIT_FIELDS = frozenset((
    "id", "type", "role", "object", "format", "model", "status", "finish_reason", "native_finish_reason", "stop_reason",
    "stop_sequence", "signature", "url", "mime_type", "call_id", "item_id", "finishReason", "finishMessage",
    "thoughtSignature",
))  # fmt: skip
# OpenAI Responses: the list of an item that holds a part.
_PLACES = {"content_index": "content", "summary_index": "summary"}
# OpenAI Responses: the field of an item, or of its part, that `response.NAME.delta` continues.
_FIELDS = {
    "output_text": "text",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "refusal": "refusal",
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "code_interpreter_call_code": "code",
}
_KINDS = {"reasoning_summary_text": "summary_text"}  # the type of a part if it differs from its events' name
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def read_events(dialect: str, events: Sequence[Mapping[str, Any]]) -> tuple[Body | None, bool]:
    """Assembles a stream's events.

    Returns:
        The body of the unstreamed answer, None if no event carried a part of it; and whether the stream was complete.
    """
    body, complete = _READERS.get(dialect, _chat_events)(events)
    return (None if body is None else _joined(body)), complete


# -- merging


class _Parts(list[str]):
    """Parts of a text, joined once at the end: joining at each part would take quadratic time."""


def _merge(target: Body, delta: Mapping[str, Any]) -> None:
    """Merges a delta into the answer so far."""
    for key, value in delta.items():
        existing = target.get(key)
        if value is None:
            target.setdefault(key, None)
        elif isinstance(value, Mapping):
            target[key] = existing if isinstance(existing, dict) else {}
            _merge(target[key], value)
        elif isinstance(value, list):
            target[key] = existing if isinstance(existing, list) and not isinstance(existing, _Parts) else []
            _merge_list(target[key], value)
        elif isinstance(value, str) and key not in _UNSPLIT_FIELDS:
            _add_text(target, key, value)
        elif value != "" or existing is None:
            target[key] = value


def _add_text(target: Body, key: str, text: str) -> None:
    existing = target.get(key)
    if not isinstance(existing, _Parts):
        existing = target[key] = _Parts([existing] if isinstance(existing, str) else [])
    if key != "name" or [text] != existing:  # some servers repeat a function's name with every part of its arguments
        existing.append(text)


def _merge_list(target: list[Any], items: Sequence[Any]) -> None:
    for item in items:
        if not isinstance(item, Mapping):
            target.append(item)
            continue
        existing = _continued(target, item)
        if existing is None:
            target.append(existing := {})
        _merge(existing, item)


def _continued(target: list[Any], item: Mapping[str, Any]) -> Body | None:
    """The list item that `item` continues; None if it begins a new one.

    It continues the last item of its index, unless it has another id or type.
    """
    function = item.get("function")
    if "index" not in item:
        more = isinstance(function, Mapping) and not item.get("id") and not function.get("name")
        return target[-1] if more and target and isinstance(target[-1], dict) else None
    for known in reversed(target):
        if isinstance(known, dict) and known.get("index") == item["index"]:
            other = any(item.get(key) and known.get(key) and item[key] != known[key] for key in ("type", "id"))
            return None if other else known
    return None


def _given(value: Any, *without: str) -> Body:
    """The fields of an object that are not null."""
    return {key: item for key, item in (value or {}).items() if item is not None and key not in without}


def _joined(value: Any) -> Any:
    if isinstance(value, _Parts):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return [_joined(item) for item in value] if isinstance(value, list) else value


# -- OpenAI chat completions and completions


def _chat_events(events: Sequence[Mapping[str, Any]]) -> tuple[Body | None, bool]:
    body: Body = {}
    choices: dict[int, Body] = {}
    for event in events:
        event_choices = event.get("choices")
        if not isinstance(event_choices, list) and error_of(event):
            continue
        body.update(_given(event, "choices", "obfuscation"))
        for choice in each(event_choices):
            at = choice.get("index")
            merged = choices.setdefault(at if isinstance(at, int) else 0, {})
            _merge(merged, {key: value for key, value in choice.items() if key not in ("delta", "index")})
            _merge(merged.setdefault("message", {}), choice.get("delta") or {})
    if not body and not choices:
        return None, False
    texts = bool(choices) and all("text" in choice and not choice["message"] for choice in choices.values())
    body["object"] = "text_completion" if body.get("object") == "text_completion" else "chat.completion"
    body["choices"] = [_choice(at, choices[at], text=texts) for at in sorted(choices)] or [
        _choice(0, {"message": {}}, text=False)
    ]
    return body, bool(choices) and all(choice.get("finish_reason") for choice in choices.values())


def _choice(at: int, choice: Body, *, text: bool) -> Body:
    result: Body = {"index": at, **choice, "finish_reason": choice.get("finish_reason") or None}
    if text:
        del result["message"]
        return result
    message = {
        key: value for key, value in choice["message"].items() if value is not None or key in ("content", "refusal")
    }
    if "text" in result:  # a chat answered in the format of completions
        message.setdefault("content", result.pop("text"))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        calls.sort(key=lambda call: call["index"] if isinstance(call.get("index"), int) else sys.maxsize)
        message["tool_calls"] = [
            {"type": "function", **{key: value for key, value in call.items() if key != "index"}} for call in calls
        ]
    other = any(message.get(name) for name in ("tool_calls", "function_call", "refusal", "audio"))
    content = _joined(message.get("content"))
    result["message"] = {"role": "assistant", **message, "content": content or (None if other else content or "")}
    return result


# -- OpenAI Responses


def _responses_events(events: Sequence[Mapping[str, Any]]) -> tuple[Body | None, bool]:
    body: Body | None = None
    items: dict[int, Body] = {}
    for event in events:
        kind, response = str(event.get("type")), event.get("response")
        if kind in _ENDS and isinstance(response, Mapping):
            ended = dict(response)
            if items and not ended.get("output"):  # some servers omit the output in the last event
                ended["output"] = _in_order(items)
            return ended, kind != "response.failed"
        if kind in ("response.created", "response.in_progress"):
            body = dict(response or {})
        else:
            _item_event(items, kind, event)
    return (None if body is None else {**body, "output": _in_order(items)}), False


def _in_order(items: Mapping[int, Body]) -> list[Body]:
    return [items[at] for at in sorted(items)]


def ended_response(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The response in the last event of a stream that may have begun in the middle; None if it is not complete."""
    ended = [event.get("response") for event in events if event.get("type") in _ENDS]
    response = ended[-1] if ended else None
    return response if isinstance(response, Mapping) and isinstance(response.get("output"), list) else None


def _item_event(items: dict[int, Body], kind: str, event: Mapping[str, Any]) -> None:
    at = event.get("output_index", 0)
    subject, _, verb = kind.removeprefix("response.").rpartition(".")
    if subject == "output_item":
        items[at] = _copied(event.get("item"))
        return
    if subject not in _FIELDS and not subject.endswith("_part"):
        return
    item = items.setdefault(
        at, {"type": "message", "role": "assistant"} if "content_index" in event else {"type": "function_call"}
    )
    place = next((name for name in _PLACES if name in event), None)
    part = item if place is None else _part_at(item, _PLACES[place], event[place], _KINDS.get(subject, subject))
    if subject.endswith("_part"):
        part.clear()
        part.update(_copied(event.get("part")))
    elif verb == "delta":
        _add_text(part, _FIELDS[subject], str(event.get("delta") or ""))
    elif isinstance(text := event.get(_FIELDS[subject]), str):
        part[_FIELDS[subject]] = text


def _part_at(item: Body, name: str, at: Any, kind: str) -> Body:
    """The part of an item at an index of a list; missing parts before it are created."""
    parts = item[name] = item[name] if isinstance(item.get(name), list) else []
    while isinstance(at, int) and len(parts) <= min(at, 1000):
        parts.append({"type": kind})
    part: Body = parts[at] if isinstance(at, int) and 0 <= at < len(parts) else {}
    return part


def _copied(value: Any) -> Body:
    copy: Body = json.loads(json.dumps(value)) if isinstance(value, Mapping) else {}
    return copy


# -- Anthropic messages


def _anthropic_events(events: Sequence[Mapping[str, Any]]) -> tuple[Body | None, bool]:
    body: Body | None = None
    blocks: dict[int, Body] = {}
    inputs: dict[int, list[str]] = {}
    ended = False
    for event in events:
        kind, at = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            body = dict(event.get("message") or {})
        elif kind == "content_block_start":
            blocks[at] = _copied(event.get("content_block"))
        elif kind == "content_block_delta":
            _block_delta(blocks.setdefault(at, {"type": "text"}), event.get("delta") or {}, inputs.setdefault(at, []))
        elif kind == "message_delta" and body is not None:
            usage = {**(body.get("usage") or {}), **_given(event.get("usage"))}
            body |= _given(event, "type", "delta", "usage") | _given(event.get("delta")) | {"usage": usage}
        elif kind == "message_stop":
            ended = True
    if body is None:
        return None, False
    for at, parts in inputs.items():
        if parts:
            blocks[at]["input"] = _tool_input("".join(parts))
    return {**body, "content": _in_order(blocks)}, ended


def _block_delta(block: Body, delta: Mapping[str, Any], inputs: list[str]) -> None:
    changes = {key: value for key, value in delta.items() if key not in ("type", "partial_json", "citation")}
    if delta.get("type") == "input_json_delta":
        inputs.append(str(delta.get("partial_json") or ""))
    if delta.get("citation") is not None:
        block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
    _merge(block, changes)


def _tool_input(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}  # not JSON: kept as text


# -- Gemini


def _gemini_events(events: Sequence[Mapping[str, Any]]) -> tuple[Body | None, bool]:
    """Each event has the format of an answer, with the new parts of each candidate."""
    body: Body = {}
    candidates: dict[int, Body] = {}
    for event in events:
        if "candidates" not in event and error_of(event):
            continue
        # Counts are cumulative: the later ones replace the earlier ones.
        usage = {**(body.get("usageMetadata") or {}), **(event.get("usageMetadata") or {})}
        body.update(_given(event, "candidates"))
        body.update({"usageMetadata": usage} if usage else {})
        for candidate in each(event.get("candidates")):
            at = candidate.get("index")
            merged = candidates.setdefault(at if isinstance(at, int) else 0, {})
            ratings = field(candidate, "safetyRatings")  # arrive whole with every event
            merged.update({"safetyRatings": ratings} if ratings is not None else {})
            apart = ("content", "index", "safetyRatings", "safety_ratings")
            _merge(merged, {key: value for key, value in candidate.items() if key not in apart})
            _merge_content(merged, candidate.get("content"))
    if not body and not candidates:
        return None, False
    if candidates:
        body["candidates"] = [{**candidates[at], "index": at} for at in sorted(candidates)]
    blocked = field(field(body, "promptFeedback"), "blockReason")
    ended = [field(candidate, "finishReason") for candidate in candidates.values()]
    return body, bool(blocked) or (bool(ended) and all(ended))


def _merge_content(candidate: Body, content: Any) -> None:
    """Adds the next parts of a candidate.

    A text is appended to the text before it, unless that has a signature or only one of the two is a thought. A
    signature with an empty text belongs to the text before it. Everything else is a new part.
    """
    if not isinstance(content, Mapping):
        return
    merged = candidate.setdefault("content", {})
    merged.update({key: value for key, value in content.items() if key != "parts"})
    parts = merged.setdefault("parts", [])
    for part in listed(content.get("parts")):
        last = parts[-1] if parts else {}
        call, begun = field(part, "functionCall"), last.get("functionCall")
        if isinstance(call, Mapping) and isinstance(begun, dict) and begun.get("willContinue"):
            continue_call(begun, call)
        elif isinstance(call, Mapping) and (field(call, "partialArgs") is not None or field(call, "willContinue")):
            parts.append({**_copied(part), "functionCall": {}})
            continue_call(parts[-1]["functionCall"], call)
        elif (
            _is_text(part)
            and _is_text(last)
            and bool(part.get("thought")) == bool(last.get("thought"))
            and not field(last, "thoughtSignature")
        ):
            _merge(last, part)
        else:
            parts.append(_copied(part))


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str | _Parts) and part.keys() <= {
        "text",
        "thought",
        "thoughtSignature",
        "thought_signature",
    }


_READERS = {
    "chat": _chat_events,
    "responses": _responses_events,
    "messages": _anthropic_events,
    "gemini": _gemini_events,
}
