"""Finds the open rollout that a request continues if the request does not name one.

Criteria, in this order: a W3C trace (`traceparent`); an OpenAI conversation; the response or message that the request
continues, or whose items it names; the result of a tool call that a rollout waits for; the same request after a failed
one; a conversation that begins with the rollout's messages so far; the next prompt of a DSPy program. If a conversation
continues twice from the same point, the second continuation is a new rollout. Does not use HTTP.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from assay.traces.gateway.requests import ClientRequest, compact, extended_digest
from assay.traces.messages.dialects import Answer, Message, part_texts, tool_results
from assay.traces.messages.final_answer import Prompt, asked_outputs, output_values

_LARGE = 16_384  # characters of an answer that are kept for comparison
_OUTPUTS = 200  # output values of a rollout that are kept for comparison
_PREFIXES = 8  # answers of a conversation, the latest ones, that are looked up in the store


@dataclass
class Trail:
    """Position of an open rollout's conversation."""

    at: bytes = b""  # digest of the last answered call's messages and answer
    request: bytes = b""  # digest of that call's messages
    length: int = 0  # number of that call's messages
    task: str = ""  # `ClientRequest.task` of that call
    insists: bool = False
    failed: bytes = b""  # digest of the last call's messages if it failed with an error that clients retry
    part: Message = field(default_factory=dict)  # the part of the failed call's answer that had arrived
    response: str = ""  # id of its last answer
    items: frozenset[str] = frozenset()  # ids of the items of its last answer
    last_answer: Message = field(default_factory=dict)  # its last answer
    calls: set[str] = field(default_factory=set)  # ids of all its tool calls
    requests: set[bytes] = field(default_factory=set)  # digests of the messages of all its calls
    prompt: Prompt = field(default_factory=Prompt)  # of its first call, if DSPy wrote it
    outputs: list[tuple[str, str]] = field(default_factory=list)  # fields of all its answers to such prompts
    latest: list[tuple[str, str]] = field(default_factory=list)  # of the last one
    entries: set[tuple[str, Any]] = field(default_factory=set)  # the keys under which the indexes list it
    shared: set[tuple[str, Any]] = field(default_factory=set)  # those of them that the store has


class _Rollout(Protocol):
    id: str


class Open(Protocol):
    """The attributes of an open rollout that are used here."""

    @property
    def rollout(self) -> _Rollout: ...

    @property
    def in_flight(self) -> int: ...

    trail: Trail
    touched: float
    waiting: dict[str, Any]


R = TypeVar("R", bound=Open)


