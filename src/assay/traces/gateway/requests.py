"""Bodies of requests: read as JSON, and as they may be stored, without secrets."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from assay.errors import ConfigError
from assay.support.scrubbing import credentials_in, fields, is_credential, may_hold
from assay.support.values import json_text
from assay.traces.messages import gemini
from assay.traces.messages.chaining import item_references
from assay.traces.messages.dialects import Answer, Message, chat_messages, chat_tools, each, part_texts, tool_results
from assay.traces.messages.final_answer import must_call, output_schema
from assay.traces.messages.gemini import CALL_IDS

_CONTAINERS = frozenset((dict, list))  # exact types suffice for parsed JSON; `isinstance` takes three times as long


_DEEPEST = 200  # nesting of a request that trainers and databases can read
_KEY_HEADER = re.compile(r"auth|key|token|secret|cookie|passw|credential|signature", re.I)


_KEY_ARGUMENTS = ("key", "sig", "signature", "code")


_SECRETS = ("api_key", "api_base", "base_url", "headers", "extra_headers")  # some clients send these in the body


def storable(body: dict[str, Any], secrets: list[str], *, checked: int = 0) -> dict[str, Any]:
    """A request's body without server addresses and keys.

    Args:
        secrets: the request's secrets. Those in the body's fields are added, as servers may echo them.
        checked: number of its first `messages` that are known to have no field that can hold a credential.
    """
    for part in (body, body.get("extra_body")):
        if isinstance(part, dict):
            fields({key: part[key] for key in _SECRETS if key in part}, removed=secrets)
    stored = {key: value for key, value in body.items() if key not in _SECRETS}
    if isinstance(extra := stored.get("extra_body"), dict):
        stored["extra_body"] = {key: value for key, value in extra.items() if key not in _SECRETS}
    if not checked or may_hold(stored["messages"], secrets):
        return without_secrets(stored, secrets)
    before, later = stored["messages"][:checked], stored["messages"][checked:]
    cleaned = without_secrets({**stored, "messages": later}, secrets)
    return {**cleaned, "messages": stored["messages"] if cleaned["messages"] is later else before + cleaned["messages"]}


def without_secrets(body: dict[str, Any], secrets: list[str]) -> dict[str, Any]:
    """A copy without the credentials in its fields, which are added to `secrets`."""
    cleaned: dict[str, Any] = fields(body, secrets, removed=secrets)
    return cleaned


def sent_secrets(request: web.Request) -> list[str]:
    """The keys in a request's headers and query."""
    secrets: list[str] = []
    for name, value in request.headers.items():
        if _KEY_HEADER.search(name):
            secrets += credentials_in(value)
            if "cookie" in name.lower():
                secrets += [part.partition("=")[2].strip() for part in value.split(";")]
    secrets += [value for name, value in request.query.items() if is_credential(name) or name.lower() in _KEY_ARGUMENTS]
    return [secret for secret in secrets if secret]


def parsed_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # lone surrogates and NaN, which Python's parser accepts
        return json.loads(raw.decode("utf-8", "surrogatepass"))


def parsed_or_none(raw: bytes) -> Any:
    """The value of JSON; None if it is not JSON."""
    try:
        return parsed_json(raw)
    except (ValueError, RecursionError):
        return None


def json_body(raw: bytes) -> dict[str, Any]:
    try:
        body = parsed_json(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    if _depth(body) > _DEEPEST:
        raise ConfigError(f"the body is nested more than {_DEEPEST} deep")
    return body


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            part
            for item in level
            for part in (item.values() if type(item) is dict else item)
            if type(part) in _CONTAINERS
        ]
    return depth


def is_constrained(body: dict[str, Any]) -> bool:
    config = gemini.field(body, "generationConfig")
    if gemini.output_schema(body) or gemini.field(config, "responseMimeType") not in (None, "text/plain"):
        return True
    formats = [body.get("response_format"), body.get("output_format")]
    formats += [part.get("format") for name in ("text", "output_config") if isinstance(part := body.get(name), dict)]
    return "grammar" in body or any(
        isinstance(output_format, dict) and output_format.get("type") not in (None, "text") for output_format in formats
    )


# -- A request of a client with the features of its conversation, and digests of conversations. Does not use HTTP.


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
    def failed_calls(self) -> set[str]:
        """Ids of the tool calls whose result is marked as an error, which only Anthropic's API does."""
        if self.dialect != "messages":
            return set()
        parts = (part for message in each(self.body.get("messages")) for part in each(message.get("content")))
        return {str(part.get("tool_use_id")) for part in parts if part.get("is_error") is True}

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


# -- Cache of conversation prefixes that were processed before.
#
# Each request contains the whole conversation, and all but its end was in the request before. Stores digests, not
# texts. Does not find rollouts.


_INCREMENTAL_DIALECTS = ("chat", "messages")  # dialects in which a message can be read without the ones after it
_MOST = 200_000  # cached digests: at most 12 MB


class Beginning(NamedTuple):
    """The part of a request that was processed before.

    Args:
        key: digest of the whole request.
        known: number of its first messages that were processed before and have no field that can hold a credential.
        chain: the digests of these messages, as in `ClientRequest.chain`.
    """

    key: bytes
    known: int = 0
    chain: Sequence[bytes] = ()


class Beginnings:
    """The digests of recent requests, by which the request before a given one is found.

    Args:
        most: maximum number of cached digests; the oldest is dropped.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most, self.size = most, 0
        self._known: dict[bytes, Sequence[bytes]] = {}  # by request digest, oldest first

    def of(self, dialect: str, body: Mapping[str, Any]) -> Beginning | None:
        """Looks up a request. The messages before its last answer are the messages of the request before.

        Returns:
            None if its messages can only be read as a whole.
        """
        messages = body.get("messages")
        if dialect not in _INCREMENTAL_DIALECTS or not isinstance(messages, list):
            return None
        answers = (
            at
            for at in range(len(messages) - 1, 0, -1)
            if isinstance(messages[at], dict) and messages[at].get("role") == "assistant"
        )
        before = next(answers, 0)
        try:
            digest = hashlib.blake2b(orjson.dumps([dialect, body.get("system")]), digest_size=16)
            if before:
                digest.update(orjson.dumps(messages[:before])[1:-1])
            chain = self._known.get(digest.digest(), ()) if before else ()
            digest.update((b"," if before else b"") + orjson.dumps(messages[before:])[1:-1])
        except TypeError:  # lone surrogates, numbers beyond 64 bits
            return None
        return Beginning(digest.digest(), before if chain else 0, chain)

    def keep(self, beginning: Beginning, chain: Sequence[bytes]) -> None:
        """Caches the chain of a request. None of its fields may be able to hold a credential."""
        self._drop(beginning.key)
        self._known[beginning.key] = chain
        self.size += len(chain)
        while self.size > self._most:
            self._drop(next(iter(self._known)))

    def _drop(self, key: bytes) -> None:
        self.size -= len(self._known.pop(key, ()))
