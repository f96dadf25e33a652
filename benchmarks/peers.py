"""DSPy's optimizers compared with `auto`: equal LM calls, equal data, sealed tests. Cells are lines of a JSON file,
and a finished cell is not run again.

    python benchmarks/peers.py run --out FILE --tasks learner:intents learner:topics learner:rules --seeds 0 1 2 3 4 5
    python benchmarks/peers.py run --out FILE --tasks chain banking77:PATH dates orders
        --optimizers auto bfrs mipro --seeds 0
    python benchmarks/peers.py table --out FILE

`learner:NAME` is the scripted in-context learner of `tests/rigs`, 2,000 sealed tasks; the others ask a model
(`--model`) and have 64. Every optimizer gets the same program, model, temperature, 80 tasks to learn from and 40 to
select on. DSPy's run as they come, without anything of assay around them, with the settings in `peers_dspy.py`, which
spend at most the budget. `auto` spends it on its search; its gate, which DSPy's have no counterpart of, is left out
here. `labeled` is LabeledFewShot(k=16), `bfrs` BootstrapFewShotWithRandomSearch.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import dspy
import numpy as np
from peers_dspy import PEERS
from peers_tasks import Setting, setting
from scipy import stats

import assay

TEMPERATURE = (
    0.7  # of the plain program: assay's default. `auto` may choose another; DSPy's optimizers do not search it
)


def with_auto(setup: Setting, budget: int, seed: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"inputs": dict(task.inputs), "expected": dict(task.expected), "split": split}
            for split, tasks in (("train", setup.train), ("val", setup.val))
            for task in tasks
        ] + setup.spare
        path = Path(folder) / "data.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        report = assay.compile(
            setup.program(),
            rubric=setup.rubric,
            data=str(path),
            lm=setup.lm,
            optimizer="auto",
            max_search_calls=budget,
            seed=seed,
            threads=threads,
            store=f"{folder}/a.db",
            out=f"{folder}/artifact",
        )
        data = report.to_dict()
        search = report.outcome.baseline.session.meter.of("search")
        return {"program": report.program, "calls": search.calls, "tokens": search.tokens, "winner": data["winner"]}


def with_peer(name: str, setup: Setting, budget: int, seed: int, threads: int) -> dict[str, Any]:
    meter = setup.lm.recording.meter
    with dspy.context(lm=setup.lm, num_threads=threads, disable_history=True):
        program = PEERS[name](setup, budget, seed, threads)
    return {"program": program, "calls": meter.usage.calls, "tokens": meter.usage.tokens, "winner": ""}


def run_cell(
    task: str, optimizer: str, seed: int, budget: int, model: str, threads: int, temperature: float
) -> dict[str, Any]:
    setup = setting(task, seed, model=model, temperature=temperature)
    clock = time.time()
    run = (
        with_auto(setup, budget, seed, threads)
        if optimizer == "auto"
        else with_peer(optimizer, setup, budget, seed, threads)
    )
    seconds = time.time() - clock
    right = [setup.right(run["program"], example) for example in setup.test]
    return {
        "task": task.partition(":/")[0],
        "optimizer": optimizer,
        "seed": seed,
        "budget": budget,
        "model": setup.model,
        "temperature": temperature,
        "calls": run["calls"],
        "tokens": run["tokens"],
        "seconds": round(seconds, 1),
        "winner": run["winner"],
        "n": len(right),
        "score": sum(right) / len(right),
        "right": "".join("01"[one] for one in right) if len(right) <= 400 else None,
    }


def key_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    return (
        cell["task"],
        cell["optimizer"],
        cell["seed"],
        cell["budget"],
        cell["model"],
        cell.get("temperature", TEMPERATURE),
    )


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def run(arguments: argparse.Namespace) -> None:
    path = Path(arguments.out)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for optimizer in arguments.optimizers:
                name, _, own = optimizer.partition("@")
                budget = int(own or arguments.budget)
                model = "learner" if task.startswith("learner:") else arguments.model
                wanted = {
                    "task": task.partition(":/")[0],
                    "optimizer": name,
                    "seed": seed,
                    "budget": budget,
                    "model": model,
                    "temperature": arguments.temperature,
                }
                if key_of(wanted) in {key_of(cell) for cell in cells_of(path)}:
                    continue
                cell = run_cell(task, name, seed, budget, model, arguments.threads, arguments.temperature)
                with open(path, "a") as file:
                    file.write(json.dumps(cell) + "\n")
                print(
                    f"{task} {optimizer} seed {seed}: {cell['score']:.3f}, {cell['calls']} calls, {cell['winner']}",
                    file=sys.stderr,
                    flush=True,
                )


def interval(differences: list[float]) -> str:
    """Mean and 95 % t interval over cells: each is another draw of data and of the search."""
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return f"{100 * mean:+.1f}"
    reach = float(stats.t.ppf(0.975, len(differences) - 1) * np.std(differences, ddof=1) / math.sqrt(len(differences)))
    return f"{100 * mean:+.1f} [{100 * (mean - reach):+.1f}, {100 * (mean + reach):+.1f}]"


def table(arguments: argparse.Namespace) -> None:
    cells = [
        cell for cell in cells_of(Path(arguments.out)) if cell.get("temperature", TEMPERATURE) == arguments.temperature
    ]
    for kind in (True, False):
        part = [cell for cell in cells if (cell["model"] == "learner") is kind]
        if part:
            print(f"\n{'scripted in-context learner' if kind else 'models'}\n")
            _table(part, arguments.budget)


def _table(cells: list[dict[str, Any]], budget: int) -> None:
    by_column: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
    for cell in cells:
        column = cell["optimizer"] if cell["budget"] == budget else f"{cell['optimizer']}@{cell['budget']}"
        by_column[column][cell["task"], cell["model"], cell["seed"]] = cell
    tasks = list(dict.fromkeys((cell["task"], cell["model"]) for cell in cells))
    print(
        "| optimizer | "
        + " | ".join(task for task, _ in tasks)
        + " | mean | auto minus it, 95 % | calls | tokens | s |"
    )
    print("|---" * (len(tasks) + 6) + "|")
    peers = [name for name in by_column if not name.startswith("auto")]
    for name, cells_of in by_column.items():
        scores = [[cell["score"] for key, cell in cells_of.items() if key[:2] == task] for task in tasks]
        columns = " | ".join(f"{100 * np.mean(values):.1f} ({len(values)})" if values else "" for values in scores)
        common = [key for key in cells_of if key in by_column["auto"]]
        against = (
            interval([by_column["auto"][key]["score"] - cells_of[key]["score"] for key in common])
            if name != "auto" and common
            else ""
        )
        means = [
            np.mean([cell[field] for cell in cells_of.values()]) for field in ("score", "calls", "tokens", "seconds")
        ]
        print(
            f"| {name} | {columns} | {100 * means[0]:.1f} | {against} "
            f"| {means[1]:.0f} | {means[2]:.0f} | {means[3]:.0f} |"
        )
    searching = [name for name in peers if name != "plain"]
    for column in [name for name in by_column if name.startswith("auto")]:
        common = [key for key in by_column[column] if all(key in by_column[name] for name in searching)]
        if common and searching:
            best = max(searching, key=lambda name: float(np.mean([by_column[name][key]["score"] for key in common])))
            of = {key: [by_column[name][key]["score"] for name in searching] for key in common}
            score = {key: by_column[column][key]["score"] for key in common}
            to_best = [score[key] - by_column[best][key]["score"] for key in common]
            to_mean = [score[key] - float(np.mean(of[key])) for key in common]
            print(f"\n{column} minus the best ({best}): {interval(to_best)}")
            print(f"{column} minus their mean: {interval(to_mean)}; {len(common)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--out", required=True, help="results file, one cell a line")
    parser.add_argument("--tasks", nargs="+", default=["learner:intents", "learner:topics", "learner:rules"])
    parser.add_argument(
        "--optimizers", nargs="+", default=["plain", *PEERS, "auto", "auto@75"], help="NAME, or NAME@BUDGET"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=150)
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help="of the plain program, for all optimizers"
    )
    arguments = parser.parse_args()
    run(arguments) if arguments.command == "run" else table(arguments)


if __name__ == "__main__":
    main()
