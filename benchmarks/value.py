"""PPO's value: features of where a rollout stands against a linear head on the model, on the agent of four calls of
`credit.py`.

    python benchmarks/value.py [--seeds 0 1 2] [--steps 8]

Each seed warms one model up; both values train it on the same tasks with the same settings. One line a run: the share
of the returns' variance that the value explained (mean over the steps after the first two, when it has seen other
batches), the training scores, and the scores on sealed letters before and after. The last line has the differences,
head less features, paired over the seeds.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import credit
import numpy as np

import assay
from assay.cli import Console


def one(value: str, seed: int, model: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    clock = time.perf_counter()
    report = assay.train(
        f"{credit.__file__}:Letter",
        rubric=str(folder / "rubric.yaml"),
        data=str(folder / "letters.jsonl"),
        name=value,
        model=model,
        algorithm="ppo",
        value=value,
        seed=seed,
        prompts_per_step=2,
        num_generations=arguments.group,
        steps=arguments.steps,
        learning_rate=3e-4,
        beta=0.0,
        outcome_weight=0.0,
        max_completion=12,
        evaluate_every=0,
        store=folder / f"{value}.db",
        progress=Console(),
        sizes={"test": arguments.test_size, "val": 2},
    )
    explained = [share for step, share in sorted(report.curves["explained_variance"].items()) if step > 2]
    ends = {
        mode: {side: part[side]["score"] for side in ("before", "after")}
        for mode, part in next(iter(report.validation.values())).items()
    }
    scores = list(report.curves["score"].values())
    return {
        "value": value,
        "seed": seed,
        "seconds": round(time.perf_counter() - clock),
        "explained": math.fsum(explained) / max(1, len(explained)),
        "area": float(np.mean(scores)),
        "scores": [round(score, 3) for score in scores],
        **ends,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="Rollouts of a task, two tasks a step.")
    parser.add_argument("--warm-up", type=int, default=16, help="Letters, four rows each.")
    parser.add_argument("--test-size", type=int, default=12)
    arguments = parser.parse_args()
    runs_by_value: dict[str, list[dict[str, Any]]] = {"features": [], "head": []}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
            model = credit.prepared(seed, arguments.warm_up, folder)
            for value, runs in runs_by_value.items():
                runs.append(one(value, seed, model, arguments, folder))
                print(json.dumps(runs[-1]), flush=True)
    measures = {
        "explained": lambda run: run["explained"],
        "area": lambda run: run["area"],
        "sampled": lambda run: run["sampled"]["after"],
    }
    if len(arguments.seeds) > 1:
        print(
            json.dumps(
                {
                    name: credit.compared(*([of(run) for run in runs_by_value[value]] for value in runs_by_value))
                    for name, of in measures.items()
                }
            )
        )


if __name__ == "__main__":
    main()
