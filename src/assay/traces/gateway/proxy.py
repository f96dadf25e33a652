"""Forwarding of answers through a gateway.

An answer is forwarded as it arrives and parsed once it is complete.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from assay.errors import ConfigError, FailureKind
from assay.models.calls import Call
from assay.models.loops import Loop, LoopDetector
from assay.support.scrubbing import fields, mask_secrets, message
from assay.support.values import json_text
from assay.traces.gateway.events import read_events
from assay.traces.gateway.requests import parsed_json, parsed_or_none
from assay.traces.messages.chaining import unfinished
from assay.traces.messages.dialects import Answer, answer_of, each, error_in, error_of, is_context_error
from assay.traces.records import Transition

# -- Watches streamed answers for repetition, while they pass through a gateway. Does not change what is forwarded.


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
        if self.dialect in ("chat", "completions"):
            part: dict[str, Any] = {"delta": {}} if self.dialect == "chat" else {"text": ""}
            kind = "chat.completion.chunk" if self.dialect == "chat" else "text_completion"
            last = {**self._head, "object": kind, "choices": [{"index": 0, "finish_reason": "length", **part}]}
            return b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
        error = {"type": "assay_gateway", "message": message}
        if self.dialect == "gemini":
            return b"data: " + json.dumps({"error": {**error, "code": 502}}).encode() + b"\r\n\r\n"
        return b"event: error\ndata: " + json.dumps({"type": "error", "error": error}).encode() + b"\n\n"

    def see_whole(self, text: str) -> None:
        """Reads an answer that was not streamed."""
        if self.action != "off":
            self._detector.add(f"{text}\n")


class LoopCounts:
    """Counts of the loops in a gateway's answers."""

    def __init__(self, action: str) -> None:
        if action not in ("off", "alarm", "stop"):
            raise ConfigError(f"`loops={action!r}` must be 'off', 'alarm' or 'stop'")
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
    if dialect == "messages":
        deltas = [event.get("delta")]
    elif dialect == "responses":
        deltas = [{"text": event.get("delta")}]
    elif dialect == "gemini":
        contents = each([candidate.get("content") for candidate in each(event.get("candidates"))])
        deltas = [part for content in contents for part in each(content.get("parts"))]
    else:
        deltas = [choice.get("delta") or choice for choice in each(event.get("choices")) if not choice.get("index")]
    for delta in each(deltas):
        for name in ("reasoning_content", "reasoning", "thinking", "content", "text", "partial_json"):
            if isinstance(text := delta.get(name), str):
                yield text


# -- Proxy.


_MAX_STORED = 64 << 20  # bytes of an answer that are kept in memory
# A stream's last event.
_LAST = re.compile(rb"\n(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed)))")
# In the chunk of a chat before the usage and the end. Some servers send "" in earlier chunks.
_FINISH = re.compile(rb'"finish(?:_r|R)eason"\s*:\s*"[^"]')


