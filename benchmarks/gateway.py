"""What the gateway costs: the same calls to one scripted server, directly and through `assay serve`, interleaved in
one run; many streaming clients at once; and a SIGKILL in the middle of a load, counted against the server's own log.

    python benchmarks/gateway.py [--calls 300] [--streams 100] [--clients 200] [--load 10000]
        [--rounds 5] [--only added,ratios,at_once,open,killed]

Times are of an idle machine. On a busy one the gateway's processor time (`*_cpu_ms`) and peak memory (`peak_mb`)
still tell. Intervals are 95% bootstrap intervals of the median.
"""

import argparse
import asyncio
import json
import os
import random
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

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs import module_command

KEY = "benchmark-key"
OWNER = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "word " * 200}], "stream": False}


def started(command: list[str], **options: Any) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def servers(folder: Path, *, chunks: int = 8, delay_ms: float = 0) -> tuple[list[subprocess.Popen[str]], str, str]:
    flags = ["--log", str(folder / "upstream.log"), "--chunks", str(chunks), "--delay-ms", str(delay_ms)]
    upstream, behind = started([*module_command("rigs.upstream"), *flags])
    flags = ["--model", "echo", "--upstream", behind, "--key", KEY, "--port", "0", "--json"]
    gateway, url = started([sys.executable, "-m", "assay", "serve", *flags, "--store", str(folder / "a.db")])
    return [upstream, gateway], behind, url


def cpu_ms(process: subprocess.Popen[str]) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def peak_mb(process: subprocess.Popen[str]) -> float:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)


def median_of(values: list[float], digits: int = 2) -> list[float]:
    """The median, and the 2.5th and 97.5th percentile of the medians of 1000 resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return [round(value, digits) for value in (statistics.median(values), medians[25], medians[974])]


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
                    seconds = await timed(session, url, {**BODY, "stream": stream})
                    if number >= 20:
                        seen[url].append(seconds)
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
        call = {
            "id": f"c{name}_{turn}",
            "type": "function",
            "function": {"name": "calculator", "arguments": json.dumps({"expression": f"6*{turn}"})},
        }
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"c{name}_{turn}", "content": "result " * 50}]
    return messages


async def ratios(
    direct: str, through: str, gateway: subprocess.Popen[str], *, streams: int, rounds: int
) -> dict[str, Any]:
    """The same call directly, through a proxy that only passes on, and through the gateway: of a call whose
    conversation has 1 and 60 turns, new to the gateway or grown turn by turn, and of the first token where many
    stream at once."""
    report: dict[str, Any] = {}
    bare, passing = started([sys.executable, str(Path(__file__).with_name("pass_through.py")), direct])
    urls = {"": through, "pass_through_": passing}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=OWNER) as session:

        async def added(messages: list[dict[str, Any]]) -> dict[str, float]:
            body = {"messages": messages, "stream": False}
            alone = (await timed(session, direct, body))[1]
            return {name: 1000 * ((await timed(session, url, body))[1] - alone) for name, url in urls.items()}

        for turns in (1, 60):
            before = cpu_ms(gateway)
            seen = [await added(conversation(turns, str(number))) for number in range(20 * rounds)]
            report |= {f"turns_{turns}_{name}added_ms": median_of([one[name] for one in seen]) for name in urls}
            report[f"turns_{turns}_cpu_ms"] = round((cpu_ms(gateway) - before) / len(seen), 2)
        grown = [
            [await added(conversation(turns, f"grown {number}")) for turns in range(1, 61)] for number in range(rounds)
        ]
        for part, at in (("1_to_10", slice(0, 10)), ("51_to_60", slice(50, 60))):
            report |= {
                f"grown_{part}_{name}added_ms": median_of([one[name] for calls in grown for one in calls[at]])
                for name in urls
            }
        report |= await first_tokens(session, direct, urls, gateway, streams=streams, rounds=rounds)
    stop([bare])
    return report


async def first_tokens(
    session: aiohttp.ClientSession,
    direct: str,
    urls: dict[str, str],
    gateway: subprocess.Popen[str],
    *,
    streams: int,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """The median time to the first token of many streams that begin at once, as a ratio to the same without a proxy."""
    ratio: dict[str, list[float]] = {name: [] for name in urls}
    first, used = list[float](), 0.0
    for _ in range(2 * rounds):
        times, before = dict[str, float](), cpu_ms(gateway)
        for url in (direct, *urls.values()):
            calls = [timed(session, url, {**BODY, "stream": True}) for _ in range(streams)]
            times[url] = 1000 * statistics.median(pair[0] for pair in await asyncio.gather(*calls))
        used += cpu_ms(gateway) - before
        first.append(times[direct])
        for name, url in urls.items():
            ratio[name].append(times[url] / times[direct])
    report: dict[str, Any] = {
        f"first_token_of_{streams}_{name}ratio": median_of(values) for name, values in ratio.items()
    }
    report[f"first_token_of_{streams}_direct_ms"] = median_of(first, 1)
    report[f"first_token_of_{streams}_cpu_ms"] = round(used / streams / len(first), 2)
    return report


async def open_at_once(through: str, gateway: subprocess.Popen[str], clients: int) -> dict[str, Any]:
    """Memory of the gateway while many streams are open, from one that pauses in the middle of each, and after them."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=OWNER) as session:
        clock = time.perf_counter()
        calls = [
            timed(session, through, {"messages": conversation(20, str(number)), "stream": True})
            for number in range(clients)
        ]
        whole = len(await asyncio.gather(*calls))
    return {
        "streams": clients,
        "whole_answers": whole,
        "seconds": round(time.perf_counter() - clock, 1),
        "peak_mb": peak_mb(gateway),
    }


