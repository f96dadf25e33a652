"""The plan of a chaos run: the properties of each conversation, and the response to each call.

Both depend only on the seed and the number of the conversation or call, so that clients, server and checks compute the
same plan in their own processes. Does not send HTTP.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rigs.upstream_dialects import response_body, response_events

KINDS = {  # kind of response -> relative frequency
    "ok": 600, "odd": 60, "slow": 30, "huge": 3, "429": 40, "500": 40, "error": 40, "empty": 30, "malformed": 40,
    "short": 30, "cut": 40, "reset": 20, "hang": 8,
}  # fmt: skip
GOOD = ("ok", "odd", "slow", "huge")  # kinds of successful responses
_DIALECTS = ("chat", "chat", "responses", "messages", "messages", "gemini", "completions")
_NAMINGS = ("header", "path", "token", "none", "none", "trace")  # `none`: the gateway groups the calls by content
_WORDS = (
    "naïve",
    "übung",
    "東京",
    "😀",
    "plain",
    "\\ back",
    '"quoted"',
    "line\nbreak",
    "tab\t",
    "é",
    "data: x",
    "[DONE]",
)
_EMPTY: dict[str, dict[str, Any]] = {
    "responses": {"output": None},
    "messages": {"content": None},
    "gemini": {"candidates": []},
}
_LAST_FAILED_ATTEMPT = 3  # later attempts of a call always succeed


@dataclass(frozen=True)
class Call:
    """One request: `conversation.turn.attempt`."""

    conversation: int
    turn: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.conversation}.{self.turn}.{self.attempt}"

    @classmethod
    def of(cls, text: str) -> "Call":
        return cls(*map(int, text.split(".")))

    @property
    def number(self) -> int:
        return self.conversation * 10_000 + self.turn * 100 + self.attempt


@dataclass(frozen=True)
class Spec:
    """A conversation. `naming`: how its requests identify their rollout, one of `_NAMINGS`."""

    number: int
    dialect: str
    stream: bool
    naming: str
    turns: int
    chained: bool  # requests continue a response by `previous_response_id`


@dataclass(frozen=True)
class Script:
    """The response to a call."""

    kind: str  # one of `KINDS`
    status: int
    pieces: tuple[bytes, ...]
    ending: str  # `whole`, `cut` (the server closes the connection) or `hang` (the server sends nothing more)
    pause_s: float
    text: str
    calls: tuple[tuple[str, str, str], ...]  # id, name, arguments as text

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def marker_of(conversation: int) -> str:
    """A string that every text of the conversation contains, and no text of another one."""
    return f"<c{conversation:06d}>"


@lru_cache(1000)
def spec_of(seed: int, conversation: int) -> Spec:
    rng = random.Random(f"{seed}:{conversation}")
    dialect = rng.choice(_DIALECTS)
    chained = dialect == "responses" and rng.random() < 0.5
    return Spec(conversation, dialect, rng.random() < 0.6, rng.choice(_NAMINGS), rng.randint(1, 5), chained)


@lru_cache(200)
def script_of(seed: int, call: Call) -> Script:
    """The response to a call."""
    spec = spec_of(seed, call.conversation)
    rng = random.Random(f"{seed}:{call}")
    kind = "ok" if call.attempt > _LAST_FAILED_ATTEMPT else rng.choices(list(KINDS), list(KINDS.values()))[0]
    text, calls = _content(rng, spec, call, huge=kind == "huge")
    response = (spec.dialect, call.number, "m", text, calls)
    if kind in ("429", "500"):
        error = json.dumps({"error": {"message": f"scripted {kind} of {call}", "type": "scripted"}}).encode()
        return Script(kind, int(kind), (error,), "whole", 0.0, text, calls)
    if spec.stream:
        chunks = rng.randint(1, 12) if kind != "huge" else 50
        events = list(response_events(*response, chunks, usage=rng.random() < 0.5))
        pieces = _streamed(rng, kind, spec.dialect, events)
    else:
        pieces = _unstreamed(kind, spec.dialect, response_body(*response))
    ending = {"cut": "cut", "reset": "cut", "hang": "hang"}.get(kind, "whole")
    if ending == "hang" and rng.random() < 0.5:
        pieces = []
    if kind == "odd" or (spec.stream and rng.random() < 0.3):
        pieces = list(_split_anywhere(rng, b"".join(pieces)))
    if ending != "whole" and len(pieces) == 1:  # the server sends half of the pieces, so there must be two
        pieces = [pieces[0][:20], pieces[0][20:]]
    pause_s = rng.uniform(0.2, 0.6) if kind == "slow" else 0.0
    return Script(kind, 200, tuple(pieces), ending, pause_s, text, calls)


def _content(rng: random.Random, spec: Spec, call: Call, *, huge: bool) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """Text and tool calls of the response. All turns but the last one call a tool."""
    marker = marker_of(call.conversation)
    words = " ".join(rng.choices(_WORDS, k=rng.randint(1, 30)))
    text = f"{marker} answer {call}: {words}" + ("x" * 1_000_000 if huge else "")
    if spec.dialect == "completions" or call.turn == spec.turns - 1:
        return text, ()
    arguments = json.dumps(
        {"expression": f"{call.conversation}*{call.turn}", "note": marker}, ensure_ascii=rng.random() < 0.5
    )
    count = rng.choice((1, 1, 2))
    calls = tuple((f"call_{call.number}_{index}", "calculator", arguments) for index in range(count))
    return text if huge or rng.random() < 0.3 else "", calls


def _unstreamed(kind: str, dialect: str, body: dict[str, Any]) -> list[bytes]:
    if kind == "error":
        body = {"error": {"message": "scripted overload", "type": "server_error"}}
        body = {"type": "error", **body} if dialect == "messages" else body
    elif kind == "empty":
        body = {**body, **_EMPTY.get(dialect, {"choices": []})}
    data = json.dumps(body).encode()
    if kind == "malformed":
        return [b"<html><body>502 Bad Gateway</body></html>"]
    if kind == "odd":
        return [b"\n\n " + json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"]
    half = len(data) // 2
    return [data[:half]] if kind == "short" else [data[:half], data[half:]]


def _streamed(rng: random.Random, kind: str, dialect: str, events: list[bytes]) -> list[bytes]:
    half = max(1, len(events) // 2 - 1)
    if kind == "error":
        error = {"type": "error", "error": {"message": "scripted overload", "type": "server_error"}}
        return [*events[:half], f"event: error\ndata: {json.dumps(error)}\n\n".encode()]
    if kind == "empty":
        if dialect not in ("chat", "completions"):
            return [b": nothing\n\n"]
        head = {"id": "none", "object": "chat.completion.chunk", "choices": []}
        return [f"data: {json.dumps(head)}\n\n".encode(), b"data: [DONE]\n\n"]
    if kind == "malformed":
        event = rng.choice(
            (b'data: {"choices": [{"delta": {"con\n\n', b'data: {"text": "\xff\xfe"\n\n', b"data: 1}\n\n")
        )
        return [*events[:half], event, *events[half:]]
    if kind == "short":
        return events[:half] if half < len(events) else [events[0][: len(events[0]) // 2]]
    return [_odd(rng, event) for event in events] if kind == "odd" else events


def _odd(rng: random.Random, event: bytes) -> bytes:
    """An equivalent server-sent event with rare syntax: comments, CRLF line ends, data in several lines."""
    lines: list[bytes] = [b": keep-alive"] if rng.random() < 0.3 else []
    for line in event.strip().split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"data" and value != b"[DONE]" and rng.random() < 0.5:
            lines += [b"data: " + part for part in json.dumps(json.loads(value), indent=1).encode().split(b"\n")]
        else:
            lines.append(name + b":" + value)
    end = b"\r\n"
    return end.join(lines) + end + end


def _split_anywhere(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """The same bytes in random pieces, which can split characters and events."""
    start = 0
    while start < len(data):
        size = rng.randint(1, 400) if len(data) < 50_000 else 65_536
        yield data[start : start + size]
        start += size