class Passed:
    """The forwarded parts of one answer."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = self.status = 0
        self.streamed = self.listed = self.recorded = self._ending = False  # `listed`: as one JSON list
        self.unsent = False  # see `Reply`
        self._tail = b"\n"
        self.error: str | None = None
        self.failure: FailureKind | None = None
        self.client_left = False  # the client went away
        self.secrets: list[str] = []  # the request's secrets, which the server may echo
        self.response: web.StreamResponse | None = None
        self.watch: LoopWatch | None = None  # reads a stream for loops
        self.call: Call | None = None  # of a model of this process
        self.shown_tasks: tuple[str, ...] = ()

    def see(self, chunk: bytes) -> bool:
        """Adds a part of the answer. True once a stream's last event is complete."""
        self.size += len(chunk)
        if self.size <= _MAX_STORED:
            self.parts.append(chunk)
        data = self._tail + chunk
        self._ending = self._ending or _LAST.search(data) is not None
        self._tail = data[-40:]
        return self._ending and data.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode("utf-8", "replace")

    def read(self, dialect: str) -> tuple[dict[str, Any] | None, bool]:
        """The answer as one body, and whether it is complete."""
        if self.status >= 400 or not self.parts:
            return None, self.status >= 400
        if not self.streamed:
            value = parsed_json(b"".join(self.parts))
            return (value, True) if isinstance(value, dict) else (None, False)
        events = list(self._listed_events() if self.listed else self.events())
        broken = next((value for event in events if (value := error_of(event))), None)
        if broken is not None:
            self.fail(f"the upstream: {self._excerpt(json.dumps(broken))}", _kind_of(broken))
        body, complete = read_events(dialect, events)
        return body, complete and self.size <= _MAX_STORED

    def _listed_events(self) -> Iterator[dict[str, Any]]:
        """The objects of a JSON list, Gemini's stream unless events are requested; of a cut list the complete ones."""
        text, reader, at = self.text, json.JSONDecoder(), 0
        while (at := text.find("{", at)) >= 0:
            try:
                event, at = reader.raw_decode(text, at)
            except (ValueError, RecursionError):
                return
            yield event

    def events(self) -> Iterator[dict[str, Any]]:
        """The objects in a stream's events; plain text of an `error` event becomes its message.

        Other data that is not JSON makes the answer a failure.
        """
        name, begun = b"", list[bytes]()  # `begun`: the lines so far of data in several lines
        for line in (*b"".join(self.parts).replace(b"\r\n", b"\n").split(b"\n"), b""):
            if line.startswith(b"event:"):
                name = line[6:].strip()
            elif line.startswith(b"data:") and (data := line[5:].strip()) and data != b"[DONE]":
                event = None if begun else parsed_or_none(data)  # some servers omit the empty line between events
                if isinstance(event, dict):
                    yield _named(event, name)
                elif event is None:
                    begun.append(data)
                elif name == b"error":
                    yield _named({"message": event if isinstance(event, str) else data.decode()}, name)
            elif not line:
                if begun:
                    yield from self._event_of(b"\n".join(begun), name)
                name, begun = b"", []

    def _event_of(self, data: bytes, name: bytes) -> Iterator[dict[str, Any]]:
        """The event whose data is not JSON in a single line."""
        event = parsed_or_none(data)
        if isinstance(event, dict):
            yield _named(event, name)
        elif name == b"error":
            yield _named({"message": data.decode("utf-8", "replace")}, name)
        elif event is None and data != b"null":
            text = self._excerpt(data[:200].decode("utf-8", "replace"))
            self.fail(f"an event of the stream is not JSON: {text}", FailureKind.MODEL)

    def fail(self, error: str, kind: FailureKind) -> None:
        """Sets the error unless one is set: the first error is the cause."""
        if self.error is None:
            self.error, self.failure = message(error, self.secrets), kind

    def _excerpt(self, text: str) -> str:
        """The first 500 characters of a server's text. Secrets are removed first, so that none is cut in two."""
        return message(text[:20_000], self.secrets)[:500]

    def answer(self, dialect: str, transition: Transition) -> tuple[Answer | None, str | None]:
        """Writes the answer, or its error and failure kind, into a transition.

        Returns:
            The answer, None if it failed; and the id of the response.
        """
        answer = response_id = None
        try:
            body, complete = self.read(dialect)
            if self.client_left and self.streamed and complete:
                self.error = self.failure = None  # many clients close the connection at the last event
            if body is not None:
                response_id = body.get("id") if dialect in ("responses", "messages") else None
                answer = _fill(transition, dialect, fields(body, self.secrets))
            self._judge(dialect, body, complete)
        except Exception as error:
            self.fail(f"the answer could not be read: {error}", FailureKind.MODEL)
            transition.output = mask_secrets(self.text[:20_000], self.secrets)
        transition.error, transition.failure = self.error, self.failure
        if self.call is not None:
            _fill_from_call(transition, self.call)
        if self.watch is not None and self.error is None:
            if not self.streamed:
                self.watch.see_whole(transition.output)
            if self.watch.loop is not None:  # an alarm: the caller has the answer
                transition.failure = FailureKind.LOOP
        return answer if self.error is None else None, response_id

    def _judge(self, dialect: str, body: dict[str, Any] | None, complete: bool) -> None:
        """Sets the error if status, format or codes show that this was not an answer."""
        if self.status >= 400:
            reply = parsed_or_none(b"".join(self.parts))
            reply = reply[0] if isinstance(reply, list) and reply else reply  # Gemini, if a list was requested
            error = (error_of(reply) or reply) if isinstance(reply, dict) else None
            kind = FailureKind.TIMEOUT if self.status in (408, 504) else FailureKind.MODEL
            self.fail(f"HTTP {self.status}: {self._excerpt(self.text)}", _kind_of(error, kind))
        elif body is not None and dialect == "responses" and unfinished(body):
            self.fail("the response was not finished when it was read", FailureKind.RECORD)
        elif body is not None and (reported := error_in(dialect, body)) is not None:
            self.fail(f"the upstream answered {self._excerpt(json_text(reported))}", _kind_of(reported))
        elif not complete:
            self.fail("the answer was not complete", FailureKind.MODEL)
        elif body is None:
            self.fail("the answer could not be read", FailureKind.MODEL)


def _kind_of(error: Any, otherwise: FailureKind = FailureKind.MODEL) -> FailureKind:
    return FailureKind.CONTEXT if is_context_error(error) else otherwise


def _fill(transition: Transition, dialect: str, body: dict[str, Any]) -> Answer:
    transition.response = {"body": body}
    answer = answer_of(dialect, body)
    transition.output, transition.token_ids, transition.logprobs = answer.output, answer.token_ids, answer.logprobs
    transition.prompt_tokens, transition.completion_tokens = answer.prompt_tokens, answer.completion_tokens
    transition.thinking_tokens = answer.thinking_tokens
    if transition.completion_tokens is None and answer.logprobs is not None:
        transition.completion_tokens = len(answer.logprobs)
    return answer


