"""Time and bytes of each page of `assay view` on a store of many transitions, and the memory of its server.

    python benchmarks/page.py [--transitions 100000] [--url postgresql://…] [--repeat 10]

Each rollout has four transitions with a request of about 2 KB. Half of the rollouts are of one large run, the others of
runs of 500. The server runs in a process of its own; times are those of a client on the same machine, with the first
request of each page apart. `cpu_ms` is the CPU time of the server for one request, which other work on the machine
changes less. Bytes are those of the HTML alone; `static_bytes` are those of style and scripts,
compressed.
"""

import argparse
import http.cookiejar
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

TEXT = "lorem ipsum dolor sit amet " * 64
CALLS = 4  # transitions of a rollout
RUN_SIZE = 500  # rollouts of a small run
START = 1_750_000_000.0


def fill(url: str, transitions: int) -> None:
    """Writes rollouts with their transitions, through the store's own writer."""
    from assay.traces import Rollout, Store, Transition

    rollouts = transitions // CALLS
    with Store(url) as store:
        for at in range(rollouts):
            run = "large" if at % 2 else f"small-{at // 2 // RUN_SIZE}"
            rollout = Rollout(
                run_id=run, task_id=f"task-{at // 2 % RUN_SIZE}", program="bench.py:Bench", model="m", phase="evaluate",
                split="val", status="failed" if at % 50 == 0 else "done",
                inputs={"question": f"number {at}"}, prediction={"answer": str(at)}, score=at % 5 / 4,
                started_at=START + at, ended_at=START + at + 1,
            )  # fmt: skip
            store.put_rollout(rollout)
            for t in range(CALLS):
                message = {"role": "assistant", "content": f"ok {t}"}
                store.put_transition(
                    rollout.id,
                    Transition(
                        t=t, model="m", output=f"ok {t}", prompt_tokens=500, completion_tokens=2, cost_usd=0.0001,
                        request={"dialect": "chat", "body": {"messages": [{"role": "user", "content": f"{t} {TEXT}"}]}},
                        response={"body": {"choices": [{"message": message, "finish_reason": "stop"}]}},
                    ),
                )  # fmt: skip
            if at % 5_000 == 4_999:
                store.flush(600)
        for number in range(max(1, rollouts // 2 // RUN_SIZE)):
            store.put_run(f"small-{number}", kind="evaluate", config={"program": "bench.py:Bench"}, status="done",
                          started_at=START + number)  # fmt: skip
        store.put_run("large", kind="serve", config={"program": "bench.py:Bench"}, status="done", started_at=START)
        store.flush(600)


class Client:
    """Requests to a running `assay view`, with its cookie."""

    def __init__(self, address: str) -> None:
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener, self._base = urllib.request.build_opener(jar), address.partition("/?")[0]
        self._opener.open(address).read()

    def get(self, path: str, **headers: str) -> tuple[float, bytes]:
        """Milliseconds and content."""
        clock = time.perf_counter()
        request = urllib.request.Request(self._base + path, headers=headers)
        with self._opener.open(request) as answer:
            content = answer.read()
        return 1000 * (time.perf_counter() - clock), content

    def first_rollout(self) -> str:
        return re.findall(r'href="(/rollouts/[0-9a-f]+)', self.get("/rollouts")[1].decode())[0]

    def cursor(self, rollouts: int) -> str:
        """The place of a page in the middle of the list."""
        return f"/rollouts?before={START + rollouts / 2}~0"


def cpu_ms(process: int) -> float:
    """CPU time of a process so far, in milliseconds, in steps of a clock tick (10 ms)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(client: Client, server: int, rollouts: int, repeat: int) -> dict[str, Any]:
    paths = {
        "runs": "/runs", "small run": "/runs/small-0", "large run": "/runs/large", "rollouts": "/rollouts",
        "rollouts, middle": client.cursor(rollouts), "rollouts, failed": "/rollouts?status=failed",
        "rollouts, rare text": "/rollouts?text=number+7", "rollouts, no match": "/rollouts?text=nowhere",
        "rollouts of a small run": "/rollouts?run=small-0", "rollouts of the large run": "/rollouts?run=large",
        "rollouts of a task": "/rollouts?task=task-1", "one rollout": client.first_rollout(),
        "compare": "/compare?a=small-0&b=small-1" if rollouts >= 4 * RUN_SIZE else "/compare?a=small-0&b=small-0",
    }  # fmt: skip
    pages = {}
    for name, path in paths.items():
        first_ms, content = client.get(path)
        before = cpu_ms(server)
        times = [client.get(path)[0] for _ in range(repeat)]
        pages[name] = {
            "first_ms": round(first_ms, 1), "ms": round(statistics.median(times), 1),
            "cpu_ms": round((cpu_ms(server) - before) / repeat, 1), "bytes": len(content),
        }  # fmt: skip
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--url", help="A database URL; a SQLite file of its own where none is named.")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or str(Path(folder) / "s.db")
        clock = time.perf_counter()
        fill(url, arguments.transitions)
        report: dict[str, Any] = {"transitions": arguments.transitions, "fill_s": round(time.perf_counter() - clock, 1)}
        clock = time.perf_counter()
        command = [sys.executable, "-m", "assay", "view", "--port", "0", "--json", "--store", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                client = Client(json.loads(server.stdout.readline())["address"])
                report["start_s"] = round(time.perf_counter() - clock, 2)
                report["start_cpu_s"] = round(cpu_ms(server.pid) / 1000, 2)
                report["pages"] = measure(client, server.pid, arguments.transitions // CALLS, arguments.repeat)
                html = client.get("/runs")[1].decode()
                files = re.findall(r'(?:href|src)="(/static/[^"]*)"', html)
                gzip = {"Accept-Encoding": "gzip"}
                report["static_bytes"] = sum(len(client.get(file, **gzip)[1]) for file in files)
                memory = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
                report["peak_mb"] = round(int(memory[0]) / 1024)
            finally:
                server.terminate()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
