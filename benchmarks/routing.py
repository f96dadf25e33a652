"""What routing adds: an agent whose alias and deployment decide the version, compared with one fixed version of it.

    python benchmarks/routing.py [--calls 300] [--streams 200] [--rounds 12] [--assignments 20000]

Both are served by one gateway process (`assay serve --registered`), with the same program, which asks a scripted server
once. `calls`: one at a time, in pairs whose order alternates. `streams`: so many calls that begin at once, in rounds
whose order alternates. `assign`: the assignment alone, and the queries that it makes. `aa` is the fixed version against
itself, in the same rounds: what the difference of two equal things looks like on this machine. `streams_cpu` is the
processor time of the gateway in the same rounds, which a busy machine disturbs less. Intervals are 95% bootstrap
intervals of the median.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import sqlalchemy as sa

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs import module_command

AGENT, FIXED, TWIN = "support", "support@1", "support@first"
KEY = "benchmark-key"
SOURCE = """
import dspy

class Asks(dspy.Module):
    def forward(self, question):
        return dspy.Prediction(answer=dspy.settings.lm(question)[0])
"""


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def registered(folder: Path, address: str) -> None:
    """Two versions of the agent, the first of them its champion, and a deployment of the second at 50 %."""
    from assay.deployment import save_artifact
    from assay.deployment.deployments import Deployments
    from assay.deployment.plan import Metric, Plan, Step
    from assay.programs import load_program
    from assay.traces import Store

    manifest = {"model": "openai/echo", "settings": {"adapter": None, "parameters": {}}, "api_base": f"{address}/v1"}
    with Store(folder / "a.db") as store:
        deployments = Deployments(store.engine)
        for number in (1, 2):
            source = folder / f"source-{number}" / "agent.py"
            source.parent.mkdir()
            source.write_text(f"# {number}{SOURCE}")
            name = f"{source}:Asks"
            changed_manifest = {**manifest, "program": name}
            made = save_artifact(folder / f"v{number}", load_program(name), changed_manifest, splits={}, report="")
            deployments.registry.register(AGENT, made)
        deployments.registry.set_alias(FIXED, "champion", why="the first")
        deployments.registry.set_alias(FIXED, "first", why="for the comparison with itself")
        steps = (Step(weight=50, decides=True, requests=10**6),)
        deployments.start(f"{AGENT}@2", Plan(steps=steps, metrics=(Metric(success_gain=0.1),)))


def interval(values: list[float], digits: int = 3) -> list[float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return [round(value, digits) for value in (statistics.median(values), medians[25], medians[974])]


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session, self.number, self.versions = url, session, 0, Counter[str]()

    async def call(self, agent: str) -> float:
        """Milliseconds of one call."""
        self.number += 1
        body = {"inputs": {"question": f"question {self.number}"}, "unit": f"user-{self.number % 300}"}
        clock = time.perf_counter()
        async with self.session.post(f"{self.url}/agents/{agent}", json=body) as answer:
            report = await answer.json()
        self.versions[report["version"]] += agent == AGENT
        return 1000 * (time.perf_counter() - clock)

    async def at_once(self, agent: str, count: int) -> float:
        """Milliseconds of calls that begin at once."""
        clock = time.perf_counter()
        await asyncio.gather(*(self.call(agent) for _ in range(count)))
        return 1000 * (time.perf_counter() - clock)


def cpu_ms(process: subprocess.Popen[str]) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def measured(url: str, gateway: subprocess.Popen[str], calls: int, streams: int, rounds: int) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        client, order = Client(url, session), random.Random(0)
        agents = [AGENT, FIXED, TWIN]
        for agent in agents * 10:
            await client.call(agent)
        report: dict[str, Any] = {}
        for name, count, of in (("calls", calls, 0), ("streams", rounds, streams)):
            seen: dict[str, list[float]] = {agent: [] for agent in agents}
            used: dict[str, list[float]] = {agent: [] for agent in agents}
            for _ in range(count):
                order.shuffle(agents)
                for agent in agents:
                    before = cpu_ms(gateway)
                    seen[agent].append(await (client.at_once(agent, of) if of else client.call(agent)))
                    used[agent].append(cpu_ms(gateway) - before)
            report[name] = compared(seen)
            if of:  # ticks of 10 ms are too coarse for one call
                report[f"{name}_cpu"] = compared(used)
        return {**report, "versions": dict(client.versions)}


def compared(seen: dict[str, list[float]]) -> dict[str, Any]:
    """The routed agent against the fixed version, and the fixed version against itself, by round."""
    report: dict[str, Any] = {"n": len(seen[FIXED]), "fixed_ms": interval(seen[FIXED])}
    for name, agent in (("routed", AGENT), ("aa", TWIN)):
        pairs = list(zip(seen[agent], seen[FIXED], strict=True))
        report[f"{name}_added_ms"] = interval([one - other for one, other in pairs])
        report[f"{name}_ratio"] = interval([one / other for one, other in pairs])
    return report


def assigned(folder: Path, count: int) -> dict[str, Any]:
    """The assignment in this process: microseconds, and queries by the calling thread."""
    from assay.deployment.routing import Router
    from assay.traces import Store

    here, queries = threading.get_ident(), [0]

    def counted(*_: Any) -> None:
        queries[0] += threading.get_ident() == here

    with Store(folder / "a.db") as store:
        report: dict[str, Any] = {}
        for name, refresh_s in (("never_refreshed", 3600.0), ("default", 1.0)):
            router = Router(store.engine, AGENT, refresh_s=refresh_s)
            sa.event.listen(store.engine, "before_cursor_execute", counted)
            queries[0], times = 0, list[float]()
            began = time.perf_counter()
            for number in range(count):
                clock = time.perf_counter()
                router.assign(f"user-{number}")
                times.append(1e6 * (time.perf_counter() - clock))
                time.sleep(0.0 if refresh_s > 1 else 1e-4)  # so that several refreshes are due
            seconds = time.perf_counter() - began
            sa.event.remove(store.engine, "before_cursor_execute", counted)
            report[name] = {
                "assignments": count, "queries": queries[0], "seconds": round(seconds, 2),
                "median_us": round(statistics.median(times), 1), "p99_us": round(sorted(times)[int(0.99 * count)], 1),
            }  # fmt: skip
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--assignments", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"ASSAY_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
        upstream, behind = started(module_command("rigs.upstream"))
        processes = [upstream]
        try:
            registered(folder, behind)
            report = {"assign": assigned(folder, arguments.assignments)}
            words = ["serve", "--model", "echo", "--upstream", behind, "--key", KEY, "--port", "0", "--json"]
            words += [word for agent in (AGENT, FIXED, TWIN) for word in ("--registered", agent)]
            gateway, url = started([sys.executable, "-m", "assay", *words, "--store", str(folder / "a.db")])
            processes.append(gateway)
            report |= asyncio.run(measured(url, gateway, arguments.calls, arguments.streams, arguments.rounds))
        finally:
            for process in processes[::-1]:
                process.terminate()
                process.wait()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
