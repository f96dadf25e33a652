"""Export of transitions to JSON lines and Parquet against writing the very same rows with orjson and pyarrow alone,
in one run.

    python benchmarks/export.py [--rows 1000000] [--privacy auto] [--folder DIR]

The store is made first (rollouts of four calls in groups of eight, each call about 2 KB). Peak memory is the
exporting process's.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXPORT = """
import json, resource, sys, time
from assay.commands.export import export
from assay.traces.export.settings import Gates
clock = time.perf_counter()
report = export("transitions", sys.argv[2], store=sys.argv[1], privacy=sys.argv[3], gates=Gates(min_clean=0))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"seconds": time.perf_counter() - clock, "rows": report.rows, "peak_mb": peak}))
"""


def filled(path: Path, rows: int) -> None:
    from assay.traces import Rollout, Store, Transition

    text = (
        "lorem ipsum dolor sit amet, consetetur sadipscing elitr, sed diam nonumy eirmod tempor invidunt ut labore "
        * 14
    )
    with Store(path) as store:
        rollout = Rollout()
        for at in range(rows):
            if at % 4 == 0:
                task = at // 32
                rollout = Rollout(
                    run_id="bench",
                    task_id=f"task-{task:07}",
                    task_type=f"type-{task % 7}",
                    group_id=f"g-{task:07}",
                    status="done",
                    program="p",
                    program_version="v",
                    model="m",
                    inputs={"question": f"How much is {task} + 1?"},
                    score=float(at // 4 % 3 == 0),
                    rubric="r@1",
                )
                store.put_rollout(rollout)
            body = {"model": "m", "messages": [{"role": "user", "content": f"question {at}: {text}"}]}
            answer = {
                "choices": [{"message": {"role": "assistant", "content": f"answer {at}"}, "finish_reason": "stop"}]
            }
            store.put_transition(
                rollout.id,
                Transition(
                    t=at % 4,
                    model="m",
                    weights="w" * 64,
                    request={"dialect": "chat", "body": body},
                    response={"body": answer},
                    output=f"answer {at}",
                    token_ids=tuple(range(20)),
                    logprobs=(-0.5,) * 20,
                    prompt_tokens=300,
                    completion_tokens=20,
                    step_rewards={"runs": 0.05},
                ),
            )


def written_alone(source: Path, folder: Path) -> float:
    """Seconds to write the exported rows again, from memory in batches; reading them is not counted."""
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    seconds, writer = 0.0, None
    with open(source / "data.jsonl", "rb") as lines, open(folder / "plain.jsonl", "wb", buffering=1 << 20) as out:
        batches = pq.ParquetFile(source / "data.parquet").iter_batches(2000)
        for batch in batches:
            rows = [orjson.loads(next(lines)) for _ in range(batch.num_rows)]
            columns, schema = batch.to_pydict(), batch.schema
            clock = time.perf_counter()
            for row in rows:
                out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            table = pa.RecordBatch.from_pydict(columns, schema=schema)
            writer = writer or pq.ParquetWriter(folder / "plain.parquet", schema, compression="snappy")
            writer.write_batch(table)
            seconds += time.perf_counter() - clock
    clock = time.perf_counter()
    if writer is not None:
        writer.close()
    return seconds + time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--privacy", nargs="+", default=["off", "auto"])
    parser.add_argument("--folder", help="For the files; by default a temporary one.")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"rows": arguments.rows}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        clock = time.perf_counter()
        filled(folder / "s.db", arguments.rows)
        figures["filled_rows_per_second"] = round(arguments.rows / (time.perf_counter() - clock))
        for privacy in arguments.privacy:
            out = folder / f"out-{privacy}"
            command = [sys.executable, "-c", EXPORT, str(folder / "s.db"), str(out), privacy]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            report = json.loads(done.stdout.strip().splitlines()[-1])
            alone = written_alone(out, folder)
            figures[f"privacy {privacy}"] = {
                **report,
                "seconds": round(report["seconds"], 1),
                "alone_s": round(alone, 1),
                "ratio": round(report["seconds"] / alone, 2),
            }
    figures["own_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
