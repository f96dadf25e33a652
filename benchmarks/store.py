"""Transitions of 2 kB stored a second in SQLite, and what a `put` costs a rollout."""

import json
import statistics
import tempfile
import time
from pathlib import Path

from assay.traces import Rollout, Store, Transition

COUNT = 20_000

with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.db") as store:
    rollout = Rollout()
    store.put_rollout(rollout)
    waits = []
    start = time.perf_counter()
    for t in range(COUNT):
        transition = Transition(t=t, model="m", request={"messages": [{"text": "x" * 1500}]}, output="y" * 500)
        clock = time.perf_counter()
        store.put_transition(rollout.id, transition)
        waits.append((time.perf_counter() - clock) * 1000)
    store.flush()
    elapsed = time.perf_counter() - start
    waits.sort()
    print(
        json.dumps(
            {
                "transitions_per_s": COUNT / elapsed,
                "ratio": sum(waits) / 1000 / elapsed,  # of the time that storing takes, what the rollout itself waits
                "wait_ms_mean": statistics.mean(waits),
                "wait_ms_median": statistics.median(waits),
                "wait_ms_p99": waits[int(0.99 * COUNT)],
                "stored": store.stats()["transitions"],
            }
        )
    )
