"""What it costs to count calls: the ledger on SQLite and PostgreSQL, and tasks on Ray against threads.

    python benchmarks/counting.py [--calls 1000] [--tasks 300] [--at-once 32] [--delay-ms 200] [--repeats 3] [--json]

First the time to count one call that takes no time, from its reservation to its settlement, by where its ledger is and
by how many threads call at once, as a share of a call of 50 ms. Then the span of one evaluation, from the first request
that the model's server gets to the last, with threads and on two nodes of Ray, in turns; a ratio for each pair. Last
the time of a call of 50 ms inside the program, two at once, with threads and on these nodes: a host reserves each call
at the driver.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos_machines import PROGRAM, database

import assay
from assay.models import Meter
from assay.models.ledger import Ledger
from assay.testing import scripted_server
from assay.traces import Store

CALL_S = 0.05
TIMED = PROGRAM.replace("import dspy", "import time\n\nimport dspy").replace(
    "        return self.answer(question=question)",
    """        begun = time.perf_counter()
        answer = self.answer(question=question)
        with open(TIMES, "a") as file:
            file.write(f"{time.perf_counter() - begun}\\n")
        return answer""",
)


def counted_s(meter: Meter, calls: int, threads: int) -> float:
    """Seconds to count one call, in a thread that does nothing else: `threads` of them at once."""
    spent: list[float] = []

    def work() -> None:
        for _ in range(calls // threads):
            begun = time.perf_counter()
            with meter.sending(uuid.uuid4().hex) as sent:
                meter.settle(sent, prompt_tokens=9, completion_tokens=9, cost_usd=0.1, failed=False)
            spent.append(time.perf_counter() - begun)
            time.sleep(CALL_S)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return statistics.mean(spent)


def ledgers(calls: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, database() as new, Store(new()) as store:
        places: dict[str, Callable[[], Ledger | None]] = {
            "memory": lambda: None,
            "SQLite": lambda: Ledger(Path(folder) / f"{uuid.uuid4().hex}.db"),
            "PostgreSQL": lambda: Ledger(store.engine, uuid.uuid4().hex),
        }
        for name, make in places.items():
            for threads in (1, 32):
                seconds = counted_s(Meter(ledger=make()), calls, threads)
                rows.append({"ledger": name, "threads": threads, "ms": seconds * 1000, "share": seconds / CALL_S})
    return rows


def span_s(folder: Path, executor: str, threads: int, delay_ms: float) -> tuple[float, int]:
    """Seconds from the first request of an evaluation to its last, and the number of requests."""
    log, times = folder / "log", list[float]()
    with scripted_server.running(log, delay_ms=delay_ms) as api:
        ended = threading.Event()

        def watch() -> None:
            seen = 0
            while not ended.wait(0.005):
                size = log.stat().st_size if log.exists() else 0
                if size > seen:
                    seen = size
                    times.append(time.perf_counter())

        watcher = threading.Thread(target=watch)
        watcher.start()
        evaluated(folder, executor, threads, api)
        ended.set()
        watcher.join()
    requests = log.stat().st_size
    log.unlink()
    return times[-1] - times[0] + delay_ms / 1000, requests


def evaluated(folder: Path, executor: str, threads: int, api: str) -> None:
    assay.evaluate(
        f"{folder / 'p.py'}:Sums", rubric="exact", data=folder / "d.jsonl", store=folder / f"{executor}.db",
        split="val", executor=executor, threads=threads, model="openai/m", api_base=api, preflight=False,
        cache=False, prompt_format="chat",
    )  # fmt: skip
    (folder / f"{executor}.db").unlink()


def call_ms(folder: Path, executor: str, threads: int) -> float:
    """Median time of a call of 50 ms inside the program; the first ten, which load modules, are not in it."""
    times = folder / "times"
    (folder / "p.py").write_text(f"{TIMED}\n\nTIMES = {str(times)!r}\n")
    with scripted_server.running(folder / "log", delay_ms=CALL_S * 1000) as api:
        evaluated(folder, executor, threads, api)
    seconds = [float(line) for line in times.read_text().split()]
    times.unlink()
    return statistics.median(seconds[10:]) * 1000


@contextmanager
def cluster() -> Iterator[None]:
    """Two nodes of Ray."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    nodes.shutdown()


@contextmanager
def tasks_in_folder(tasks: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "p.py").write_text(PROGRAM)
        lines = [
            {"id": f"t{at}", "question": f"What is {at} + 1?", "answer": str(at + 1), "split": "val"}
            for at in range(tasks)
        ]
        (Path(name) / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield Path(name)


def spans(tasks: int, at_once: int, delay_ms: float, repeats: int) -> list[dict[str, Any]]:
    rows = []
    with tasks_in_folder(tasks) as folder:
        for _ in range(repeats):
            (threads, sent), (on_ray, also) = (
                span_s(folder, executor, at_once // hosts, delay_ms) for executor, hosts in (("threads", 1), ("ray", 2))
            )
            assert sent == also
            rows.append({"requests": sent, "threads_s": threads, "ray_s": on_ray, "ratio": on_ray / threads})
    return rows


def calls(tasks: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    with tasks_in_folder(tasks) as folder:
        for _ in range(repeats):
            threads, on_ray = call_ms(folder, "threads", 2), call_ms(folder, "ray", 1)
            rows.append({"threads_ms": threads, "ray_ms": on_ray, "share": (on_ray - threads) / (CALL_S * 1000)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--delay-ms", type=float, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    counting = ledgers(arguments.calls)
    with cluster():
        compared = spans(arguments.tasks, arguments.at_once, arguments.delay_ms, arguments.repeats)
        timed = calls(arguments.tasks, arguments.repeats)
    if arguments.json:
        print(json.dumps({"counting": counting, "spans": compared, "calls": timed}))
        return 0
    print("| ledger | threads | ms to count a call | of a call of 50 ms |\n|---|---|---|---|")
    for row in counting:
        print(f"| {row['ledger']} | {row['threads']} | {row['ms']:.2f} | {row['share']:.1%} |")
    print("\n| requests | threads, s | Ray, s | ratio |\n|---|---|---|---|")
    for row in compared:
        print(f"| {row['requests']} | {row['threads_s']:.1f} | {row['ray_s']:.1f} | {row['ratio']:.2f} |")
    print("\n| a call with threads, ms | on Ray, ms | more, of a call of 50 ms |\n|---|---|---|")
    for row in timed:
        print(f"| {row['threads_ms']:.1f} | {row['ray_ms']:.1f} | {row['share']:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
