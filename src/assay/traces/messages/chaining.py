"""Completes requests that continue a conversation stored on the server.

Clients of OpenAI's Responses API (`previous_response_id`, `conversation`) and of Anthropic's API (`thread`) send only
new messages. The contents of Gemini's `cachedContent` are sent separately and are not recorded. Does not read the
store.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from assay.traces.messages.gemini import field

__all__ = ["complete_requests", "continues", "full_requests"]

Body = Mapping[str, Any]
_KEYS = ("previous_response_id", "conversation", "thread")
_CARRIED = ("system", "tools")  # fields of earlier requests that a thread keeps besides the messages
# found in the JSON text of incomplete requests; a text search avoids parsing every request
_MARKERS = tuple(f'"{name}"' for name in (*_KEYS, "cachedContent", "cached_content"))


class Call(Protocol):
    """A stored LM call, see `assay.traces.export.turns.Turn`."""

    request_json: str
    complete: bool

    @property
    def request(self) -> dict[str, Any]: ...

    @property
    def response(self) -> dict[str, Any]: ...

    def set_request(self, request: dict[str, Any]) -> None: ...


def complete_requests(calls: Sequence[Call]) -> None:
    """Add the conversation stored on the server to the requests of a rollout.

    Sets `complete` to False on calls whose conversation is not recorded.

    Args:
        calls: Calls of one rollout, in order; modified in place.
    """
    if not any(name in call.request_json for call in calls for name in _MARKERS):
        return
    for call, request in zip(calls, full_requests([(call.request, call.response) for call in calls]), strict=True):
        call.complete = request is not None
        if request is not None and request != call.request:
            call.set_request(request)


def continues(request: Mapping[str, Any]) -> bool:
    """Whether the server adds earlier items to this request."""
    return _previous(request) is not None or _conversation(request) is not None


def full_requests(calls: Sequence[tuple[Mapping[str, Any], Body]]) -> list[dict[str, Any] | None]:
    """The requests of a rollout as a client that sends the whole conversation would send them.

    The Responses API does not carry over earlier `instructions`. A thread keeps `system` and `tools`.

    Args:
        calls: Stored request and response body of each call, in order; the body is empty if the call failed.
    Returns:
        One request per call, unchanged if it continues nothing. None if it continues a response that is not among the
        earlier calls, or contents cached by Gemini.
    Source: platform.openai.com/docs/guides/conversation-state; `thread` in the reference of Anthropic's Python SDK
        (beta messages).
    """
    requests: list[dict[str, Any] | None] = []
    # conversation stored on the server up to and including a response, as request fields
    by_response: dict[str, dict[str, Any] | None] = {}
    by_conversation: dict[str, dict[str, Any] | None] = {}
    for request, response in calls:
        previous, conversation = _previous(request), _conversation(request)
        before = (
            by_response.get(previous)
            if previous is not None
            else by_conversation.get(conversation, {})
            if conversation is not None
            else {}
        )
        full_request = _with(request, before) if before is not None and not _is_cached(request) else None
        requests.append(full_request)
        stored = None if full_request is None else _stored(full_request, response)
        if isinstance(response.get("id"), str):
            by_response[response["id"]] = stored
        if conversation is not None and response.get("output"):
            by_conversation[conversation] = stored
    return requests


def _with(request: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    if not continues(request):
        return dict(request)
    body = {key: value for key, value in request["body"].items() if key not in _KEYS}
    name = "input" if _is_responses(request) else "messages"
    return {**request, "body": {**before, **body, name: [*before.get(name, ()), *_items(body.get(name))]}}


def _stored(request: Mapping[str, Any], response: Body) -> dict[str, Any]:
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
        response_id = thread.get("previous_message_id") if isinstance(thread, Mapping) else None
    else:
        response_id = request["body"].get("previous_response_id") if _is_responses(request) else None
    return response_id if isinstance(response_id, str) and response_id else None


def _conversation(request: Mapping[str, Any]) -> str | None:
    conversation = request["body"].get("conversation") if _is_responses(request) else None
    conversation = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    return conversation if isinstance(conversation, str) and conversation else None
