"""A request of a client with the features of its conversation, and digests of conversations. Does not use HTTP."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import orjson

from assay.support.values import json_text
from assay.traces.messages.chaining import item_references
from assay.traces.messages.dialects import Answer, Message, chat_messages, chat_tools, part_texts, tool_results
from assay.traces.messages.gemini import CALL_IDS
from assay.traces.messages.requested import must_call, output_schema

__all__ = ["ClientRequest", "compact", "extended_digest"]

_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", re.IGNORECASE)


_REMEMBERED = 1000  # characters of tool arguments up to which their canonical form is cached


@dataclass(frozen=True)
class ClientRequest:
    """A request and the features of its conversation.

    Args:
        begun: digests of its first messages if they were processed before.
    """

    dialect: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    begun: Sequence[bytes] = ()

    @cached_property
    def messages(self) -> list[Message]:
        return chat_messages({"dialect": self.dialect, "body": self.body})

    @cached_property
    def chain(self) -> list[bytes]:
        """Digests of the conversation's prefixes: `chain[i]` covers the messages 0 to i."""
        digests = list(self.begun)
        for message in self.messages[len(digests) :]:
            digests.append(extended_digest(digests[-1] if digests else b"", message))
        return digests

    @property
    def trace(self) -> str:
        """The id of its W3C trace; "" if it has none."""
        match = _TRACE.fullmatch(
            next((value for name, value in self.headers.items() if name.lower() == "traceparent"), "").strip()
        )
        return match[1].lower() if match and match[1].strip("0") else ""

    @property
    def thread(self) -> str:
        """The id of its OpenAI conversation; "" if it has none."""
        conversation = self.body.get("conversation")
        conversation_id = conversation.get("id") if isinstance(conversation, Mapping) else conversation
        return conversation_id if isinstance(conversation_id, str) else ""

    @property
    def previous(self) -> str:
        """The id of the response or message that it continues; "" if it has none."""
        thread = self.body.get("thread")
        previous_id = self.body.get("previous_response_id") or (
            thread.get("previous_message_id") if isinstance(thread, Mapping) else None
        )
        return previous_id if isinstance(previous_id, str) else ""

    @property
    def references(self) -> list[str]:
        """The ids of earlier items that it names instead of sending them."""
        return item_references(self.body) if self.dialect == "responses" else []

    @cached_property
    def task(self) -> str:
        """Digest of messages, offered tools and requested schema: the task of a conversation that begins here."""
        if not self.chain:
            return ""
        request = {"dialect": self.dialect, "body": self.body}
        offered = sorted(json_text(tool, sort_keys=True) for tool in chat_tools(request))
        text = json_text([offered, output_schema(request), self.previous], sort_keys=True)
        return hashlib.blake2b(self.chain[-1] + text.encode("utf-8", "replace"), digest_size=8).hexdigest()

    @property
    def insists(self) -> bool:
        """Whether tools must be called."""
        return must_call({"dialect": self.dialect, "body": self.body})

    @property
    def prompt(self) -> str:
        """Text of the last user message."""
        return next((part_texts(m.get("content")) for m in reversed(self.messages) if m.get("role") == "user"), "")

    def call_keys(self, answer: Answer) -> list[str]:
        """Keys of an answer's tool calls: their ids, else the digest of the conversation before and their index."""
        before = self.chain[-1].hex() if self.chain else ""
        return [call_id or f"{before}:{at}" for at, (call_id, _, _) in enumerate(answer.tools)]

    @cached_property
    def results_by_key(self) -> dict[str, str]:
        """Tool results by the keys of their calls, as in `call_keys`."""
        results = tool_results(self.messages)
        if self.dialect != "gemini":
            return results
        keys = {
            call["id"]: f"{self.chain[position - 1].hex() if position else ''}:{index}"
            for position, message in enumerate(self.messages)
            for index, call in enumerate(message.get("tool_calls") or ())
            if call["id"].startswith(CALL_IDS)
        }
        return {keys.get(call_id, call_id): result for call_id, result in results.items()}

    @cached_property
    def results(self) -> set[str]:
        """Ids of the tool calls whose results come after the last answer."""
        return set(self._latest[1])

    @property
    def results_in_order(self) -> list[tuple[str, int, str]]:
        """The results after the last answer: the id of each, the place of its call in that answer, and its text.

        The client may have changed the ids. Without the calls in the answer, the places are those of the results. Calls
        without an id are left out: their keys say where they are.
        """
        calls, results = self._latest
        places = {call["id"]: at for at, call in enumerate(calls)}
        known = all(call_id in places for call_id in results)
        return [
            (call_id, places[call_id] if known else at, text)
            for at, (call_id, text) in enumerate(results.items())
            if not call_id.startswith(CALL_IDS)
        ]

    @cached_property
    def _latest(self) -> tuple[Sequence[Mapping[str, Any]], dict[str, str]]:
        """The tool calls of the last answer, and the results after it by their ids."""
        last = max((at for at, message in enumerate(self.messages) if message.get("role") == "assistant"), default=-1)
        answer = self.messages[last] if last >= 0 else {}
        return answer.get("tool_calls") or (), tool_results(self.messages[last + 1 :])


def extended_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation extended by one message.

    Computed for each message of each request, as each request contains the whole conversation: it must be cheap.
    """
    calls = message.get("tool_calls")
    call_parts = [(c["function"]["name"], _compact_once(c["function"]["arguments"])) for c in calls] if calls else ()
    parts = (message.get("role"), message.get("content") or "", call_parts, message.get("tool_call_id") or "")
    try:
        text = orjson.dumps(parts)
    except TypeError:  # lone surrogates, and objects of a caller in Python
        text = json_text(parts).encode()
    return hashlib.blake2b(digest + text, digest_size=16).digest()


@lru_cache(10_000)
def _compact_short(arguments: str) -> str:
    return compact(arguments)


def _compact_once(arguments: str) -> str:
    return _compact_short(arguments) if len(arguments) < _REMEMBERED else compact(arguments)


def compact(arguments: str) -> str:
    """Arguments of a tool call as canonical JSON, as clients reformat it; unchanged if they are not JSON."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
