"""What goes by in a gateway: an answer passed on as it comes and read once it is over, and a request's body as it may be stored."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import web

from assay.errors import ConfigError
from assay.traces.dialects import read_events

__all__ = ["Passed", "is_constrained", "json_body", "pass_on", "storable"]

_DEEPEST = 200  # of a request: what trainers and databases read
_KEPT = 64 << 20  # bytes of one answer that are kept
_LAST = re.compile(rb"\n(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed)))")  # a stream's last event
_FINISH = re.compile(rb'"finish_reason": ?"')  # in a chat's chunk: what comes after it is the usage and the end
_SECRETS = ("api_key", "api_base", "base_url", "headers", "extra_headers")  # some clients put these into a body


def storable(body: dict[str, Any]) -> dict[str, Any]:
    """A request's body without what names a server or a key."""
    kept = {key: value for key, value in body.items() if key not in _SECRETS}
    if isinstance(extra := kept.get("extra_body"), dict):
        kept["extra_body"] = {key: value for key, value in extra.items() if key not in _SECRETS}
    return kept


class Passed:
    """What went by of one answer."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = self.status = 0
        self.streamed = self.kept = self._ending = False
        self._tail = b"\n"
        self.error: str | None = None
        self.secrets: list[str] = []  # what may be said back in an error
        self.response: web.StreamResponse | None = None

    def see(self, chunk: bytes) -> bool:
        """Notes a part of the answer; whether a stream's last event has come."""
        self.size += len(chunk)
        if self.size <= _KEPT:
            self.parts.append(chunk)
        found = self._tail + chunk
        self._ending = self._ending or _LAST.search(found) is not None
        self._tail = found[-40:]
        return self._ending and found.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode("utf-8", "replace")

    def read(self, dialect: str) -> tuple[dict[str, Any] | None, bool]:
        """The answer as one body, and whether it came to its end."""
        if self.status >= 400 or not self.parts:
            return None, self.status >= 400
        if not self.streamed:
            found = _json(b"".join(self.parts))
            return (found, True) if isinstance(found, dict) else (None, False)
        events = []
        for line in b"".join(self.parts).replace(b"\r\n", b"\n").split(b"\n"):
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                with suppress(ValueError):
                    event = _json(data)
                    events += [event] if isinstance(event, dict) else []
        broken = next((event["error"] for event in events if event.get("error")), None)
        if broken is not None:
            self.error = self.error or f"the upstream: {json.dumps(broken)[:500]}"
        body, complete = read_events(dialect, events)
        return body, complete and self.size <= _KEPT


async def pass_on(
    request: web.Request, reply: Any, passed: Passed, rollout_id: str, keep: Callable[[], None], *, choices: int = 1
) -> web.StreamResponse:  # fmt: skip
    """Passes an answer on; a stream is kept before its last event goes out, as the client's next call may come at once.

    Some clients leave at the reason why a chat ended, one event before the last: of an answer with one choice it waits for that.
    """
    passed.status = reply.status
    headers = {**reply.headers, "x-assay-rollout": rollout_id}
    passed.streamed = "event-stream" in {k.lower(): v for k, v in headers.items()}.get("content-type", "")
    if not passed.streamed:
        chunks = []
        async for chunk in reply.chunks:
            passed.see(chunk)
            chunks.append(chunk)
        whole = web.Response(status=reply.status, body=b"".join(chunks), headers=headers)
        passed.response = whole
        return whole
    response = passed.response = web.StreamResponse(status=reply.status, headers={**headers, "Cache-Control": "no-cache"})
    await response.prepare(request)
    held = b""
    async for chunk in reply.chunks:
        ended = passed.see(chunk)
        if ended:
            keep()
        if not ended and (held or (choices == 1 and _FINISH.search(chunk))):
            held += chunk
            continue
        await response.write(held + chunk)
        held = b""
    if held:
        keep()
        await response.write(held)
    await response.write_eof()
    return response


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # lone surrogates, NaN: as Python reads them
        return json.loads(raw.decode("utf-8", "surrogatepass"))


def json_body(raw: bytes) -> dict[str, Any]:
    try:
        found = _json(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("the body must be a JSON object")
    if (raw.count(b"[") + raw.count(b"{")) > _DEEPEST and _depth(found) > _DEEPEST:
        raise ConfigError(f"the body is nested more than {_DEEPEST} deep")
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item) if isinstance(part, dict | list)]
    return depth


def is_constrained(body: dict[str, Any]) -> bool:
    asked = [body.get("response_format"), body.get("output_format")]
    asked += [told.get("format") for name in ("text", "output_config") if isinstance(told := body.get(name), dict)]
    return "grammar" in body or any(isinstance(found, dict) and found.get("type") not in (None, "text") for found in asked)
