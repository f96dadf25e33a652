"""The whole road from a prompt to better weights, on two CPU cores: `python examples/math_qa_training.py --folder road`.

1. **compile**: the calculator agent's prompt, so that a 135M model uses its tool at all (or `--artifact`, compiled before);
2. **collect**: what the compiled agent does on tasks of `train`, scored by the rubric;
3. **sft**: a short warm-up on its good rollouts, its demonstrations left out, so that the plain agent can do some of it;
4. **grpo**: the plain agent plays, and calls that led to right answers become likelier;
5. **serve and compare**: on sealed tasks, greedily and sampled, by the names that any command takes.

Forty minutes with the defaults. What is finished is not done again: the same command goes on where it was cut off.
"""

import argparse
import json
import os
from pathlib import Path

from rich.console import Console as Rich
from rich.table import Table

import assay
from assay.cli.shared import Console
from assay.models.adapters import adapter_home
from assay.optimizers import paired_gain
from assay.optimizers.weights import SFTConfig, train_sft
from assay.training import MODES

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", default="road")
parser.add_argument("--artifact", help="A compiled math_qa.")
parser.add_argument("--data", default="arithmetic:terms=2-4&digits=1-3&size=600")
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--collect", type=int, default=48, help="Tasks that the compiled agent does.")
parser.add_argument("--epochs", type=int, default=1, help="Of the warm-up.")
parser.add_argument("--steps", type=int, default=12, help="Of the policy gradient.")
parser.add_argument("--group", type=int, default=4, help="Rollouts of a task, four tasks a step.")
parser.add_argument("--test-size", type=int, default=40)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

folder, shown = Path(arguments.folder), Console()
folder.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("ASSAY_ADAPTERS", str(folder / "adapters"))
job = {"rubric": "math_qa", "data": arguments.data, "seed": arguments.seed, "progress": shown}


def trained(name: str) -> bool:
    return (adapter_home() / name).is_dir()


artifact = arguments.artifact or str(folder / "compiled")
if not Path(artifact).exists():
    assay.compile(
        "math_qa", **job, model=arguments.model, parameters={"temperature": 0.1}, max_search_calls=140, sizes={"gate": 8, "test": 10},
        store=folder / "compile.db", out=artifact,
    )  # fmt: skip
if not (folder / "rows").exists():
    assay.collect(
        artifact, **job, model=arguments.model, n=1, sizes={"train": arguments.collect}, parameters={"temperature": 0.1}, store=folder / "a.db"
    )
    assay.export("sft", folder / "rows", store=folder / "a.db", demos=False, allow_ungated=True)  # one agent's rollouts: no balance to ask for
if not trained("warm"):
    train_sft(folder / "rows", "warm", SFTConfig(model=arguments.model, epochs=arguments.epochs, seed=arguments.seed), progress=shown)
warm = f"{arguments.model}+warm"
if not trained("grpo"):
    # The score alone is trained on: the rubric's step rewards would be earned by calling again and again.
    assay.train(
        "math_qa", **job, name="grpo", model=warm, adapter="lean", steps=arguments.steps, tasks=4, group=arguments.group, learning_rate=3e-4,
        beta=0.0, step_weight=0.0, max_completion=64, parameters={"max_steps": 3}, evaluate_every=0, sizes={"test": 2}, store=folder / "g.db",
        resume=(Path(".assay/training/grpo")).exists(),
    )  # fmt: skip

agents = {
    "plain": ("math_qa", arguments.model),
    "compiled": (artifact, arguments.model),
    "warmed up": ("math_qa", warm),
    "trained": ("math_qa", f"{warm}+grpo"),
    "compiled, trained": (artifact, f"{warm}+grpo"),
}
told: dict[str, dict[str, object]] = {}
for mode in MODES:
    plain: dict[str, float] = {}
    for name, (program, model) in agents.items():
        given = {"max_steps": 3, "temperature": 0.1 if mode == "greedy" else 1.0}
        adapter = None if program == artifact else "lean"
        found = assay.evaluate(
            program, **job, split="test", model=model, adapter=adapter, parameters=given, sizes={"test": arguments.test_size}, store=folder / "e.db"
        ).evaluation
        plain = plain or found.scores
        report = found.report()
        told[f"{name}, {mode}"] = {
            "score": report["score"], "correct": report["criteria"]["correct"], "uses its tool": report["criteria"]["tool_adoption"],
            "tokens a task": report["tokens_per_task"], "gain": paired_gain(plain, found.scores).to_dict(),
        }  # fmt: skip
if arguments.json:
    print(json.dumps(told))
else:
    table = Table("", "score", "correct", "uses its tool", "tokens a task", "gain on plain, 95 %", title=f"{arguments.test_size} sealed tasks")
    for name, row in told.items():
        gain = row["gain"]
        table.add_row(name, *(f"{row[key]:.3g}" for key in list(row)[:4]), f"{gain['mean']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]")
    Rich().print(table)
