"""Reward hacking with and without the criteria on edits, and the bare outcome against a rubric with step rewards.

    python benchmarks/hacking.py minimal_edits --seeds 0 1 2
    python benchmarks/hacking.py rubric_training --seeds 0 1 2

Measures with the embedded model and appends a record for each seed to `results/hacking.jsonl`, in the form of
`results/seeds.jsonl`. A seed that is there is not measured again. Prints the mean of each figure and side, as JSON.
"""

import argparse
import importlib
import json
import tempfile
import time
from pathlib import Path

from claims.storing import Setting, append, read, record
from claims.table import mean_of, pooled

MODULES = {"minimal_edits": "claims.hacking", "rubric_training": "claims.rubric_training"}
RESULTS = Path(__file__).parent / "results" / "hacking.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=sorted(MODULES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    name, found = arguments.measurement, {}
    for seed in arguments.seeds:
        if (name, seed) not in read(arguments.results):
            measure(name, seed, arguments)
        found[seed] = read(arguments.results)[name, seed]
    records = list(found.values())
    means = {
        figure: {side: mean_of(pooled(records, figure, side)) for side in sides}
        for figure, sides in records[0]["values"].items()
    }
    print(json.dumps({"measurement": name, "seeds": arguments.seeds, "means": means}))


def measure(name: str, seed: int, arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        setting = Setting(seed=seed, model=arguments.model, stronger=None, scratch=folder, downloads=folder)
        measured = importlib.import_module(MODULES[name]).measure(setting)
    command = f"python benchmarks/hacking.py {name} --seeds {seed}"
    append(
        arguments.results,
        record(name, setting, measured, command=command, seconds=time.perf_counter() - start),
    )


if __name__ == "__main__":
    main()
