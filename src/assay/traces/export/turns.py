"""One stored LM call in the form that an export reads. Parses the call's JSON only when it is needed."""

from collections.abc import Iterable
from typing import Any

import orjson

from assay.errors import FailureKind
from assay.traces.messages.dialects import Answer, answer_of, answer_to, chat_messages
from assay.traces.records import Rollout
from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json

__all__ = ["Turn", "loaded"]


# The columns that no export reads: `rollout_id` names the rollout, which the caller has.
_NOT_READ = frozenset({"rollout_id", "thinking_tokens", "cost_usd", "started_at", "return_"})


class Turn:
    """A stored LM call. Its JSON is parsed on first access.

    Args:
        row: Values of `COLUMNS`, in this order. Columns ending in `_json` are JSON text.
    """

    COLUMNS = tuple(column.name for column in schema.transitions.columns if column.name not in _NOT_READ)
    __slots__ = (*COLUMNS, "_request", "_response", "complete")

    # The types, for type checkers: the table in `assay.traces.store.tables` says which columns there are.
    t: int
    model: str
    weights: str
    adapters_json: str
    request_json: str
    response_json: str | None
    output: str
    error: str | None
    failure: str | None
    tools_json: str
    constrained: bool
    cached: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    shown_tasks_json: str
    token_ids_json: str | None
    logprobs_json: str | None
    latency_ms: float
    step_rewards_json: str
    agent: str

    def __init__(self, row: Iterable[Any]) -> None:
        for name, value in zip(self.COLUMNS, row, strict=True):
            setattr(self, name, value)
        self._request: dict[str, Any] | None = None
        self._response: dict[str, Any] | None = None
        self.complete = True  # False: it continues a conversation that is not completely recorded

    def set_request(self, request: dict[str, Any]) -> None:
        """Replace the request."""
        self._request, self.request_json = request, as_json(request)

    @property
    def request(self) -> dict[str, Any]:
        if self._request is None:
            self._request = loaded(self.request_json)
        return self._request

    @property
    def response(self) -> dict[str, Any]:
        if self._response is None:
            response = loaded(self.response_json)
            self._response = response.get("body", response) if "dialect" in self.request else response
        return self._response

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request as chat messages."""
        return chat_messages(self.request)

    @property
    def answer(self) -> dict[str, Any]:
        """The answer as an assistant's chat message."""
        message = answer_to(self.request, self.response).message
        return (
            message
            if message.get("tool_calls") or message.get("content")
            else {"role": "assistant", "content": self.output}
        )

    @property
    def reasoning(self) -> str:
        """Reasoning text before the answer; empty if the provider does not return it."""
        return self._where('"reasoning', '"thinking', '"thought').reasoning

    @property
    def refusal(self) -> str:
        """Refusal text; it is also part of `output`."""
        return self._where('"refusal"', '"finishReason"', '"promptFeedback"').refusal

    def _where(self, *names: str) -> Answer:
        """The parsed answer if its JSON text contains one of `names`, else an empty one: parsing every answer is
        slow.
        """
        text = self.response_json or ""
        return (
            answer_of(self.request.get("dialect"), self.response) if any(name in text for name in names) else Answer()
        )

    @property
    def step_rewards(self) -> dict[str, float]:
        return {} if self.step_rewards_json == "{}" else loaded(self.step_rewards_json)

    @property
    def truncated(self) -> bool:
        """Whether the model stopped at its token limit."""
        return self._where('"length"', '"max_tokens"', '"max_output_tokens"', '"MAX_TOKENS"').finish == "length"

    def problem(self, rollout: Rollout, last: bool) -> str | None:
        """Why this call is not clean: `error`, `conversation`, `schema`, `truncated` or `parse`; None if it is
        clean.
        """
        if self.error is not None:
            return "error"
        if not self.complete:
            return "conversation"
        request = self.request_json
        if (
            not request.startswith("{")
            or not any(name in request for name in ('"messages"', '"input"', '"contents"'))
            or self.response_json is None
        ):
            return "schema"
        if self.token_ids_json is not None and self.logprobs_json is None:
            return "schema"
        if self.truncated:
            return "truncated"
        empty = not (self.output or self.tools_json != "[]" or self._calls())
        return "parse" if self.failure == FailureKind.PARSE or empty or self._unreadable_arguments() else None

    def _unreadable_arguments(self) -> bool:
        """Whether the arguments of a tool call are not a JSON object. Such arguments are stored as one text.

        Needed for records of versions without the `failure` column.
        """
        if '"arguments":{"arguments":' not in self.tools_json:
            return False
        texts = [
            tool["arguments"].get("arguments") for tool in orjson.loads(self.tools_json) if len(tool["arguments"]) == 1
        ]
        return any(isinstance(text, str) and not loaded(text) for text in texts)

    def _calls(self) -> bool:
        return bool(answer_of(self.request.get("dialect"), self.response).tools)


def loaded(text: str | None) -> dict[str, Any]:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
