"""Answers of a gateway's upstreams, as they are passed on."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["IDLE_S", "JSON", "STREAM", "Reply", "once", "told"]

IDLE_S = 600.0  # models that think say nothing for minutes
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}  # of streams that the gateway writes itself
JSON = {"Content-Type": "application/json"}


@dataclass
class Reply:
    """An answer that has begun: its status, headers to pass on, and its bytes as they come."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def told(status: int, body: Any) -> Reply:
    """An answer that the gateway writes itself."""
    return Reply(status, JSON, once(json.dumps(body).encode()))
