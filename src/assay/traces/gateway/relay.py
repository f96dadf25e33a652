"""Forwards requests that are not LM calls of a known dialect. They are counted by path, not recorded.

Examples: lists of models, token counts, embeddings, files, batches, responses by id. They can cost money and read data
stored at the provider, so the gateway's provider key is used only for callers with the gateway's key; others need their
own key of the upstream.
"""

import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict

from assay.errors import ConfigError
from assay.models.unrecorded import is_lm_request
from assay.traces.gateway.calls import Call
from assay.traces.gateway.events import ended_response
from assay.traces.gateway.proxy import Passed
from assay.traces.gateway.replies import KEYS, Reply
from assay.traces.gateway.requests import parsed_or_none
from assay.traces.gateway.upstreams import EmbeddedUpstream, HttpUpstream
from assay.traces.messages.dialects import DIALECTS
from assay.traces.messages.gemini import is_google

_LOG = logging.getLogger("assay.gateway")
_PLACE = re.compile(r"^/r/[^/]+(?=/)")
_NAMES = 100  # maximum number of paths that are counted separately
_PART = re.compile(r"v\d+\w*|[A-Za-z_:.-]{1,40}")  # part of a path; other parts are ids


def without_ids(path: str) -> str:
    """A path whose parts that may be ids are replaced by `*`."""
    return "/".join(part if not part or _PART.fullmatch(part) else "*" for part in path.split("/"))


def inner_path(request: web.Request) -> str:
    """A request's path, still encoded, without the `/r/ROLLOUT` prefix."""
    return _PLACE.sub("", request.rel_url.raw_path)


def named_path(request: web.Request) -> str:
    """The inner path of a call that has its model or deployment in the path.

    The provider's key is used for it, so it must not lead to another path.

    Raises:
        ConfigError: a name in it would change or end the path.
    """
    path = inner_path(request)
    plain = unquote(path)
    if {".", ".."} & set(re.split(r"[/\\]", plain)) or re.search(r"[?#\x00-\x1f\x7f]", plain):
        raise ConfigError(
            f"{path[:200]!r} is not the path of a call: a name in it contains '..', '?', '#' or a control character"
        )
    return path


class Relay:
    """Forwards and counts requests. `counts`: by method and path without ids. `lm_calls`: the LM calls among them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.lm_calls = 0

    def may_pass(
        self, upstream: HttpUpstream, path: str, headers: Mapping[str, str], query: str, *, lent: bool, token: bool
    ) -> bool:
        """Whether a request that is not an LM call may be forwarded.

        It needs the gateway's key (`lent`) or a key of the upstream; no key if the upstream has none. An embedded model
        requires the gateway's key, as other paths of its server change the adapters of all rollouts.

        Args:
            token: whether the caller has a rollout's token, which allows only LM calls.
        """
        if isinstance(upstream, EmbeddedUpstream):
            return lent
        in_address = is_google(path) and any(part.startswith("key=") for part in query.split("&"))
        has_key = in_address or any(name.lower() in KEYS for name in headers)
        return lent or has_key or not (upstream.key or token)

    async def pass_on(
        self,
        request: web.Request,
        upstream: HttpUpstream,
        headers: Mapping[str, str],
        query: str,
        body: AsyncIterator[bytes] | bytes | None,
        *,
        lent: bool,
        see: Callable[[Reply, bytes], None] | None = None,
    ) -> web.StreamResponse:
        """Forwards a request and its answer.

        Args:
            headers: the request's headers without keys of the gateway.
            query: the request's query without keys of the gateway.
            body: the request's body, as a whole or in parts.
            lent: whether the gateway's key of the upstream is used.
            see: called with the whole answer before its last part is forwarded.
        """
        self._count(request.method, inner_path(request), body)
        sent_headers = CIMultiDict(headers)
        if "Content-Encoding" in request.headers:  # the body is decompressed: its length differs
            sent_headers.popall("Content-Length", None)
        async with upstream.relay(request.method, inner_path(request), query, sent_headers, body, lent=lent) as reply:
            response = web.StreamResponse(status=reply.status, headers=reply.headers)
            await response.prepare(request)
            parts: list[bytes] = []  # the last one is sent once the answer is stored
            async for chunk in reply.chunks:
                if see is None or parts:
                    await response.write(chunk if see is None else parts[-1])
                if see is not None:
                    parts.append(chunk)
            if see is not None and parts:
                see(reply, b"".join(parts))
                await response.write(parts[-1])
            await response.write_eof()
            return response

    def _count(self, method: str, path: str, body: Any) -> None:
        name = f"{method} {without_ids(path)}"
        if is_lm_request(method, path, body if isinstance(body, bytes) else None):
            self.lm_calls += 1
            if name not in self.counts:
                _LOG.warning(
                    "%s is passed on, but its format is not recorded: calls there become no rollouts. "
                    "Recorded are calls at addresses that end in %s",
                    name,
                    ", ".join("/" + path.removeprefix("/v1/").lstrip("/") for path in DIALECTS.values()),
                )
        name = name if name in self.counts or len(self.counts) < _NAMES else "other"
        self.counts[name] = self.counts.get(name, 0) + 1


# -- Background responses of OpenAI's Responses API: calls whose answer the client reads later, by the response's id.
#
# The client polls `GET …/responses/ID`, or reads the rest of a stream there. What it reads is stored in the call.


_PATH = re.compile(r"/responses/([^/]+)(/cancel)?/?$")
_MOST = 1000  # latest background calls whose responses may be read


class BackgroundCalls:
    """The latest calls with a background response."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}  # by the id of the response

    def add(self, call: Call) -> None:
        """Waits for the response of a recorded call, if it goes on."""
        if response_id := call.background_id:
            self._calls[response_id] = call
            if len(self._calls) > _MOST:
                del self._calls[next(iter(self._calls))]

    def call_of(self, request: web.Request) -> Call | None:
        """The call whose response a request reads or cancels; None for any other request."""
        match = _PATH.search(inner_path(request))
        if match is None or request.method != ("POST" if match[2] else "GET"):
            return None
        return self._calls.get(match[1])

    def see(self, request: web.Request, reply: Reply, data: bytes) -> None:
        """Stores the response that was read, if it has ended."""
        call = self.call_of(request)
        if call is None or reply.status >= 400:
            return
        body = _response_in(reply, data)
        if body is not None and call.background_id == body.get("id"):
            call.complete(body)


def _response_in(reply: Reply, data: bytes) -> Mapping[str, Any] | None:
    """The response in an answer: its body, or that of a stream's last event."""
    if "event-stream" in reply.headers.get("content-type", ""):
        passed = Passed()
        passed.parts = [data]
        return ended_response(passed.events())
    body = parsed_or_none(data)
    return body if isinstance(body, dict) and body.get("object") == "response" else None
