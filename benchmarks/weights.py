"""Runs `examples/math_qa_training.py` with several seeds and pools the results: prompts, weights, and both.

    python benchmarks/weights.py --artifact compiled [--seeds 0 1 2] [--test-size 24] [--folder roads] [--more 120]

Each seed is a run of the example in a folder of its own, half an hour and more on two cores; what is there is taken,
so that a run can be cut off and called again. The sealed tasks are the same for all seeds: a task's score is its mean
over the seeds, gains are paired over tasks. `--more`: the compiled agent, and with trained weights, on so many sealed
tasks, sampled at temperature 1, where a small gain becomes significant (about seven minutes a seed). Prints one
JSON object, and a line a seed to standard error.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import assay
from assay.cli import Console
from assay.evaluation import paired_gain

MODEL, SUMS = "embedded/smollm2-135m", "arithmetic:terms=3-4&digits=2-3&size=600"  # those of the example
EXAMPLE = Path(__file__).parents[1] / "examples" / "math_qa_training.py"


def run_example(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Report of a run of the example, read from its folder if it was run before."""
    folder = Path(arguments.folder) / str(seed)
    file = folder / "report.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--artifact", arguments.artifact] if arguments.artifact else []
        command = [
            sys.executable,
            EXAMPLE,
            *flags,
            "--folder",
            folder,
            "--seed",
            seed,
            "--test-size",
            arguments.test_size,
            "--json",
        ]
        file.write_bytes(subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True).stdout)
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def on_more(seed: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Scores by task of the compiled agent, before and after the weights were trained."""
    folder = Path(arguments.folder) / str(seed)
    file, artifact = folder / f"more-{arguments.more}.json", arguments.artifact or str(folder / "compiled")
    os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
    if not file.exists():
        options = {
            "parameters": {"max_steps": 3, "temperature": 1.0},
            "sizes": {"test": arguments.more},
            "seed": seed,
            "progress": Console(),
        }
        scores = {
            name: assay.evaluate(
                artifact, rubric="math_qa", data=SUMS, split="test", model=model, store=folder / "more.db", **options
            ).evaluation.scores
            for name, model in (("compiled", MODEL), ("compiled, trained", f"{MODEL}+warm+grpo"))
        }
        file.write_text(json.dumps(scores))
    stored: dict[str, dict[str, float]] = json.loads(file.read_text())
    return stored


def pooled(scores: list[dict[str, float]]) -> dict[str, float]:
    """A task's mean over the seeds that scored it."""
    values = {task: [one[task] for one in scores if not math.isnan(one.get(task, math.nan))] for task in scores[0]}
    return {task: float(np.mean(of_seeds)) for task, of_seeds in values.items() if of_seeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", help="A compiled math_qa; else each seed compiles its own.")
    parser.add_argument("--folder", default="roads")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--test-size", type=int, default=24)
    parser.add_argument("--more", type=int, default=0, help="Sealed tasks to tell both from compiled alone on.")
    arguments = parser.parse_args()
    reports = []
    for seed in arguments.seeds:
        reports.append(run_example(seed, arguments))
        curve = list(reports[-1]["training"]["curves"]["score"].values())
        print(f"seed {seed}: {' '.join(f'{score:.2f}' for score in curve)}", file=sys.stderr, flush=True)
    report: dict[str, Any] = {
        "seeds": arguments.seeds,
        "seconds": [one["seconds"] for one in reports],
        "converged": float(np.mean([one["training"]["converged"] is True for one in reports])),
    }
    for mode, agents in reports[0]["scores"].items():
        every = {name: pooled([one["scores"][mode][name] for one in reports]) for name in agents}
        report[mode] = {
            name: {"score": float(np.mean(list(scores.values()))), **_by_seed(reports, name, mode)}
            for name, scores in every.items()
        }
        pairs = [("plain", name) for name in agents if name != "plain"]
        pairs += [(name, "compiled, trained") for name in ("compiled", "trained") if "compiled, trained" in agents]
        pairs += [("warmed up", "trained")] if "warmed up" in agents else []
        report[mode]["gains"] = {f"{old} to {new}": paired_gain(every[old], every[new]).to_dict() for old, new in pairs}
    if arguments.more:
        scores = [on_more(seed, arguments) for seed in arguments.seeds]
        before, after = (pooled([one[name] for one in scores]) for name in ("compiled", "compiled, trained"))
        means = {name: [float(np.nanmean(list(one[name].values()))) for one in scores] for name in scores[0]}
        report["sampled, on more tasks"] = {
            "tasks": len(before),
            "by_seed": means,
            "gain": paired_gain(before, after).to_dict(),
        }
    print(json.dumps(report, indent=1))


def _by_seed(reports: list[dict[str, Any]], name: str, mode: str) -> dict[str, list[Any]]:
    ends = [end["after"] for one in reports if (end := one["comparison"].get(f"{name}, {mode}"))]
    report = {key: [end[key] for end in ends] for key in ("valid_calls", "tokens_per_task")}
    tools = [end["criteria"].get("tool_adoption") for end in ends]
    return {
        "by_seed": [float(np.nanmean(list(one["scores"][mode][name].values()))) for one in reports],
        **report,
        "tool_adoption": tools,
    }


if __name__ == "__main__":
    main()
