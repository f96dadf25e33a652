"""Background responses of OpenAI's Responses API: calls whose answer the client reads later, by the response's id.

The client polls `GET …/responses/ID`, or reads the rest of a stream there. What it reads is stored in the call.
"""

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from assay.traces.gateway.calls import Call
from assay.traces.gateway.events import ended_response
from assay.traces.gateway.proxy import Passed
from assay.traces.gateway.relay import inner_path
from assay.traces.gateway.replies import Reply
from assay.traces.gateway.request_bodies import parsed_or_none

__all__ = ["BackgroundCalls"]

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
