"""Completes requests that continue a conversation stored on the server.

Clients of OpenAI's Responses API (`previous_response_id`, `conversation`, items of type `item_reference`) and of
Anthropic's API (`thread`) send only new messages. The contents of Gemini's `cachedContent` are sent separately and are
not recorded. Does not read the store.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from assay.errors import FailureKind
from assay.traces.messages.gemini import field
from assay.traces.records import Transition

Body = Mapping[str, Any]
_KEYS = ("previous_response_id", "conversation", "thread")
_CARRIED = ("system", "tools")  # fields of earlier requests that a thread keeps besides the messages
# found in the JSON text of incomplete requests; a text search avoids parsing every request
_MARKERS = tuple(f'"{name}"' for name in (*_KEYS, "item_reference", "cachedContent", "cached_content"))
_ONLY_ID = re.compile(r'\{"id":\s*"[^"]*"\}')  # a reference may have no type
_UNFINISHED = ("queued", "in_progress")


class Call(Protocol):
    """A stored LM call, see `assay.traces.export.selection.Turn`."""

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
    if not any(_ONLY_ID.search(call.request_json) for call in calls) and not any(
        name in call.request_json for call in calls for name in _MARKERS
    ):
        return
    for call, request in zip(calls, full_requests([(call.request, call.response) for call in calls]), strict=True):
        call.complete = request is not None
        if request is not None and request != call.request:
            call.set_request(request)


def is_on_record(calls: Sequence[Transition]) -> bool:
    """Whether the conversations of all calls of a rollout are on record."""
    return all(call.failure is not FailureKind.RECORD for call in calls) and None not in requests_of(calls)


def requests_of(calls: Sequence[Transition]) -> list[dict[str, Any] | None]:
    """`full_requests` of the recorded calls of a rollout."""
    bodies = [(call.response or {}).get("body") for call in calls]
    readable = [body if isinstance(body, Mapping) else {} for body in bodies]
    return full_requests([(call.request, body) for call, body in zip(calls, readable, strict=True)])


def unfinished(body: Mapping[str, Any]) -> bool:
    """Whether the body of a response of the Responses API is that of a background response which goes on."""
    return body.get("object") == "response" and body.get("status") in _UNFINISHED


def item_references(body: Mapping[str, Any]) -> list[str]:
    """Ids of the earlier items that a request of the Responses API names instead of sending them."""
    return [str(item.get("id")) for item in _items(body.get("input")) if _is_reference(item)]


def continues(request: Mapping[str, Any]) -> bool:
    """Whether the server adds earlier items to this request."""
    return _previous(request) is not None or _conversation(request) is not None


def full_requests(calls: Sequence[tuple[Mapping[str, Any], Body]]) -> list[dict[str, Any] | None]:
    """The requests of a rollout as a client that sends the whole conversation would send them.

    The Responses API does not carry over earlier `instructions`. A thread keeps `system` and `tools`.

    Args:
        calls: Stored request and response body of each call, in order; the body is empty if the call failed.
    Returns:
        One request per call, unchanged if it continues nothing. None if it continues a response or names an item that
        is not in the earlier calls, or if its contents are cached by Gemini.
    Source: platform.openai.com/docs/guides/conversation-state; `thread` in the reference of Anthropic's Python SDK
        (beta messages).
    """
    requests: list[dict[str, Any] | None] = []
    # conversation stored on the server up to and including a response, as request fields
    by_response: dict[str, dict[str, Any] | None] = {}
    by_conversation: dict[str, dict[str, Any] | None] = {}
    by_item: dict[str, Any] = {}
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
        if full_request is not None and _is_responses(request):
            full_request = _resolved(full_request, by_item)
        requests.append(full_request)
        stored = None if full_request is None else _stored(full_request, response)
        if isinstance(response.get("id"), str):
            by_response[response["id"]] = stored
        if conversation is not None and (response.get("output") or unfinished(response)):
            by_conversation[conversation] = stored
        if _is_responses(request):
            items = [*_items(request["body"].get("input")), *_items(response.get("output"))]
            by_item.update({item["id"]: item for item in items if _is_item(item)})
    return requests


def _resolved(request: dict[str, Any], by_item: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request with the items that it names; None if one of them is not on record."""
    items = request["body"].get("input")
    if not isinstance(items, list) or not any(map(_is_reference, items)):
        return request
    if any(_is_reference(item) and item.get("id") not in by_item for item in items):
        return None
    known = [by_item[item["id"]] if _is_reference(item) else item for item in items]
    return {**request, "body": {**request["body"], "input": known}}


def _is_reference(item: Any) -> bool:
    """Whether an item has only the id of an earlier one. Its type may be left out."""
    return (
        isinstance(item, Mapping)
        and isinstance(item.get("id"), str)
        and item.get("type", "item_reference") == "item_reference"
        and item.keys() <= {"id", "type"}
    )


def _is_item(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("id"), str) and not _is_reference(item)


def _with(request: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    if not continues(request):
        return dict(request)
    body = {key: value for key, value in request["body"].items() if key not in _KEYS}
    name = "input" if _is_responses(request) else "messages"
    return {**request, "body": {**before, **body, name: [*before.get(name, ()), *_items(body.get(name))]}}


def _stored(request: Mapping[str, Any], response: Body) -> dict[str, Any] | None:
    """The conversation after a response; None if the response goes on."""
    if unfinished(response):
        return None
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
