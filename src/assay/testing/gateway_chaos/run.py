"""A chaos run of the gateway from its beginning to its report."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from assay.testing.gateway_chaos.checks import Found, check
from assay.testing.gateway_chaos.clients import KEY, Clients
from assay.testing.gateway_chaos.faults import FAULTS, Faults
from assay.testing.gateway_chaos.plan import script_of
from assay.testing.gateway_chaos.processes import Database, Disk, Postgres, Process, Sqlite, gateway_command, upstream_command
from assay.traces.store import Store

__all__ = ["Settings", "chaos"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`store`: `sqlite` or `postgresql`. `each`: how often each fault comes, by default by the number of calls. `faults`: which ones.
    `mounts`: whether file systems may be mounted, which needs the right to and a namespace that nobody else is in; without, no disk is full."""

    calls: int = 10_000
    seed: int = 0
    store: str = "sqlite"
    concurrent: int = 40
    each: int | None = None
    faults: tuple[str, ...] = tuple(FAULTS)
    mounts: bool = False


def chaos(settings: Settings, folder: Path, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Runs it, and returns a report: figures, `problems` by kind (none: all as it must be), and what happened."""
    return asyncio.run(_chaos(settings, folder, progress))


async def _chaos(settings: Settings, folder: Path, progress: Callable[[int], None]) -> dict[str, Any]:
    clock = time.monotonic()
    (folder / "data").mkdir(parents=True)
    disk = Disk(folder / "data") if settings.mounts else None
    database: Database = Postgres(folder / "data") if settings.store == "postgresql" else Sqlite(folder / "data")
    server = Process(upstream_command(settings.seed, folder / "server.log"), folder, "server")
    gateway = Process([], folder, "gateway")
    try:
        await server.start()
        gateway.command = gateway_command(server.url, database.url)
        await gateway.start()
        clients = Clients(settings.seed, gateway.url, settings.calls, progress)
        faults = Faults(
            gateway,
            server,
            database,
            disk if disk is not None and disk.mounted else None,
            settings.seed,
            settings.calls,
            lambda: clients.done,
            settings.each,
            settings.faults,
        )
        problems, waited = await _under_faults(clients, faults, settings.concurrent)
        await gateway.stop()
        stats = json.loads(await asyncio.to_thread(_traces, "stats", database.url))
        with Store(database.url) as store:
            log = folder / "server.log"
            found = await asyncio.to_thread(
                check, store, clients.attempts, clients.managed, gateway, log, settings.seed, stats, faults.times
            )  # fmt: skip
        for problem in problems:
            found.add("counts", problem)
        await asyncio.to_thread(_check_closing, found, database.url)
        return _report(settings, clients, faults, found, stats, time.monotonic() - clock) | {"most rows waiting": waited}
    finally:
        for process in (gateway, server):
            process.end()
        database.end()
        if disk is not None:
            disk.end()


async def _under_faults(clients: Clients, faults: Faults, concurrent: int) -> tuple[list[str], dict[str, int]]:
    ended = asyncio.Event()
    happening = asyncio.create_task(faults.run())
    clients.more = lambda: not happening.done()
    polling = asyncio.create_task(_poll(clients.url, faults, ended))
    await clients.run(concurrent)
    await happening
    ended.set()
    return await polling


async def _poll(url: str, faults: Faults, ended: asyncio.Event) -> tuple[list[str], dict[str, int]]:
    """Reads the gateway's counts all the time: none may be a wrong sum. Also how many rows waited at most, by fault."""
    problems: list[str] = []
    waited: dict[str, int] = {}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}, timeout=aiohttp.ClientTimeout(total=20)) as session:
        while not ended.is_set():
            await asyncio.sleep(0.5)
            name = faults.current
            try:
                async with session.get(f"{url}/assay/stats") as answer:
                    told = await answer.json()
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            waited[name or "none"] = max(waited.get(name or "none", 0), told["rows_waiting"])
            if told["calls"] != told["stored"] + told["unrecorded"] + told["in_flight"] or told["unrecorded"]:
                short = {name: told[name] for name in ("calls", "stored", "unrecorded", "in_flight", "rows_waiting")}
                problems.append(f"/assay/stats said {short}")
    return problems, waited


def _traces(command: str, url: str, *options: str) -> str:
    asked = [sys.executable, "-m", "assay", "traces", command, "--store", url, "--json", *options]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def _check_closing(found: Found, url: str) -> None:
    """What killed gateways left open is ended by a command."""
    with Store(url) as store:
        left = sum(rollout.status == "running" for rollout in store.rollouts())
    told = _traces("close", url, "--idle-minutes", "0")
    ended = sum(value for value in json.loads(told).values() if isinstance(value, int))
    with Store(url) as store:
        still = sum(rollout.status == "running" for rollout in store.rollouts())
    found.figures["rollouts left open by kills"] = left
    if still or ended != left:
        found.add("counts", f"{left} rollouts were left open, `traces close` said {told.strip()}, {still} are open still")


def _report(
    settings: Settings, clients: Clients, faults: Faults, found: Found, stats: dict[str, Any], seconds: float
) -> dict[str, Any]:  # fmt: skip
    asked = [attempt for attempt in clients.attempts if attempt.asked]
    return {
        "store": settings.store, "seed": settings.seed, "seconds": round(seconds, 1), "calls": len(asked),
        "conversations": len({attempt.call.conversation for attempt in asked}), "unfinished": clients.unfinished,
        "stored": stats["transitions"], "rollouts": stats["rollouts"],
        "refused": len(clients.attempts) - len(asked),
        "answers": dict(Counter(script_of(settings.seed, attempt.call).kind for attempt in asked)),
        "outcomes": dict(Counter(attempt.outcome for attempt in asked)),
        "faults": dict(faults.happened), "disk": "a tmpfs" if faults.disk is not None else "never full: nothing could be mounted",
        **found.figures, "problems": {kind: {"count": found.counts[kind], "first": texts} for kind, texts in found.problems.items()},
    }  # fmt: skip
