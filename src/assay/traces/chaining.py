"""Requests that continue a conversation which the server kept: with that conversation in them.

A client of OpenAI's Responses API that sends `previous_response_id` or `conversation`, or of Anthropic's API that continues a `thread`, sends only
what is new. What Gemini's `cachedContent` holds was sent apart and is not on record. Does not read the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from assay.traces.gemini import field

__all__ = ["complete_requests", "continues", "whole_requests"]

Body = Mapping[str, Any]
_KEYS = ("previous_response_id", "conversation", "thread")
_CARRIED = ("system", "tools")  # what a thread keeps of earlier requests besides the messages
_KEPT = tuple(f'"{name}"' for name in (*_KEYS, "cachedContent", "cached_content"))  # in the JSON of requests that are not whole


class Call(Protocol):
    """A stored LM call, see `assay.traces.selection.Turn`."""

    request_json: str
    whole: bool

    @property
    def request(self) -> dict[str, Any]: ...

    @property
    def response(self) -> dict[str, Any]: ...

    def set_request(self, request: dict[str, Any]) -> None: ...


def complete_requests(calls: Sequence[Call]) -> None:
    """Puts the conversation that the server kept into the requests of a rollout's calls, in order; `whole` is False where it is not on record."""
    if not any(name in call.request_json for call in calls for name in _KEPT):
        return
    for call, whole in zip(calls, whole_requests([(call.request, call.response) for call in calls]), strict=True):
        call.whole = whole is not None
        if whole is not None and whole != call.request:
            call.set_request(whole)


def continues(request: Mapping[str, Any]) -> bool:
    """Whether the server added earlier items to what this request sent."""
    return _previous(request) is not None or _conversation(request) is not None


def whole_requests(calls: Sequence[tuple[Mapping[str, Any], Body]]) -> list[dict[str, Any] | None]:
    """The requests of a rollout, in order, as a client that keeps the conversation itself would have sent them.

    `instructions` of Responses are those of the request itself: the API does not carry over earlier ones. A thread keeps system and tools.

    Args:
        calls: each request as it is stored, and the body of its response; empty where the call failed.
    Returns:
        One request a call, unchanged where it continues nothing; None where it continues a response that is not among the calls before it, or
        contents that Gemini keeps.
    Source: platform.openai.com/docs/guides/conversation-state; `thread` in the reference of Anthropic's Python SDK (beta messages).
    """
    found: list[dict[str, Any] | None] = []
    by_response: dict[str, dict[str, Any] | None] = {}  # what the server kept up to and with that response, as fields of a request
    by_conversation: dict[str, dict[str, Any] | None] = {}
    for request, response in calls:
        previous, conversation = _previous(request), _conversation(request)
        before = by_response.get(previous) if previous is not None else by_conversation.get(conversation, {}) if conversation is not None else {}
        whole = _with(request, before) if before is not None and not _is_cached(request) else None
        found.append(whole)
        kept = None if whole is None else _kept(whole, response)
        if isinstance(response.get("id"), str):
            by_response[response["id"]] = kept
        if conversation is not None and response.get("output"):
            by_conversation[conversation] = kept
    return found


def _with(request: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    if not continues(request):
        return dict(request)
    body = {key: value for key, value in request["body"].items() if key not in _KEYS}
    name = "input" if _is_responses(request) else "messages"
    return {**request, "body": {**before, **body, name: [*before.get(name, ()), *_items(body.get(name))]}}


def _kept(request: Mapping[str, Any], response: Body) -> dict[str, Any]:
    if _is_responses(request):
        return {"input": [*_items(request["body"].get("input")), *_items(response.get("output"))]}
    if not _is_messages(request):
        return {}
    body = request["body"]
    answer = [{"role": "assistant", "content": response["content"]}] if response.get("content") else []
    return {**{key: body[key] for key in _CARRIED if key in body}, "messages": [*_items(body.get("messages")), *answer]}


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return list(value) if isinstance(value, list) else []


def _is_responses(request: Mapping[str, Any]) -> bool:
    return request.get("dialect") == "responses" and isinstance(request.get("body"), Mapping)


def _is_cached(request: Mapping[str, Any]) -> bool:
    return request.get("dialect") == "gemini" and bool(field(request.get("body"), "cachedContent"))


def _is_messages(request: Mapping[str, Any]) -> bool:
    return request.get("dialect") == "messages" and isinstance(request.get("body"), Mapping)


def _previous(request: Mapping[str, Any]) -> str | None:
    if _is_messages(request):
        thread = request["body"].get("thread")
        found = thread.get("previous_message_id") if isinstance(thread, Mapping) else None
    else:
        found = request["body"].get("previous_response_id") if _is_responses(request) else None
    return found if isinstance(found, str) and found else None


def _conversation(request: Mapping[str, Any]) -> str | None:
    found = request["body"].get("conversation") if _is_responses(request) else None
    found = found.get("id") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) and found else None
