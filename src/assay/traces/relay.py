"""Requests that are no LM calls a gateway can read: passed to the upstream and back as they are, counted by path, not recorded.

Lists of models, counts of tokens, embeddings, files, batches, answers by their id. They cost the owner of the provider's key money and reach what
is stored at the provider, so that key is lent to callers with the gateway's key alone; others need a key of the upstream of their own.
"""

import re
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from assay.models.transports import is_lm_request
from assay.traces.gemini import is_google
from assay.traces.headers import KEYS
from assay.traces.upstreams import HttpUpstream

__all__ = ["Relay", "inner_path"]

_PLACE = re.compile(r"^/r/[^/]+(?=/)")
_NAMES = 100  # paths that are counted by name
_PART = re.compile(r"v\d+\w*|[A-Za-z_:.-]{1,40}")  # of a path; others are ids


def without_ids(path: str) -> str:
    """A path with `*` for its parts that may be ids."""
    return "/".join(part if not part or _PART.fullmatch(part) else "*" for part in path.split("/"))


def inner_path(request: web.Request) -> str:
    """A request's path without the rollout or token that it names, as it was sent."""
    return _PLACE.sub("", request.rel_url.raw_path)


class Relay:
    """`counts` by method and path, ids left out; `lm_calls` among them, which nothing records."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.lm_calls = 0

    def may_pass(self, upstream: HttpUpstream, path: str, headers: Mapping[str, str], query: str, *, lent: bool) -> bool:
        """Whether a caller has a key to ask with, or needs none."""
        in_address = is_google(path) and any(part.startswith("key=") for part in query.split("&"))
        return lent or not upstream.key or in_address or any(name.lower() in KEYS for name in headers)

    async def pass_on(
        self, request: web.Request, upstream: HttpUpstream, headers: Mapping[str, str], query: str, body: AsyncIterator[bytes] | None, *, lent: bool
    ) -> web.StreamResponse:  # fmt: skip
        """Asks the upstream and returns its answer.

        Args:
            headers: the request's, without what is the gateway's own.
            query: the request's, likewise.
            body: the request's as it comes.
            lent: whether the gateway's key of the upstream is used.
        """
        self._count(request.method, inner_path(request))
        sized = "Content-Length" in request.headers and "Content-Encoding" not in request.headers
        given = {**headers, **({"Content-Length": request.headers["Content-Length"]} if sized else {})}
        async with upstream.relay(request.method, inner_path(request), query, given, body, lent=lent) as reply:
            response = web.StreamResponse(status=reply.status, headers=reply.headers)
            await response.prepare(request)
            async for chunk in reply.chunks:
                await response.write(chunk)
            await response.write_eof()
            return response

    def _count(self, method: str, path: str) -> None:
        self.lm_calls += is_lm_request(method, path)
        name = f"{method} {without_ids(path)}"
        name = name if name in self.counts or len(self.counts) < _NAMES else "other"
        self.counts[name] = self.counts.get(name, 0) + 1