class Conversations(Generic[R]):
    """Index of the messages of open rollouts, by which the rollout that a request continues is found.

    Args:
        open_rollouts: the rollouts that a request may continue, by id.
    """

    def __init__(self, open_rollouts: Mapping[str, R]) -> None:
        self._open = open_rollouts
        self.index: dict[str, dict[Any, dict[str, None]]] = {}  # kind -> key -> rollout ids, in order

    # -- calls and answers

    def index_request(self, live: R, request: ClientRequest) -> None:
        """Indexes a call of a rollout before it is made."""
        if not live.trail.requests:
            live.trail.prompt = Prompt.of(request.messages)
            for section in live.trail.prompt.sections.items():
                self._add_to_index(live, "section", section)
        live.trail.requests.update(request.chain[-1:])
        for kind, key in (("trace", request.trace), ("thread", request.thread)):
            if key and not self._at(kind, key):
                self._add_to_index(live, kind, key)

    def answered(
        self,
        live: R,
        request: ClientRequest,
        answer: Answer,
        response_id: str | None,
        item_ids: Iterable[str] = (),
    ) -> None:
        """Indexes a call's answer: a request that begins with messages and answer continues the rollout.

        Args:
            item_ids: ids of the answer's items, by which a request may name them.
        """
        trail = live.trail
        message = answer.message
        trail.last_answer, trail.failed, trail.part = _shortened(message), b"", {}
        trail.request, trail.length = request.chain[-1] if request.chain else b"", len(request.chain)
        trail.at = extended_digest(trail.request, message)
        trail.task, trail.insists = request.task, request.insists
        self._add_to_index(live, "answer", trail.at)
        if request.chain:
            self._add_to_index(live, "request", trail.request)
        trail.response = response_id or ""
        if response_id:
            self._add_to_index(live, "response", response_id)
        trail.items = frozenset(item_ids)
        for item_id in trail.items:
            self._add_to_index(live, "item", item_id)
        for call_id, _, _ in answer.tools:
            if call_id:
                trail.calls.add(call_id)
                self._add_to_index(live, "call", call_id)
        if trail.prompt.sections:
            trail.latest = output_values(answer, asked_outputs(request.messages))
            trail.outputs = [*trail.outputs, *trail.latest][-_OUTPUTS:]

    def failed(self, live: R, request: ClientRequest, part: str = "") -> None:
        """Indexes a call that failed with an error that clients retry.

        Args:
            part: text of the answer that had arrived: a client that disconnected may continue with it.
        """
        if request.chain:
            live.trail.failed, live.trail.part = request.chain[-1], _shortened({"role": "assistant", "content": part})
            self._add_to_index(live, "failed", live.trail.failed)

    def forget(self, live: R) -> None:
        """Removes an ended rollout from the indexes."""
        for kind, key in live.trail.entries:
            keys = self.index[kind]
            keys[key].pop(live.rollout.id, None)
            if not keys[key]:
                del keys[key]
            if not keys:
                del self.index[kind]
        live.trail.entries.clear()

    def _add_to_index(self, live: R, kind: str, key: Any) -> None:
        self.index.setdefault(kind, {}).setdefault(key, {})[live.rollout.id] = None
        live.trail.entries.add((kind, key))

    def _at(self, kind: str, key: Any) -> list[R]:
        return [live for id_ in self.index.get(kind, {}).get(key, ()) if (live := self._open.get(id_)) is not None]

    # -- keys in the store, by which other gateways find a rollout

    def new_keys(self, live: R) -> list[str]:
        """The keys of a rollout that were not returned before, as the store has them."""
        new = live.trail.entries - live.trail.shared
        live.trail.shared |= new
        return [stored_key(kind, key) for kind, key in new]

    def add(self, live: R, kind: str, key: Any, request: ClientRequest) -> None:
        """Adds a key of a request under which the store has a rollout."""
        self._add_to_index(live, kind, key)
        live.trail.shared.add((kind, key))
        # The store has the calls with the texts of the rollout's version, the key is of the agent's own: of the last
        # call if it covers as many messages.
        if kind == "answer" and request.chain.index(key) == live.trail.length:
            live.trail.at = key
        if kind == "request" and request.chain.index(key) == live.trail.length - 1:
            live.trail.request = key
        if kind == "failed":
            live.trail.failed = key

    @staticmethod
    def keys_of(request: ClientRequest) -> dict[str, tuple[str, Any]]:
        """The keys by which `find` would find the rollout of a request, by their form in the store."""
        keys: list[tuple[str, Any]] = [("trace", request.trace), ("thread", request.thread)]
        keys += [("response", request.previous), *(("item", item) for item in request.references)]
        keys += [("call", call_id) for call_id in request.results]
        answers = [at for at, message in enumerate(request.messages) if message.get("role") == "assistant"][-_PREFIXES:]
        keys += [("answer", request.chain[at]) for at in answers]
        keys += [("request", request.chain[at - 1]) for at in answers if at]
        keys += [("section", section) for section in Prompt.of(request.messages).sections.items()]
        if request.chain:
            keys += [("failed", request.chain[-1]), *([("request", request.chain[-1])] if request.insists else [])]
        return {stored_key(kind, key): (kind, key) for kind, key in keys if key}

    # -- finding

    def find(self, request: ClientRequest) -> R | None:
        """The open rollout that a request continues; None if it begins a new one."""
        for kind, key in (("trace", request.trace), ("thread", request.thread)):
            if key and (candidates := self._at(kind, key)):
                return candidates[0]
        if request.previous and (candidates := self._at("response", request.previous)):
            return next(
                (live for live in candidates if live.trail.response == request.previous and not live.in_flight), None
            )
        for item_id in reversed(request.references):
            if candidates := self._at("item", item_id):
                return next((live for live in candidates if item_id in live.trail.items and not live.in_flight), None)
        if not request.chain:
            return None
        called = [(call_id, live) for call_id in request.results for live in self._at("call", call_id)]
        waiting = {live.rollout.id: live for call_id, live in called if call_id in live.waiting}
        if len(waiting) == 1:
            return next(iter(waiting.values()))  # also if the client rewrote the conversation
        last = request.chain[-1]
        failed = (live for live in self._at("failed", last) if live.trail.failed == last and not live.in_flight)
        ways = (self._insisting, self._continued, self._of_program)
        return next(failed, None) or next(filter(None, (way(request) for way in ways)), None)

    def _insisting(self, request: ClientRequest) -> R | None:
        """The rollout whose last request is repeated with mandatory tool calls, as by DSPy's ReActV2 for its answer."""
        if not request.insists:
            return None
        key = request.chain[-1]
        candidates = [live for live in self._at("request", key) if live.trail.request == key]
        same_task = [live for live in candidates if live.trail.task == request.task and not live.trail.insists]
        return _first(same_task, request.results)

    def _continued(self, request: ClientRequest) -> R | None:
        """The rollout with the longest request, or request and answer, that the conversation begins with."""
        result_ids = tool_results(request.messages).keys()
        answered, requested, failed = (self.index.get(kind, {}) for kind in ("answer", "request", "failed"))
        for index in reversed(range(len(request.chain) - 1)):
            key = request.chain[index]
            if key not in answered and key not in requested and key not in failed:
                continue  # the common case: must be cheap, because every message of a long conversation is looked up
            later = request.messages[index + 1 :]
            candidates = self._at("answer", key)
            current = [live for live in candidates if live.trail.at == key]
            if not candidates and (candidates := self._at("request", key)):
                asked = [live for live in candidates if live.trail.request == key]
                current = [live for live in asked if _begins_with(live.trail.last_answer, later)]
            if not candidates:
                failed_there = [live for live in self._at("failed", key) if live.trail.failed == key]
                candidates = current = [live for live in failed_there if _begins_with(live.trail.part, later)]
            if candidates:  # if none fits, all of them have continued from this point: the request begins a new rollout
                ending = [live for live in candidates if _ends_with(later, live.trail.last_answer)]
                return _first(current, result_ids) or _first(ending, result_ids)
        owners = {live.rollout.id: live for call_id in result_ids for live in self._at("call", call_id)}
        return next(iter(owners.values())) if len(owners) == 1 else None  # the client rewrote the conversation

    def _of_program(self, request: ClientRequest) -> R | None:
        """The rollout of a DSPy program whose next prompt this is: it has the program's inputs and earlier outputs."""
        prompt = Prompt.of(request.messages)
        similar = {
            live.rollout.id: live for section in prompt.sections.items() for live in self._at("section", section)
        }
        fits = [
            (share, live)
            for live in similar.values()
            if not live.in_flight and request.chain[-1] not in live.trail.requests
            if (share := prompt.follows(live.trail.prompt, live.trail.outputs, live.trail.latest)) is not None
        ]
        return min(fits, key=lambda fit: (-fit[0], fit[1].touched))[1] if fits else None


