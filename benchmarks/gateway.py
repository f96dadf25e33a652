"""What the gateway costs: the same calls to one scripted server, directly and through `assay serve`, interleaved in one run; many
streaming clients at once; and a SIGKILL in the middle of a load, counted against the server's own log.

    python benchmarks/gateway.py [--calls 300] [--streams 100] [--clients 200] [--load 10000]
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from assay.traces import Store

KEY = "benchmark-key"
OWNER = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "word " * 200}], "stream": False}


def started(command: list[str], **options: Any) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def servers(folder: Path, *, chunks: int = 8, delay_ms: float = 0) -> tuple[list[subprocess.Popen[str]], str, str]:
    command = [sys.executable, "-m", "assay.testing.upstream", "--log", str(folder / "upstream.log"), "--chunks", str(chunks)]
    upstream, behind = started([*command, "--delay-ms", str(delay_ms)])
    command = [sys.executable, "-m", "assay", "serve", "--model", "echo", "--upstream", behind, "--key", KEY, "--port", "0", "--json"]
    gateway, url = started([*command, "--store", str(folder / "a.db")])
    return [upstream, gateway], behind, url


async def timed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first byte of the answer's text, and to its end."""
    clock, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        async for chunk in answer.content.iter_any():
            if (not first and b'"content": "e' in chunk) or not body["stream"]:
                first = first or time.perf_counter() - clock
    return first, time.perf_counter() - clock


async def overhead(direct: str, through: str, calls: int) -> dict[str, float]:
    added: dict[str, float] = {}
    async with aiohttp.ClientSession(headers=OWNER) as session:
        for stream in (False, True):
            seen: dict[str, list[tuple[float, float]]] = {direct: [], through: []}
            for number in range(calls + 20):
                for url in (direct, through) if number % 2 else (through, direct):
                    found = await timed(session, url, {**BODY, "stream": stream})
                    if number >= 20:
                        seen[url].append(found)
            for at, name in ((0, "first_token"), (1, "whole")):
                medians = {url: 1000 * statistics.median(pair[at] for pair in pairs) for url, pairs in seen.items()}
                kind = "streamed" if stream else "call"
                if stream or at:
                    added[f"{kind}_{name}_ms"] = round(medians[through] - medians[direct], 2)
                    added[f"{kind}_{name}_direct_ms"] = round(medians[direct], 2)
    return added


def conversation(turns: int, name: str = "") -> list[dict[str, Any]]:
    """A conversation of an agent with one tool; no two of one name are alike."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} " + "word " * 200}]
    for turn in range(turns):
        call = {"id": f"c{name}_{turn}", "type": "function", "function": {"name": "calculator", "arguments": json.dumps({"expression": f"6*{turn}"})}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"c{name}_{turn}", "content": "result " * 50}]
    return messages


async def ratios(direct: str, through: str, *, streams: int, rounds: int) -> dict[str, float]:
    """Through the gateway over direct: of a call whose conversation has 1 and 60 turns, and of the first token where many stream at once."""
    found: dict[str, float] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=OWNER) as session:
        for turns in (1, 60):
            seen: dict[str, list[float]] = {direct: [], through: []}
            for number in range(10 * rounds):
                for url, times in seen.items():
                    times.append((await timed(session, url, {"messages": conversation(turns, str(number)), "stream": False}))[1])
            found[f"turns_{turns}"] = round(statistics.median(seen[through]) / statistics.median(seen[direct]), 2)
            found[f"turns_{turns}_added_ms"] = round(1000 * (statistics.median(seen[through]) - statistics.median(seen[direct])), 2)
        first: dict[str, list[float]] = {direct: [], through: []}
        for _ in range(rounds):
            for url, times in first.items():
                calls = [timed(session, url, {**BODY, "stream": True}) for _ in range(streams)]
                times.append(statistics.median(pair[0] for pair in await asyncio.gather(*calls)))
        found[f"first_token_of_{streams}"] = round(statistics.median(first[through]) / statistics.median(first[direct]), 2)
        found[f"first_token_of_{streams}_ms"] = round(1000 * statistics.median(first[through]), 1)
        found[f"first_token_of_{streams}_direct_ms"] = round(1000 * statistics.median(first[direct]), 1)
    return found


async def many(url: str, clients: int) -> dict[str, Any]:
    async def one(number: int) -> bool:
        said = f"client {number} says this"
        text = ""
        async with session.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": said}], "stream": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text += (json.loads(line[6:])["choices"][0]["delta"].get("content")) or ""
        return text == f"echo: {said}"

    clock = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=OWNER) as session:
        right = await asyncio.gather(*(one(number) for number in range(clients)))
        seconds = time.perf_counter() - clock
        async with session.get(f"{url}/assay/stats") as answer:
            stats = await answer.json()
    return {
        "clients": clients,
        "whole_answers": sum(right),
        "seconds": round(seconds, 2),
        "stored": stats["stored"],
        "unrecorded": stats["unrecorded"],
    }


async def loaded(url: str, calls: int, gateway: subprocess.Popen[str]) -> float:
    """Calls until the gateway is killed halfway; the time of the kill."""
    done, killed = 0, 0.0

    async def worker() -> None:
        nonlocal done, killed
        while not killed and done < calls:
            try:
                async with session.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": f"call {done}"}]}) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                return
            done += 1
            if done == calls // 2:
                killed = time.time()
                os.kill(gateway.pid, signal.SIGKILL)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=OWNER) as session:
        await asyncio.gather(*(worker() for _ in range(32)), return_exceptions=True)
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--load", type=int, default=10_000)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        processes, direct, through = servers(Path(name))
        found["added"] = asyncio.run(overhead(direct, through, arguments.calls))
        found["ratios"] = asyncio.run(ratios(direct, through, streams=arguments.streams, rounds=5))
        found["at_once"] = asyncio.run(many(through, arguments.clients))
        for process in processes[::-1]:
            process.terminate()
            process.wait()
    with tempfile.TemporaryDirectory() as name:
        processes, _, through = servers(Path(name))
        clock = time.perf_counter()
        killed = asyncio.run(loaded(through, arguments.load, processes[1]))
        seconds = time.perf_counter() - clock
        processes[0].terminate()
        times = [float(line.split()[0]) for line in (Path(name) / "upstream.log").read_text().splitlines()]
        older = [at for at in times if at < killed - 1]
        with Store(Path(name) / "a.db") as store:
            stats = store.stats()
        found["killed"] = {
            "upstream_answered": len(times), "of_them_older_than_a_second": len(older), "stored": stats["transitions"],
            "lost_older_than_a_second": max(0, len(older) - stats["transitions"]), "calls_per_second": round(len(times) / seconds),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
