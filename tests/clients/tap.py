"""A TCP proxy that forwards bytes unchanged and records the HTTP exchanges between client and server."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Exchange", "Tap", "tapped"]

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Exchange:
    """One request and its response: header names in lower case, bodies without the chunks of their transfer."""

    at: float  # when the request began, by `time.monotonic`
    method: str
    path: str
    headers: Headers
    body: bytes
    status: int
    response_headers: Headers
    response: bytes


@dataclass
class _Connection:
    requests: bytearray = field(default_factory=bytearray)
    responses: bytearray = field(default_factory=bytearray)
    times: list[tuple[int, float]] = field(
        default_factory=list
    )  # where in `requests` each piece began, and when it came


class Tap:
    """Listens on `url` and forwards to the server that it points to."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self._connections: list[_Connection] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()

    def point(self, target: str) -> None:
        """Forwards to another server from now on; open connections are closed, as they lead to the old one."""
        self._run(self._point(target))

    def exchanges(self, since: float = 0.0) -> list[Exchange]:
        """What began since then, in the order of its beginning."""
        exchanges = [exchange for connection in list(self._connections) for exchange in _exchanges(connection)]
        return sorted((exchange for exchange in exchanges if exchange.at >= since), key=lambda exchange: exchange.at)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _point(self, target: str) -> None:
        self.target = target
        for writer in list(self._open):
            writer.close()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        self._connections.append(connection)
        host, _, port = self.target.removeprefix("http://").rpartition(":")
        self._open.add(writer)
        with suppress(OSError):
            behind, forward = await asyncio.open_connection(host, int(port))
            self._open.add(forward)
            both = [
                asyncio.ensure_future(_pump(reader, forward, connection.requests, connection.times)),
                asyncio.ensure_future(_pump(behind, writer, connection.responses, [])),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            forward.close()
            self._open.discard(forward)
        writer.close()
        self._open.discard(writer)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: bytearray, times: list[tuple[int, float]]
) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            times.append((len(received), time.monotonic()))
            received += piece
            writer.write(piece)
            await writer.drain()


@contextmanager
def tapped(target: str) -> Iterator[Tap]:
    """A tap that runs in a thread."""
    tap = Tap(target)
    thread = threading.Thread(target=tap._loop.run_forever, daemon=True)
    thread.start()
    server = tap._run(tap._listen())
    try:
        yield tap
    finally:
        tap._loop.call_soon_threadsafe(server.close)
        tap.point(target)
        tap._loop.call_soon_threadsafe(tap._loop.stop)
        thread.join(120)


def _exchanges(connection: _Connection) -> Iterator[Exchange]:
    answers = (
        message
        for message in _messages(bytes(connection.responses), to_end=True)
        if not message[1].startswith("HTTP/1.1 1")
    )
    for (start, first, headers, body), (_, status, response_headers, response) in zip(
        _messages(bytes(connection.requests)), answers, strict=False
    ):
        at = next(moment for offset, moment in reversed(connection.times) if offset <= start)
        method, path, _ = first.split(" ", 2)
        yield Exchange(at, method, path, headers, body, int(status.split(" ")[1]), response_headers, response)


def _messages(data: bytes, to_end: bool = False) -> Iterator[tuple[int, str, Headers, bytes]]:
    """Consecutive HTTP messages: offset, first line, headers, body. A body without a length extends `to_end`."""
    at = 0
    while (end := data.find(b"\r\n\r\n", at)) >= 0:
        first, *lines = data[at:end].decode("latin-1").split("\r\n")
        headers = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
        body, after = _body(data, end + 4, dict(headers), to_end and first.split(" ")[1] not in ("204", "304"))
        yield at, first, headers, body
        at = after


def _body(data: bytes, at: int, headers: dict[str, str], to_end: bool) -> tuple[bytes, int]:
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while (end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:end].split(b";")[0], 16)
            parts.append(data[end + 2 : end + 2 + size])
            at = end + 2 + size + 2
            if size == 0:
                break
        return b"".join(parts), at
    if "content-length" in headers:
        end = at + int(headers["content-length"])
        return data[at:end], end
    return (data[at:], len(data)) if to_end else (b"", at)
