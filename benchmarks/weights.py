"""The warm-up: an uncompiled agent before and after SFT on what the compiled one did, its demonstrations left out.

    python benchmarks/weights.py [--seeds 0 1 2] [--artifact COMPILED] [--size 48] [--test-size 40]

`math_qa` on sums, sealed tasks, at temperature 0.1 and 0.7: score, correct answers, tool adoption, and the share of tool calls that ran.
The retain set is another task in another form: fields out of generated sentences (`extract`), before and after.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tune import SUMS, compiled

import assay
from assay.cli.shared import Console
from assay.optimizers.statistics import paired_gain
from assay.optimizers.weights import SFTConfig, train_sft
from assay.traces import Store

BASE = "embedded/smollm2-135m"
NAMES, THINGS, CITIES = (
    ("Ada", "Boris", "Chen", "Dunja", "Emil"),
    ("apples", "chairs", "lamps", "books", "pens"),
    ("Oslo", "Lima", "Kyoto", "Bern", "Accra"),
)


def retained(path: Path, rows: int = 120) -> str:
    """Sentences with a name, a count and a city, as tasks for `extract`."""
    chosen = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            name, count, thing, city = chosen.choice(NAMES), chosen.randint(2, 99), chosen.choice(THINGS), chosen.choice(CITIES)
            text = f"On Monday {name} bought {count} {thing} in {city}."
            file.write(json.dumps({"inputs": {"text": text}, "expected": {"name": name, "count": count, "city": city}}) + "\n")
    return str(path)


def measured(
    model: str, store: Path, *, test: int, data: str = SUMS, program: str = "math_qa", **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """What the program does under a model: its report, and scores by task. Each has a store of its own."""
    found = assay.evaluate(program, rubric=program, data=data, split="test", sizes={"test": test}, model=model, store=store, **options).evaluation
    with Store(store) as opened:
        tools = [tool for r in opened.rollouts(limit=None) for t in opened.rollout(r.id).transitions for tool in t.tools]
    told = found.report()
    kept = {name: told[name] for name in ("score", "n", "failed", "criteria", "tokens_per_task")}
    return {**kept, "tool_calls": len(tools), "ran": sum(tool.error is None for tool in tools) / len(tools) if tools else None}, found.scores


def one(seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
    artifact, shown = arguments.artifact or compiled(folder), Console()
    assay.collect(
        artifact, rubric="math_qa", data=SUMS, n=1, sizes={"train": arguments.size}, parameters={"temperature": 0.1}, seed=seed,
        store=folder / "a.db", progress=shown,
    )  # fmt: skip
    assay.export("sft", folder / "sft", store=folder / "a.db", demos=False, allow_ungated=True)
    clock = time.perf_counter()
    trained = train_sft(folder / "sft", "warm", SFTConfig(seed=seed, epochs=2), progress=shown)
    seconds = time.perf_counter() - clock
    assert trained.name is not None
    found: dict[str, Any] = {
        "seed": seed, "rows": trained.rows, "steps": trained.steps, "train_seconds": round(seconds), "held_out_loss": trained.held_out_loss,
        "agreement": trained.agreement,
    }  # fmt: skip
    tasks: dict[str, dict[str, Any]] = {
        **{f"temperature {t}": {"adapter": "lean", "parameters": {"temperature": t}, "seed": seed} for t in (0.1, 0.7)},
        "retain": {"program": "extract", "data": retained(folder / "r.jsonl"), "parameters": {"temperature": 0.1}, "seed": seed},
    }
    for name, options in tasks.items():
        (before, b), (after, a) = (
            measured(model, folder / f"{name} {at}.db", test=arguments.test_size, **options) for at, model in enumerate((BASE, trained.name))
        )
        found[name] = {"before": before, "after": after, "gain": paired_gain(b, a).to_dict()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--artifact", help="A compiled math_qa.")
    parser.add_argument("--size", type=int, default=48, help="Train tasks that are collected.")
    parser.add_argument("--test-size", type=int, default=40)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(one(seed, arguments, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
