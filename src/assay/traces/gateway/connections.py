"""Limits on a gateway's connections: their number and how long each may be idle.

At the limit, new connections wait in the kernel's queue: they use no descriptor, and callers that do not retry do not
fail. (An answer with status 503 would have to be written before the request is read, and often arrives as a reset.)
Idle connections are closed to make room for waiting ones. Reads only the bodies of requests.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from assay.errors import ConfigError

# Descriptors for other uses: the store (three per SQLite connection), the spill file, the model's library, logs.
_RESERVED = 128
_EACH = 3  # descriptors of a call: caller, upstream, and with an embedded model the other end of that
_MOST = 2000
_RATE = 64 << 10  # bytes of a body per additional second of its time limit
_AT_ONCE = 64  # connections accepted per iteration of the event loop
_FULL_S = 0.05  # between checks while the limit is reached
_GRACE_S = 1.0  # minimum age of a connection that is closed to make room
_LINGER_S = 10.0  # time to read the rest of a refused request, so that its caller receives the answer
# A peer that vanished is detected after 60 + 4 * 15 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class SlowRequest(Exception):
    """A request whose body did not arrive in time."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of a server, against slow and idle callers.

    Args:
        most: maximum number of open connections; None: from the limit on descriptors, see `most_connections`.
        idle_s: maximum time without a request, or with incomplete headers.
        receive_s: time limit for a request's body, plus one second for each 64 KiB of it.
        stalled_s: maximum time in which a caller reads nothing of its answer.
    Raises:
        ConfigError: a limit is not positive, or the descriptors do not suffice for `most`.
    """

    most: int | None = None
    idle_s: float = 75.0
    receive_s: float = 60.0
    stalled_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("idle_s", "receive_s", "stalled_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}={getattr(self, name)!r}` must be above 0")
        if self.most is not None and self.most < 1:
            raise ConfigError(f"most={self.most!r} must be at least 1 connection (--max-connections)")
        if self.most is not None and self.most > max(16, (descriptors := _descriptors()) // 2):
            raise ConfigError(
                f"most={self.most} connections (--max-connections) need two descriptors each, and this process may "
                f"open {descriptors}: raise the limit (ulimit -n {self.most * _EACH + _RESERVED}) or allow fewer "
                "connections"
            )

    @property
    def connections(self) -> int:
        """Maximum number of open connections."""
        return most_connections() if self.most is None else self.most


def most_connections() -> int:
    """Maximum number of connections under the soft limit on descriptors (RLIMIT_NOFILE), between 8 and 2000.

    Descriptors for the store and for upstreams are subtracted.
    """
    return max(8, min(_MOST, (_descriptors() - _RESERVED) // _EACH))


def _descriptors() -> int:
    try:
        import resource
    except ImportError:
        return 1 << 30  # Windows has no such limit on sockets
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def keep_alive(sock: socket.socket) -> None:
    """Enables TCP keep-alive: a connection to a vanished peer ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connections:
    """Reads bodies of requests within their time limit, and tracks which connections are being answered.

    Args:
        receive_s: as in `ConnectionLimits`.
        most_bytes: maximum size of a body.
    """

    def __init__(self, receive_s: float, most_bytes: int) -> None:
        self.receive_s, self.most_bytes = receive_s, most_bytes
        self.answered: set[Any] = set()  # aiohttp's protocols whose request is complete and is being answered

    async def body(self, request: web.Request) -> bytes:
        """A request's body.

        Raises:
            SlowRequest: it did not arrive in time.
            HTTPRequestEntityTooLarge: it is larger than `most_bytes`.
        """
        parts, size = [], 0
        async for part in self.parts(request):
            size += len(part)
            if size > self.most_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self.most_bytes, actual_size=size)
            parts.append(part)
        return b"".join(parts)

    async def parts(self, request: web.Request) -> AsyncIterator[bytes]:
        """A request's body in parts, as they arrive.

        Raises:
            SlowRequest: it did not arrive in time.
        """
        began, size = asyncio.get_running_loop().time(), 0
        while not request.content.at_eof():
            complete = request.content.is_eof()  # most are; a timer would cost more than reading them
            try:
                async with asyncio.timeout_at(None if complete else began + self.receive_s + size / _RATE):
                    part = await request.content.readany()
            except TimeoutError:
                raise SlowRequest(f"the body did not come within {self.receive_s:g} s: {size} bytes did") from None
            size += len(part)
            yield part
        self.answered.add(request.protocol)

    def mark_answered(self, request: web.Request) -> None:
        """Marks a request as answered."""
        self.answered.discard(request.protocol)


