"""Transitions a second into the store, what a `put` costs a rollout, and the same LM calls traced by MLflow into a
SQLite file of its own, in one run.

    python benchmarks/store.py [--rows 20000] [--url postgresql://…] [--mlflow PYTHON] [--mlflow-rows 500]

`--mlflow` is a Python that has mlflow; without one that side is left out. Each call has a request of about 2 KB.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MLFLOW = """
import json, sys, time, mlflow
rows, folder = int(sys.argv[1]), sys.argv[2]
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
mlflow.set_experiment("bench")
text = "lorem ipsum dolor sit amet " * 64
def call(at):
    with mlflow.start_span(name="chat", span_type="CHAT_MODEL") as span:
        span.set_inputs({"model": "m", "messages": [{"role": "user", "content": f"{at} {text}"}]})
        message = {"role": "assistant", "content": f"ok {at}"}
        span.set_outputs({"choices": [{"message": message, "finish_reason": "stop"}]})
call(-1)
mlflow.flush_trace_async_logging()
clock = time.perf_counter()
for at in range(rows):
    call(at)
mlflow.flush_trace_async_logging()
print(json.dumps({"seconds": time.perf_counter() - clock, "version": mlflow.__version__,
                  "stored": len(mlflow.search_traces(max_results=rows + 1, return_type="list"))}))
"""


def ours(rows: int, url: str) -> dict[str, Any]:
    from assay.traces import Rollout, Store, Transition

    text = "lorem ipsum dolor sit amet " * 64
    waits: list[float] = []
    with Store(url) as store:
        clock = time.perf_counter()
        rollout = Rollout(run_id="bench", status="done")
        for at in range(rows):
            if at % 4 == 0:
                rollout = Rollout(run_id="bench", task_id=f"t{at % 1000}", status="done", score=1.0)
                store.put_rollout(rollout)
            body = {"model": "m", "messages": [{"role": "user", "content": f"{at} {text}"}]}
            answer = {"choices": [{"message": {"role": "assistant", "content": f"ok {at}"}, "finish_reason": "stop"}]}
            transition = Transition(
                t=at % 4,
                model="m",
                request={"dialect": "chat", "body": body},
                response={"body": answer},
                output=f"ok {at}",
            )
            before = time.perf_counter()
            store.put_transition(rollout.id, transition)
            waits.append(1000 * (time.perf_counter() - before))
        store.flush(600)
        seconds = time.perf_counter() - clock
        stored = store.stats()["transitions"]
    waited = {
        "wait_ms_median": round(statistics.median(waits), 3),
        "wait_ms_p99": round(sorted(waits)[int(0.99 * rows)], 3),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"rows_per_second": round(rows / seconds), "stored": stored, **waited, "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--url", help="A database URL; a SQLite file of its own where none is named.")
    parser.add_argument("--mlflow", metavar="PYTHON")
    parser.add_argument("--mlflow-rows", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {"assay": ours(arguments.rows, arguments.url or str(Path(folder) / "s.db"))}
        if arguments.mlflow:
            command = [arguments.mlflow, "-c", MLFLOW, str(arguments.mlflow_rows), folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            theirs = json.loads(done.stdout.strip().splitlines()[-1])
            rate = arguments.mlflow_rows / theirs["seconds"]
            report["mlflow"] = {
                "rows_per_second": round(rate, 1),
                "version": theirs["version"],
                "stored": theirs["stored"],
            }
            report["ratio"] = round(report["assay"]["rows_per_second"] / rate, 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