def _fill_from_call(transition: Transition, call: Call) -> None:
    """What the answer that the caller got does not say of the call."""
    transition.cached, transition.cost_usd, transition.constrained = call.cached, call.cost_usd, call.constrained
    if call.cached:
        transition.latency_ms = call.latency_ms
    for name in ("prompt_tokens", "completion_tokens", "thinking_tokens", "token_ids", "logprobs"):
        if (value := getattr(call, name)) is not None:
            setattr(transition, name, value)
    if call.error is not None and transition.error is not None:
        transition.error, transition.failure = call.error, call.failure
    elif call.failure is not None:  # a loop, which is a text for the caller
        transition.failure = call.failure


def _named(event: dict[str, Any], name: bytes) -> dict[str, Any]:
    return {**event, "type": "error"} if name == b"error" else event


async def pass_on(
    request: web.Request, reply: Any, passed: Passed, rollout_id: str, keep: Callable[[], None],
    in_turn: Callable[[Callable[[], None]], Awaitable[None]], written: Callable[[], Awaitable[None]], *,
    choices: int = 1, streams: bool = False,
) -> web.StreamResponse:  # fmt: skip
    """Forwards an answer. A stream is recorded before its last event is sent: the next call may follow at once.

    Some clients disconnect at the finish reason of a chat, one event before the last, so with one choice that event is
    held back too. Gemini's streams have no end marker, and some repeat the finish reason in every event: there each
    part is held until the next one arrives.

    Args:
        keep: records the call.
        in_turn: calls `keep` when it is this call's turn to be recorded.
        written: awaited after `keep`, before the last part of the answer is sent.
        choices: number of requested choices.
        streams: whether a Gemini stream was requested, which arrives as events or as one JSON list.
    """
    passed.status, passed.call, passed.shown_tasks = reply.status, reply.call, reply.shown_tasks
    passed.unsent = reply.unsent
    headers = CIMultiDict(reply.headers)
    headers["x-assay-rollout"] = rollout_id
    events = "event-stream" in headers.get("content-type", "")
    passed.listed = streams and not events and reply.status < 400
    passed.streamed = events or passed.listed
    if not passed.streamed:
        return await _pass_unstreamed(request, reply, passed, headers, keep, written)
    response = passed.response = web.StreamResponse(status=reply.status, headers=headers)
    await response.prepare(request)
    pending = b""
    async for chunk in reply.chunks:
        ended = passed.see(chunk)
        if passed.watch is not None and passed.watch.see(chunk) and not ended and not passed.listed:
            return await _stopped(response, passed, pending + chunk, keep, written)
        if ended and not passed.recorded:
            pending, chunk = b"", await _begun(response, pending + chunk)
            await in_turn(keep)
            await written()
        if streams and pending:
            await response.write(pending)
            pending = b""
        if not ended and (pending or (choices == 1 and _FINISH.search(chunk))):
            pending += chunk
            continue
        await response.write(pending + chunk)
        pending = b""
    if not passed.recorded:
        keep()  # a broken stream has no last event; it must be stored before the client sees the end
        await written()
    if pending:
        await response.write(pending)
    await response.write_eof()
    return response


async def _stopped(
    response: web.StreamResponse, passed: Passed, last: bytes, keep: Callable[[], None],
    written: Callable[[], Awaitable[None]],
) -> web.StreamResponse:  # fmt: skip
    """Ends a stream whose text repeats itself. The connection to the upstream is closed by the caller."""
    assert passed.watch is not None
    loop = passed.watch.loop
    words = 0 if loop is None else loop.repeated
    reason = f"the gateway stopped the answer: its text repeated itself for {words} words"
    passed.fail(reason, FailureKind.LOOP)
    keep()
    await written()
    await response.write(last[: last.rfind(b"\n\n") + 2] + passed.watch.ending(reason))
    await response.write_eof()
    return response


async def _begun(response: web.StreamResponse, chunk: bytes) -> bytes:
    """Sends the events before the end in a stream's last part, without waiting for the record; returns the rest."""
    starts = [match.start() for mark in (_FINISH, _LAST) if (match := mark.search(chunk))]
    at = chunk.rfind(b"\n\n", 0, min(starts, default=0)) + 2
    if at < 2:
        return chunk
    await response.write(chunk[:at])
    return chunk[at:]


async def _pass_unstreamed(
    request: web.Request, reply: Any, passed: Passed, headers: CIMultiDict[str], keep: Callable[[], None],
    written: Callable[[], Awaitable[None]],
) -> web.StreamResponse:  # fmt: skip
    """Forwards an unstreamed answer as it arrives: some servers send blank lines to keep clients waiting.

    The last part is held until the call is recorded. If the answer breaks off, it breaks off for the client too.
    """
    pending: bytes | None = None

    async def send() -> None:
        if passed.response is None:
            response = web.StreamResponse(status=reply.status, headers=headers)
            await response.prepare(request)
            passed.response = response
        await passed.response.write(pending or b"")

    try:
        async for chunk in reply.chunks:
            passed.see(chunk)
            if pending is not None:
                await send()
            pending = chunk
    except (aiohttp.ClientError, TimeoutError):
        if pending is not None:
            await send()
        raise
    if passed.response is None:
        passed.response = web.Response(status=reply.status, body=pending or b"", headers=headers)
        keep()
        await written()
        return passed.response
    keep()
    await written()
    await send()
    await passed.response.write_eof()
    return passed.response