async def many(url: str, clients: int) -> dict[str, Any]:
    async def one(number: int) -> bool:
        prompt = f"client {number} says this"
        text = ""
        async with session.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": prompt}], "stream": True}
        ) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text += (json.loads(line[6:])["choices"][0]["delta"].get("content")) or ""
        return text == f"echo: {prompt}"

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
                async with session.post(
                    f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": f"call {done}"}]}
                ) as answer:
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="added,ratios,at_once,open,killed")
    arguments = parser.parse_args()
    only, report = arguments.only.split(","), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        processes, direct, through = servers(Path(name))
        if "added" in only:
            report["added"] = asyncio.run(overhead(direct, through, arguments.calls))
        if "ratios" in only:
            report["ratios"] = asyncio.run(
                ratios(direct, through, processes[1], streams=arguments.streams, rounds=arguments.rounds)
            )
        if "at_once" in only:
            report["at_once"] = asyncio.run(many(through, arguments.clients))
        stop(processes)
    if "open" in only:
        with tempfile.TemporaryDirectory() as name:
            processes, _, through = servers(Path(name), delay_ms=5000)
            report["open"] = asyncio.run(open_at_once(through, processes[1], arguments.clients))
            stop(processes)
    if "killed" in only:
        report["killed"] = kill(arguments.load)
    print(json.dumps(report))


def stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes[::-1]:
        process.terminate()
        process.wait()


def kill(load: int) -> dict[str, Any]:
    """What is lost where the gateway is killed halfway through a load."""
    with tempfile.TemporaryDirectory() as name:
        processes, _, through = servers(Path(name))
        clock = time.perf_counter()
        killed = asyncio.run(loaded(through, load, processes[1]))
        seconds = time.perf_counter() - clock
        processes[0].terminate()
        times = [float(line.split()[0]) for line in (Path(name) / "upstream.log").read_text().splitlines()]
        older = [at for at in times if at < killed - 1]
        with Store(Path(name) / "a.db") as store:
            stats = store.stats()
    return {
        "upstream_answered": len(times),
        "of_them_older_than_a_second": len(older),
        "stored": stats["transitions"],
        "lost_older_than_a_second": max(0, len(older) - stats["transitions"]),
        "calls_per_second": round(len(times) / seconds),
    }


if __name__ == "__main__":
    main()
