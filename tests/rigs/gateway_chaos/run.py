"""Runs clients and faults, checks the store and makes the report of a chaos run."""

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

from assay.traces.store import Store
from rigs.gateway_chaos.checks import Findings, check
from rigs.gateway_chaos.clients import KEY, Clients
from rigs.gateway_chaos.faults import FAULTS, Faults
from rigs.gateway_chaos.plan import script_of
from rigs.gateway_chaos.processes import (
    Database,
    Disk,
    Postgres,
    Process,
    Sqlite,
    gateway_command,
    upstream_command,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a chaos run.

    Args:
        calls: number of calls after which no new conversation starts, except while faults are left.
        store: `sqlite` or `postgresql`.
        concurrent: number of clients.
        each: occurrences of each fault; None: in proportion to `calls`.
        faults: names from `FAULTS`.
        mounts: whether a file system may be mounted for `disk full`. Needs privileges and a mount namespace of its own.
    """

    calls: int = 10_000
    seed: int = 0
    store: str = "sqlite"
    concurrent: int = 40
    each: int | None = None
    faults: tuple[str, ...] = tuple(FAULTS)
    mounts: bool = False


def chaos(settings: Settings, folder: Path, progress: Callable[[int], None] = lambda calls: None) -> dict[str, Any]:
    """Returns the report of a run: counts, faults, and `problems` by kind, which are empty if the store is correct."""
    return asyncio.run(_chaos(settings, folder, progress))


async def _chaos(settings: Settings, folder: Path, progress: Callable[[int], None]) -> dict[str, Any]:
    start = time.monotonic()
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
            lambda: clients.accepted_calls,
            settings.each,
            settings.faults,
        )
        problems, rows_waiting = await _under_faults(clients, faults, settings.concurrent)
        await gateway.stop()
        stats = json.loads(await asyncio.to_thread(_traces, "stats", database.url))
        with Store(database.url) as store:
            log = folder / "server.log"
            findings = await asyncio.to_thread(
                check, store, clients.attempts, clients.managed, gateway, log, settings.seed, stats, faults.times
            )
        for problem in problems:
            findings.add("counts", problem)
        await asyncio.to_thread(_check_closing, findings, database.url)
        report = _report(settings, clients, faults, findings, stats, time.monotonic() - start)
        return report | {"most rows waiting": rows_waiting}
    finally:
        for process in (gateway, server):
            process.end()
        database.end()
        if disk is not None:
            disk.end()


async def _under_faults(clients: Clients, faults: Faults, concurrent: int) -> tuple[list[str], dict[str, int]]:
    """Runs the clients until all faults have occurred; returns the result of `_poll`."""
    ended = asyncio.Event()
    running_faults = asyncio.create_task(faults.run())
    clients.more = lambda: not running_faults.done()  # no fault may happen without traffic
    polling = asyncio.create_task(_poll(clients.url, faults, ended))
    await clients.run(concurrent)
    await running_faults
    ended.set()
    return await polling


async def _poll(url: str, faults: Faults, ended: asyncio.Event) -> tuple[list[str], dict[str, int]]:
    """Checks the gateway's counts twice a second.

    Returns:
        Problems, and the maximum number of rows that waited to be stored, by fault.
    """
    problems: list[str] = []
    rows_waiting: dict[str, int] = {}
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {KEY}"}, timeout=aiohttp.ClientTimeout(total=20)
    ) as session:
        while not ended.is_set():
            await asyncio.sleep(0.5)
            name = faults.current
            try:
                async with session.get(f"{url}/assay/stats") as response:
                    stats = await response.json()
            except (aiohttp.ClientError, OSError, TimeoutError):  # a killed gateway does not answer
                continue
            rows_waiting[name or "none"] = max(rows_waiting.get(name or "none", 0), stats["rows_waiting"])
            if stats["calls"] != stats["stored"] + stats["unrecorded"] + stats["in_flight"] or stats["unrecorded"]:
                counts = {name: stats[name] for name in ("calls", "stored", "unrecorded", "in_flight", "rows_waiting")}
                problems.append(f"/assay/stats returned {counts}")
    return problems, rows_waiting


def _traces(command: str, url: str, *options: str) -> str:
    arguments = [sys.executable, "-m", "assay", "traces", command, "--store", url, "--json", *options]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def _check_closing(findings: Findings, url: str) -> None:
    """Checks that `traces close` ends the rollouts that killed gateways left open."""
    open_before = _open_rollouts(url)
    output = _traces("close", url, "--idle-minutes", "0")
    closed = sum(value for value in json.loads(output).values() if isinstance(value, int))
    open_after = _open_rollouts(url)
    findings.figures["rollouts left open by kills"] = open_before
    if open_after or closed != open_before:
        counts = f"{open_before} rollouts before it, {open_after} after it"
        findings.add("counts", f"`traces close` returned {output.strip()}; open are {counts}")


def _open_rollouts(url: str) -> int:
    with Store(url) as store:
        return sum(rollout.status == "running" for rollout in store.rollouts())


def _report(
    settings: Settings, clients: Clients, faults: Faults, findings: Findings, stats: dict[str, Any], seconds: float
) -> dict[str, Any]:
    attempts = [attempt for attempt in clients.attempts if attempt.accepted]
    return {
        "store": settings.store,
        "seed": settings.seed,
        "seconds": round(seconds, 1),
        "calls": len(attempts),
        "conversations": len({attempt.call.conversation for attempt in attempts}),
        "unfinished": clients.unfinished,
        "stored": stats["transitions"],
        "rollouts": stats["rollouts"],
        "refused": len(clients.attempts) - len(attempts),
        "answers": dict(Counter(script_of(settings.seed, attempt.call).kind for attempt in attempts)),
        "outcomes": dict(Counter(attempt.outcome for attempt in attempts)),
        "faults": dict(faults.happened),
        "disk": "a tmpfs" if faults.disk is not None else "never full: nothing could be mounted",
        **findings.figures,
        "problems": {
            kind: {"count": findings.counts[kind], "first": texts} for kind, texts in findings.problems.items()
        },
    }
