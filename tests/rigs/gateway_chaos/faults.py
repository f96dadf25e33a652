"""The faults of a chaos run. They occur one after another, in a seeded order, spread over the calls."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rigs.gateway_chaos.processes import Database, Disk, Postgres, Process, Sqlite

FAULTS = {  # fault -> occurrences per 10,000 calls
    "kill gateway": 5,
    "kill server": 4,
    "lock": 4,
    "lock, kill gateway": 3,
    "stop gateway": 2,
    "disk full": 3,
    "lock, stop gateway": 1,
    "restart database": 3,
    "kill database": 3,
    "database away, kill gateway": 2,
}
_POSTGRES = ("restart database", "kill database", "database away, kill gateway")


@dataclass
class Faults:
    """Causes the faults.

    Args:
        disk: None if no file system could be mounted; then `disk full` does not occur.
        calls: planned number of calls of the clients.
        calls_so_far: returns the number of calls so far.
        each: occurrences of each fault; None: as in `FAULTS`, in proportion to `calls`, at least one.
        names: faults that occur.
    """

    gateway: Process
    server: Process
    database: Database
    disk: Disk | None
    seed: int
    calls: int
    calls_so_far: Callable[[], int]
    each: int | None = None
    names: tuple[str, ...] = tuple(FAULTS)
    happened: Counter[str] = field(default_factory=Counter)
    current: str = ""
    times: list[tuple[float, str]] = field(default_factory=list)  # start of each fault

    def plan(self) -> list[str]:
        """Faults in the order in which they occur."""
        plan: list[str] = []
        for name, frequency in FAULTS.items():
            if name not in self.names or (name in _POSTGRES and not isinstance(self.database, Postgres)):
                continue
            if name == "disk full" and self.disk is None:
                continue
            plan += [name] * (max(1, round(frequency * self.calls / 10_000)) if self.each is None else self.each)
        random.Random(self.seed).shuffle(plan)
        return plan

    async def run(self) -> None:
        """Starts each fault when its share of the calls is done; returns after the last one."""
        plan, rng = self.plan(), random.Random(f"faults:{self.seed}")
        for index, name in enumerate(plan):
            while self.calls_so_far() < self.calls * (index + 0.5) / len(plan):
                await asyncio.sleep(0.02)
            self.current = name
            self.times.append((time.time(), name))
            await self._method(name)(rng)
            self.current = ""
            self.happened[name] += 1

    def _method(self, name: str) -> Callable[[random.Random], Awaitable[None]]:
        method: Callable[[random.Random], Awaitable[None]]
        method = getattr(self, "_" + name.replace(",", "").replace(" ", "_"))
        return method

    async def _kill_gateway(self, rng: random.Random) -> None:
        await self.gateway.kill()
        await self.gateway.start()

    async def _stop_gateway(self, rng: random.Random) -> None:
        await self.gateway.stop()
        await self.gateway.start()

    async def _kill_server(self, rng: random.Random) -> None:
        await self.server.kill()
        await asyncio.sleep(rng.uniform(0, 1))
        await self.server.start()

    async def _lock(self, rng: random.Random) -> None:
        async with self.database.locked():
            await asyncio.sleep(rng.uniform(2, 7))

    async def _lock_kill_gateway(self, rng: random.Random) -> None:
        """Kills the gateway while the database is locked, and starts it again before the lock is released."""
        async with self.database.locked():
            await asyncio.sleep(rng.uniform(1.5, 5))
            await self.gateway.kill()
            starting = asyncio.create_task(self.gateway.start())
            await asyncio.sleep(rng.uniform(2, 6))
        await starting

    async def _lock_stop_gateway(self, rng: random.Random) -> None:
        async with self.database.locked():
            await asyncio.sleep(rng.uniform(1, 3))
            stopping = asyncio.create_task(self.gateway.stop())
            await asyncio.sleep(rng.uniform(1, 8))
        await stopping
        await self.gateway.start()

    async def _disk_full(self, rng: random.Random) -> None:
        assert self.disk is not None
        if isinstance(self.database, Sqlite):
            await asyncio.to_thread(self.database.shrink)
        with self.disk.full():
            await asyncio.sleep(rng.uniform(6, 9))
        if isinstance(self.database, Postgres):  # PostgreSQL stops when it cannot write its log
            await self.database.start()

    async def _restart_database(self, rng: random.Random) -> None:
        assert isinstance(self.database, Postgres)
        await self.database.stop()
        await asyncio.sleep(rng.uniform(0, 5))
        await self.database.start()

    async def _kill_database(self, rng: random.Random) -> None:
        assert isinstance(self.database, Postgres)
        await self.database.kill()
        await asyncio.sleep(rng.uniform(0, 3))
        await self.database.start()

    async def _database_away_kill_gateway(self, rng: random.Random) -> None:
        assert isinstance(self.database, Postgres)
        await self.database.stop()
        await asyncio.sleep(rng.uniform(1.5, 5))
        await self.gateway.kill()
        starting = asyncio.create_task(self.gateway.start())
        await asyncio.sleep(rng.uniform(0, 2))
        await self.database.start()
        await starting