class _Connection:
    """An accepted connection.

    `since`: time of its last answer. `stuck`: number of unsent bytes, and the time since which none was sent.
    """

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self.transport, self.since, self.stuck = transport, now, (0, now)


class Listener:
    """Serves an application within limits.

    Args:
        answered: connections whose requests are being answered; they are not closed to make room.
        shutdown_s: time for open requests to finish on `close`.
    """

    def __init__(
        self, app: web.Application, limits: ConnectionLimits, answered: set[Any], *, shutdown_s: float = 5.0
    ) -> None:
        self.limits, self._most, self._answered = limits, limits.connections, answered
        self.runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=shutdown_s,
            handler_cancellation=True,
            keepalive_timeout=limits.idle_s,
            lingering_time=min(_LINGER_S, limits.receive_s),
        )
        self._sockets: list[socket.socket] = []
        self._open: dict[Any, _Connection] = {}  # by aiohttp's protocol
        self._beginning: set[asyncio.Task[None]] = set()
        self._full = asyncio.Event()
        self._checking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Starts to listen and returns the port; with `port=0` a free one is chosen.

        Raises:
            OSError: the address cannot be bound.
        """
        await self.runner.setup()
        try:
            addresses = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, address in dict.fromkeys((info[0], info[4]) for info in addresses):
                port = port or (self._sockets[0].getsockname()[1] if self._sockets else 0)
                sock = socket.create_server((address[0], port), family=family, backlog=1024)
                sock.setblocking(False)
                self._sockets.append(sock)
        except OSError:
            await self.close()
            raise
        self._accept_more(True)
        self._checking = asyncio.create_task(self._check_forever())
        return int(self._sockets[0].getsockname()[1])

    def abort(self) -> None:
        """Ends all connections at once."""
        for connection in self._open.values():
            connection.transport.abort()

    async def close(self) -> None:
        """Ends all connections; those being answered after `shutdown_s` at the latest."""
        if self._checking is not None:
            self._checking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._checking
        self._accept_more(False)
        for sock in self._sockets:
            sock.close()
        await self.runner.cleanup()

    # -- accepting

    def _accept_more(self, more: bool) -> None:
        loop = asyncio.get_running_loop()
        if more:
            self._full.clear()
        else:
            self._full.set()
        for sock in self._sockets:
            if more:
                loop.add_reader(sock, self._accept, sock)
            else:
                loop.remove_reader(sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_room():
                self._accept_more(False)
                return
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptors are left
                self._accept_more(False)
                return
            task = asyncio.create_task(self._begin(sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock.setblocking(False)
            keep_alive(sock)
            transport, handler = await loop.connect_accepted_socket(self._make, sock)
        except (OSError, RuntimeError):  # the peer closed it, or the gateway is closing
            sock.close()
            return
        self._open[handler] = _Connection(transport, loop.time())

    def _make(self) -> Any:
        if self.runner.server is None:
            raise RuntimeError("the gateway has ended")
        return self.runner.server()

    def _has_room(self) -> bool:
        server = self.runner.server
        return server is not None and len(self._beginning) + len(server.connections) < self._most

    # -- ending

    async def _check_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(5.0, self.limits.idle_s / 4, self.limits.stalled_s / 4)):
                    await self._full.wait()
            if self._full.is_set():
                await asyncio.sleep(_FULL_S)
            now = asyncio.get_running_loop().time()
            self._abort_stalled(now)
            if self._full.is_set():
                if not self._has_room():
                    self._make_room(now)
                self._accept_more(self._has_room())

    def _abort_stalled(self, now: float) -> None:
        """Aborts connections whose callers do not read their answers. Closing would wait for unsent bytes."""
        current = set(self.runner.server.connections) if self.runner.server is not None else set()
        self._open = {handler: connection for handler, connection in self._open.items() if handler in current}
        for handler, connection in self._open.items():
            if handler in self._answered:
                connection.since = now
            size = connection.transport.get_write_buffer_size()
            if not size or size != connection.stuck[0]:
                connection.stuck = (size, now)
            limit = self.limits.idle_s if connection.transport.is_closing() else self.limits.stalled_s
            if size and now - connection.stuck[1] >= limit:
                connection.transport.abort()

    def _make_room(self, now: float) -> None:
        """Closes idle connections, the longest idle first, at most an eighth of the limit."""
        idle = [
            connection
            for handler, connection in self._open.items()
            if handler not in self._answered
            and now - connection.since >= _GRACE_S
            and not connection.transport.get_write_buffer_size()
        ]
        for connection in sorted(idle, key=lambda connection: connection.since)[: max(1, self._most // 8)]:
            connection.transport.close()