def stored_key(kind: str, key: Any) -> str:
    """The form in which the store has a key of an index: a hash, so that it holds no text of a conversation."""
    return hashlib.blake2b(repr((kind, key)).encode("utf-8", "replace"), digest_size=16).hexdigest()


def _first(candidates: Iterable[R], result_ids: Iterable[str]) -> R | None:
    """Of the candidates without a running call: one whose tool results the request contains, else the longest idle."""
    ids = set(result_ids)
    free = [live for live in candidates if not live.in_flight]
    return min(free, key=lambda live: (ids.isdisjoint(live.trail.calls), live.touched), default=None)


def _ends_with(later: Sequence[Message], answer: Message) -> bool:
    """Whether the last answer in these messages is the rollout's last answer.

    This is the case if a client first used a server-side thread and now sends the conversation itself.
    """
    last = max((at for at, message in enumerate(later) if message.get("role") == "assistant"), default=None)
    return last is not None and _begins_with(answer, later[last:])


def _begins_with(answer: Message, later: Sequence[Message]) -> bool:
    """Whether messages begin with the rollout's answer. Clients may reformat the answer or leave it out."""
    if later[0].get("role") != "assistant":
        return True
    end = next((at for at, message in enumerate(later) if message.get("role") != "assistant"), len(later))
    message_text = _plain(" ".join(part_texts(message.get("content")) for message in later[:end]))
    calls = answer.get("tool_calls") or []
    if calls and _called([answer]) == _called(later[:end]):
        return True
    if any(len(call["id"]) > 3 and call["id"] in message_text for call in calls):
        return True
    answer_text = _plain(part_texts(answer.get("content")))
    return bool(answer_text and message_text) and (
        answer_text in message_text or message_text in answer_text or compact(answer_text) == compact(message_text)
    )


def _called(messages: Sequence[Message]) -> list[tuple[str, str]]:
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return [(function["name"], compact(function["arguments"])) for function in functions]


def _shortened(message: Message) -> Message:
    """An answer with long texts cut, for comparison. Calls with long arguments are identified by their ids."""
    calls = [
        {**call, "function": {**call["function"], "arguments": call["function"]["arguments"][:_LARGE]}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "content": (message.get("content") or "")[:_LARGE], **({"tool_calls": calls} if calls else {})}


def _plain(text: str) -> str:
    return " ".join(text.split())
