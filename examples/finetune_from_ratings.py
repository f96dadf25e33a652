"""People's ratings in, better weights out: `python examples/finetune_from_ratings.py --folder rated`.

A small model sorts customers' messages. People rate what it did, from 0 to 1; what they rated at least 0.8 is trained on; then the old and
the new weights sort sealed messages. Everything is real but the people: `--to-rate` writes FOLDER/to_rate.jsonl and stops, and `--ratings FILE`
takes their ratings (JSON lines of `{"rollout": ID, "rating": 0.9}`); or rate here (`--rater me`). By default a stand-in rates, who knows the
right label and errs once in ten. What nobody rated is not trained on.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

from rich.console import Console as Rich
from rich.table import Table

import assay
from assay.cli.shared import Console
from assay.optimizers import paired_gain
from assay.optimizers.weights import SFTConfig, train_sft
from assay.traces import Rollout
from assay.traces.selection import Selection

MESSAGES = {
    "billing": ["I was charged twice for {}", "The invoice for {} shows a wrong amount", "Why is there a fee on my {} payment?"],
    "delivery": ["Where is the parcel with {}?", "The {} has not arrived yet", "The courier left my {} at a wrong door"],
    "returns": ["I want to send {} back", "How do I return {} that I no longer want?", "The {} does not fit, can I exchange it?"],
    "account": ["I cannot log in to see my {}", "Reset the password of my {} profile", "Change the e-mail address that {} is registered to"],
}
THINGS = ["a lamp", "two chairs", "the blue coat", "a phone case", "running shoes", "a kettle", "headphones", "the desk", "a tent", "garden tools"]
ENDINGS = ["", " Please help.", " Thanks!", " This is urgent.", " I ordered on Monday."]


def messages(seed: int) -> list[dict[str, object]]:
    chosen = random.Random(seed)
    every = [(kind, text.format(thing) + ending) for kind, texts in MESSAGES.items() for text in texts for thing in THINGS for ending in ENDINGS]
    return [{"inputs": {"text": text}, "expected": {"label": kind}} for kind, text in chosen.sample(every, 300)]


def rate(rollouts: list[Rollout], rater: str, seed: int) -> dict[str, float]:
    chosen, found = random.Random(seed), dict[str, float]()
    for at, rollout in enumerate(rollouts):
        said = (rollout.prediction or {}).get("label")
        if rater == "me":
            print(f"\n[{at + 1} of {len(rollouts)}] {rollout.inputs['text']}\n  -> {said}\nrating 0 to 1 (Enter: stop): ", end="", file=sys.stderr)
            text = sys.stdin.readline().strip()
            if not text:
                break
            found[rollout.id] = float(text)
        else:
            right = said == rollout.expected["label"]
            found[rollout.id] = chosen.choice([0.8, 0.9, 1.0]) if right == (chosen.random() < 0.9) else chosen.choice([0.0, 0.2, 0.5])
    return found


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", default="rated")
parser.add_argument("--to-rate", action="store_true", help="Write what is to be rated, and stop.")
parser.add_argument("--ratings", help="JSON lines of people's ratings.")
parser.add_argument("--rater", choices=["stand-in", "me"], default="stand-in")
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--name", default="rated", help="Of the adapter; a new one each time.")
parser.add_argument("--tasks", type=int, default=150, help="Messages that are sorted, twice each, and rated.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--test-size", type=int, default=60)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

folder, shown = Path(arguments.folder), Console()
folder.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("ASSAY_ADAPTERS", str(folder / "adapters"))
data, store = folder / "messages.jsonl", folder / "a.db"
data.write_text("".join(json.dumps(row) + "\n" for row in messages(arguments.seed)))
job = {"rubric": "classify", "data": str(data), "adapter": "lean", "seed": arguments.seed, "store": store, "progress": shown}

if not store.exists():
    assay.collect("classify", **job, model=arguments.model, n=2, sizes={"train": arguments.tasks}, parameters={"temperature": 1.0})
with assay.Store(store) as opened:
    rollouts = [opened.rollout(one.id) for one in opened.rollouts(limit=None) if one.phase == "collect"]
    (folder / "to_rate.jsonl").write_text(
        "".join(json.dumps({"rollout": one.id, "text": one.inputs["text"], "answer": one.prediction}) + "\n" for one in rollouts)
    )
    if arguments.to_rate:
        raise SystemExit(f"{len(rollouts)} answers to rate: {folder / 'to_rate.jsonl'}")
    if arguments.ratings:
        lines = Path(arguments.ratings).read_text().splitlines()
        ratings = {row["rollout"]: float(row["rating"]) for row in map(json.loads, filter(str.strip, lines))}
    else:
        ratings = rate(rollouts, arguments.rater, arguments.seed)
    for rollout_id, rating in ratings.items():
        opened.rate(rollout_id, rating)
    right = {one.id for one in rollouts if (one.prediction or {}).get("label") == one.expected["label"]}

rows = folder / f"rows-{len(list(folder.glob('rows-*')))}"
assay.export("sft", rows, store=store, selection=Selection(rated=True), allow_ungated=True)
trained = train_sft(rows, arguments.name, SFTConfig(model=arguments.model, epochs=arguments.epochs, seed=arguments.seed), progress=shown)
assert trained.name is not None
before, after = (
    assay.evaluate("classify", **job, split="test", model=model, parameters={"temperature": 0.1}, sizes={"test": arguments.test_size}).evaluation
    for model in (arguments.model, trained.name)
)
gain = paired_gain(before.scores, after.scores)
kept = [one for one, rating in ratings.items() if rating >= 0.8]
told = {
    "rated": len(ratings), "kept": len(kept), "right among the rated": len(right & set(ratings)) / max(1, len(ratings)),
    "right among the kept": len(right & set(kept)) / max(1, len(kept)), "rows": trained.rows, "before": before.mean, "after": after.mean,
    "gain": gain.to_dict(), "model": trained.name, "rater": "a file" if arguments.ratings else arguments.rater,
}  # fmt: skip
if arguments.json:
    print(json.dumps(told))
else:
    table = Table("", "before", "after", "gain, paired 95 %", title=f"{gain.n} sealed messages")
    table.add_row("right label", f"{before.mean:.2f}", f"{after.mean:.2f}", f"{gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]")
    rich = Rich(highlight=False)
    rich.print(table)
    rich.print(
        f"{told['rated']} rated (by {told['rater']}), {told['kept']} at least 0.8: {told['right among the rated']:.0%} of the rated were right, "
        f"{told['right among the kept']:.0%} of the kept\nmodel: {trained.name}"
    )
