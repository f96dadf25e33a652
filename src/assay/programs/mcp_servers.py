"""MCP servers as sources of tools: processes on standard input and output, or addresses.

A server is started when its tools are first needed, and stopped by `close` or at the end of the process. A call never
hangs: it ends with an error when the server dies or the time limit is over.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TextIO, cast

from assay.errors import ConfigError, MissingExtra
from assay.programs.runners import StandardError
from assay.programs.toolbox import RESULT_CHARACTERS, OfferedTool, cut, plain_schema
from assay.support.scrubbing import error_text

_STARTS = 5  # of one server: it is started again if it has died
_POLL_S = 0.05  # a waiting thread runs Python this often, so that a time limit can stop it
_PAGES = 50  # of a list of tools
_servers: "weakref.WeakSet[McpServer]" = weakref.WeakSet()


class McpError(RuntimeError):
    """An MCP server could not be started, has died, gave no result in time, or reported an error of its tool."""


class McpServer:
    """An MCP server. Thread-safe; copies of a program share it.

    Args:
        command: program and arguments of a server on standard input and output, as strings and paths.
        url: address of a server with streamable HTTP. Exactly one of `command` and `url` is given.
        env: environment variables of the process, in addition to a few harmless ones such as PATH.
        cwd: its working directory.
        timeout_s: limit of a call; the limit of tools within a run (a quarter of `task_timeout`) applies too.
        start_timeout_s: limit of starting the server and listing its tools.
    """

    def __init__(
        self,
        command: Sequence[str | PurePath] = (),
        *,
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 30.0,
    ) -> None:
        listed = isinstance(command, list | tuple) and all(isinstance(part, str | PurePath) for part in command)
        if not listed or not isinstance(url, str) or bool(command) == bool(url):
            raise ConfigError(
                f"an MCP server needs a command (a list such as ['python', 'server.py']) or a url; "
                f"got command={command!r}, url={url!r}"
            )
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must begin with http:// or https://")
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
                raise ConfigError(f"{name}={seconds!r} must be a finite number of seconds > 0")
        self.command, self.url, self.env, self.cwd = [str(part) for part in command], url, dict(env or {}), cwd
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._starts = 0
        self._known: list[OfferedTool] | None = None
        _servers.add(self)

    def __deepcopy__(self, memo: object) -> "McpServer":
        return self

    def __reduce__(self) -> Any:
        keywords = {name: getattr(self, name) for name in ("url", "env", "cwd", "timeout_s", "start_timeout_s")}
        return _made, (self.command, keywords)

    def __enter__(self) -> "McpServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tools(self) -> list[OfferedTool]:
        """The server's tools. Starts the server if it does not run.

        If it has died and cannot be started again, these are the tools that it had: their calls are errors.

        Raises:
            McpError: it cannot be started, and never was.
            MissingExtra: the package `mcp` is not installed.
        """
        try:
            self._known = [
                OfferedTool(
                    name=tool.name,
                    description=tool.description or "",
                    parameters=plain_schema(tool.input_schema),
                    run=functools.partial(self.call, tool.name),
                    concurrent=True,
                    assay_side_effects=not getattr(tool.annotations, "read_only_hint", False),
                )
                for tool in self._open().tools
            ]
        except McpError:
            if self._known is None:
                raise
        return list(self._known)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Text of a tool's result.

        Raises:
            McpError: the tool reported an error, the server has died, or there was no result in time.
        """
        return self._open().call(name, dict(arguments), self.timeout_s)

    def close(self) -> None:
        """Stops the server. A later call starts it again."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> "_Connection":
        with self._lock:
            if self._connection is not None and not self._connection.dead:
                return self._connection
            if self._starts >= _STARTS:
                raise McpError(f"the MCP server {self} has died {_STARTS} times and is not started again")
            self._starts += 1
            self._connection = connection = _Connection(self)
            try:
                connection.wait_until_ready()
            except BaseException:
                self._connection = None
                raise
            return connection

    def __str__(self) -> str:
        return repr(self.url or " ".join(self.command))


def _made(command: Sequence[str], keywords: dict[str, Any]) -> McpServer:
    return McpServer(command, **keywords)


class _Connection:
    """One run of a server, in an event loop of its own thread."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[Any] = []
        self.ready, self.over = threading.Event(), threading.Event()
        self.died = False  # reported to a caller, perhaps before its thread has ended
        self.error: BaseException | None = None
        self.client: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._serving: asyncio.Task[None] | None = None
        self._errors = StandardError()  # also read after the server has ended
        self.thread = threading.Thread(target=self._work, name="assay-mcp", daemon=True)
        self.thread.start()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + self.server.start_timeout_s
        while not self.ready.wait(_POLL_S) and not self.over.is_set():
            if time.monotonic() > end:
                self.close()
                raise McpError(
                    f"the MCP server {self.server} did not start within {self.server.start_timeout_s:g} s "
                    f"(does it speak MCP? start_timeout_s is the limit){self._errors_end()}"
                )
        if not self.ready.is_set():
            if isinstance(self.error, MissingExtra):
                raise self.error
            raise McpError(f"the MCP server {self.server} cannot be started: {_reason(self.error)}{self._errors_end()}")

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        assert self.loop is not None
        if self.over.is_set():
            raise self._death()
        future = asyncio.run_coroutine_threadsafe(self._call(name, arguments, timeout_s), self.loop)
        end = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return _result_text(name, future.result(_POLL_S))
                except TimeoutError:
                    # the server's end is noticed here, whatever the session does with calls in flight
                    if self.over.is_set() and not future.done():
                        raise self._death() from None
                    if time.monotonic() > end + 1:
                        raise McpError(f"the MCP tool {name!r} gave no result after {timeout_s:g} s") from None
        finally:
            future.cancel()

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.client.call_tool(name, arguments)
        except TimeoutError:
            raise McpError(f"the MCP tool {name!r} gave no result after {timeout_s:g} s") from None
        except McpError:
            raise
        except Exception as error:
            if self._ended is not None and _is_closed(error):
                self._ended.set()  # the connection is gone: the next call starts the server again
                raise self._death() from error
            raise McpError(f"the MCP tool {name!r} failed: {_reason(error)}") from error

    def close(self) -> None:
        loop, ended = self.loop, self._ended
        if loop is not None and ended is not None and not self.over.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                if self.ready.is_set() or self._serving is None:
                    loop.call_soon_threadsafe(ended.set)
                else:  # it waits for an answer that may never come
                    loop.call_soon_threadsafe(self._serving.cancel)
        self.thread.join(5)

    @property
    def dead(self) -> bool:
        return self.died or self.over.is_set()

    def _death(self) -> McpError:
        self.died = True
        return McpError(f"the MCP server {self.server} has died{self._errors_end()}")

    def _errors_end(self) -> str:
        """The end of what the process wrote to standard error."""
        text = self._errors.tail()
        return f"; it wrote: {text[-300:]}" if text else ""

    def _work(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._errors.file.close()
            self.over.set()

    async def _serve(self) -> None:
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._serving = asyncio.current_task()
        try:
            from mcp.client import Client
        except ImportError as error:
            raise MissingExtra("mcp", "mcp") from error
        async with Client(self._transport()) as client:
            page = await client.list_tools()
            self.tools = list(page.tools)
            for _ in range(_PAGES):
                if not page.next_cursor:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
                self.tools += page.tools
            self.client = client
            self.ready.set()
            await self._ended.wait()

    def _transport(self) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        if server.url:
            return streamable_http_client(server.url)
        parameters = StdioServerParameters(
            command=server.command[0], args=server.command[1:], env=server.env or None, cwd=server.cwd
        )
        return stdio_client(parameters, errlog=cast(TextIO, self._errors.file))  # only its descriptor is used


def _result_text(name: str, result: Any) -> str:
    """Text of a tool's result. Other contents (images, audio) are named by their type."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    text = "\n".join(parts)
    if result.is_error:
        raise McpError(cut(text, 500) or f"the MCP tool {name!r} reported an error")
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return cut(text, RESULT_CHARACTERS)


def _is_closed(error: BaseException) -> bool:
    """Whether an exception of a call means that the connection is gone."""
    import anyio
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.error.code == CONNECTION_CLOSED
    return isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | ConnectionError)


def _reason(error: BaseException | None) -> str:
    """Class and message of an exception; of a group, those of its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cut(error_text(error), 500) if error is not None else "it ended"


@atexit.register
def _close_all() -> None:
    for server in list(_servers):
        server.close()
