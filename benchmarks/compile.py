"""The main job by seed: baseline and compiled on sealed tasks, each seed in a store and cache of its own."""

import argparse
import json
import tempfile
import time

from claims.storing import Lines

import assay

parser = argparse.ArgumentParser()
parser.add_argument("--program", default="math_qa")
parser.add_argument("--rubric", default="math_qa")
parser.add_argument("--data", required=True)
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--temperature", type=float, default=0.1)
parser.add_argument("--test-size", type=int, default=100)
parser.add_argument("--gate-size", type=int, default=30)
arguments = parser.parse_args()

for seed in arguments.seeds:
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        data = assay.compile(
            arguments.program,
            rubric=arguments.rubric,
            data=arguments.data,
            model=arguments.model,
            seed=seed,
            parameters={"temperature": arguments.temperature},
            sizes={"test": arguments.test_size, "gate": arguments.gate_size},
            store=f"{folder}/.assay/assay.db",
            out=f"{folder}/artifact",
            progress=Lines(),
        ).to_dict()
    fields = ("winner", "search_calls", "calls", "tokens", "replaces", "gate", "test", "notes", "candidates")
    print(
        json.dumps({"seed": seed, "seconds": time.time() - start, **{name: data[name] for name in fields}}), flush=True
    )
