"""Watches streamed answers for repetition, while they pass through a gateway. Does not change what is forwarded."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from assay.errors import ConfigError
from assay.models.loops import Loop, LoopDetector

__all__ = ["LoopCounts", "LoopWatch", "limit_of"]

_DATA = re.compile(rb"^data:[ \t]*(\{.*\})[ \t]*\r?$", re.MULTILINE)
_HEAD = ("id", "created", "model", "system_fingerprint")  # each event of a stream repeats them
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
_OPEN = 1 << 16  # bytes of an unfinished line that are kept


class LoopWatch:
    """Reads the text in a stream's events, part by part.

    Args:
        action: `off` reads nothing, `alarm` detects a loop, `stop` also asks for the end of the stream.
        limit: tokens that the caller allows for the answer; None if it sets no limit.
    """

    def __init__(self, dialect: str, action: str = "alarm", limit: int | None = None) -> None:
        self.dialect, self.action, self.limit = dialect, action, limit
        self._detector = LoopDetector()
        self._open = b""
        self._head: dict[str, Any] = {}

    @property
    def loop(self) -> Loop | None:
        return self._detector.loop

    def see(self, chunk: bytes) -> bool:
        """Reads a part of the stream. True if it is to be ended here."""
        if self.action == "off" or self.loop is not None:
            return False
        whole, newline, rest = (self._open + chunk).rpartition(b"\n")
        self._open = rest[-_OPEN:]
        for match in _DATA.finditer(whole + newline):
            try:
                event = orjson.loads(match[1])
            except orjson.JSONDecodeError:
                continue
            if not self._head and isinstance(event, Mapping):
                self._head = {name: event[name] for name in _HEAD if name in event}
            for text in texts_of(self.dialect, event):
                self._detector.add(text)
        return self.loop is not None and self.action == "stop"

    def ending(self, message: str) -> bytes:
        """The events that end a stopped stream: as if the limit was reached where the API has a short form, else an
        error.
        """
        return _ending(self.dialect, message, self._head)

    def see_whole(self, text: str) -> None:
        """Reads an answer that was not streamed."""
        if self.action != "off":
            self._detector.add(f"{text}\n")


class LoopCounts:
    """Counts of the loops in a gateway's answers."""

    def __init__(self, action: str) -> None:
        if action not in ("off", "alarm", "stop"):
            raise ConfigError(f"loops={action!r} must be 'off', 'alarm' or 'stop'")
        self.action = action
        self.alarms = self.stopped = self.repeated_words = self.tokens_saved = 0

    def add(self, watch: LoopWatch | None, *, stopped: bool) -> None:
        """Counts the loop of one answer, if it has one."""
        if watch is not None and watch.loop is not None:
            self.stopped += stopped
            self.alarms += not stopped
            self.repeated_words += watch.loop.repeated
            if stopped and watch.limit is not None:  # at most: a word is a token or more
                self.tokens_saved += max(0, watch.limit - watch.loop.end)

    def to_dict(self) -> dict[str, int]:
        counts = {"alarms": self.alarms, "stopped": self.stopped, "repeated_words": self.repeated_words}
        return {**counts, "tokens_saved": self.tokens_saved}


def limit_of(body: Mapping[str, Any]) -> int | None:
    """The limit of tokens in a request of any of the APIs; None without one."""
    config = body.get("generationConfig")
    values = [part[name] for part in (body, config) if isinstance(part, Mapping) for name in _LIMITS if name in part]
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def texts_of(dialect: str, event: Any) -> Iterator[str]:
    """The pieces of generated text in one event of a stream, of thinking and answer alike."""
    if not isinstance(event, Mapping):
        return
    deltas: list[Any] = []
    if dialect == "messages":
        deltas = [event.get("delta")]
    elif dialect == "responses":
        deltas = [{"text": event.get("delta")}]
    elif dialect == "gemini":
        contents = [item.get("content") for item in _each(event.get("candidates"))]
        deltas = [part for content in contents if isinstance(content, Mapping) for part in _each(content.get("parts"))]
    else:
        deltas = [choice.get("delta") or choice for choice in _each(event.get("choices")) if not choice.get("index")]
    for delta in deltas:
        if isinstance(delta, Mapping):
            for name in ("reasoning_content", "reasoning", "thinking", "content", "text", "partial_json"):
                if isinstance(text := delta.get(name), str):
                    yield text


def _each(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def _ending(dialect: str, message: str, head: Mapping[str, Any]) -> bytes:
    if dialect in ("chat", "completions"):
        part: dict[str, Any] = {"delta": {}} if dialect == "chat" else {"text": ""}
        kind = "chat.completion.chunk" if dialect == "chat" else "text_completion"
        last = {**head, "object": kind, "choices": [{"index": 0, "finish_reason": "length", **part}]}
        return b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
    error = {"type": "assay_gateway", "message": message}
    if dialect == "gemini":
        return b"data: " + json.dumps({"error": {**error, "code": 502}}).encode() + b"\r\n\r\n"
    return b"event: error\ndata: " + json.dumps({"type": "error", "error": error}).encode() + b"\n\n"
