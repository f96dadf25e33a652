"""Fine-tunes a small model on rated answers and compares it with the model before: `python
examples/finetune_from_ratings.py --folder rated`.

The model sorts customers' messages by topic, with a line of reasoning before each label. The answers are rated from 0
to 1; those rated at least 0.8 are trained on (LoRA, on a CPU). The old and the new weights then sort the same
held-out messages.

Three ways to rate: `--to-rate` writes FOLDER/to_rate.jsonl and stops, and `--ratings FILE` reads the ratings back
(JSON lines of `{"rollout": ID, "rating": 0.9}`); `--rater me` asks at the terminal; by default a simulated rater
knows the right label and errs once in ten. Unrated answers are not trained on.

Prints a table of four metrics before and after (`assay.evaluation.metrics.before_and_after` has the formulas), the
paired gain of the score with its 95 % interval, and the first `--samples` held-out messages with the answer,
confidence and reasoning of both models side by side. `--json` prints one object instead:

- `before`, `after`: `average_confidence`, `task_accuracy`, `response_quality` and `overall_score`, each in [0, 1],
  null where it cannot be measured;
- `samples`: per message `text`, `expected`, and for `before` and `after` the `answer`, `score`, `confidence` and
  `reasoning`;
- `gain`, and what was trained on: `rated`, `kept`, `right_among_rated`, `right_among_kept`, `rows`, `model`, `rater`.

The defaults take many minutes on a CPU. A short run, to see what it prints (too little data to learn anything; about
a minute):

    python examples/finetune_from_ratings.py --folder quick --tasks 12 --answers 1 --epochs 1 --test-size 4 --samples 2
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as Rich
from rich.table import Table

import assay
from assay.cli import Console
from assay.evaluation import paired_gain
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.metrics import TaskRun, before_and_after
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.traces import Rollout
from assay.traces.export.settings import Gates, Selection

KEEP_AT = 0.8  # least rating that is trained on
MESSAGES = {
    "billing": [
        "I was charged twice for {}",
        "The invoice for {} shows a wrong amount",
        "Why is there a fee on my {} payment?",
    ],
    "delivery": [
        "Where is the parcel with {}?",
        "The {} has not arrived yet",
        "The courier left my {} at a wrong door",
    ],
    "returns": [
        "I want to send {} back",
        "How do I return {} that I no longer want?",
        "The {} does not fit, can I exchange it?",
    ],
    "account": [
        "I cannot log in to see my {}",
        "Reset the password of my {} profile",
        "Change the e-mail address that {} is registered to",
    ],
}
THINGS = [
    "a lamp",
    "two chairs",
    "the blue coat",
    "a phone case",
    "running shoes",
    "a kettle",
    "headphones",
    "the desk",
    "a tent",
    "garden tools",
]
ENDINGS = ["", " Please help.", " Thanks!", " This is urgent.", " I ordered on Monday."]


def messages(seed: int) -> list[dict[str, object]]:
    """300 tasks, each a message and its topic."""
    rng = random.Random(seed)
    every = [
        (kind, text.format(thing) + ending)
        for kind, texts in MESSAGES.items()
        for text in texts
        for thing in THINGS
        for ending in ENDINGS
    ]
    return [{"inputs": {"text": text}, "expected": {"label": kind}} for kind, text in rng.sample(every, 300)]


def is_right(rollout: Rollout) -> bool:
    return (rollout.prediction or {}).get("label") == rollout.expected["label"]


def rate(rollouts: Sequence[Rollout], rater: str, seed: int) -> dict[str, float]:
    """Ratings by rollout id; `me` may stop early with an empty line."""
    rng, ratings = random.Random(seed), dict[str, float]()
    for number, rollout in enumerate(rollouts, start=1):
        if rater == "me":
            label = (rollout.prediction or {}).get("label")
            print(
                f"\n[{number} of {len(rollouts)}] {rollout.inputs['text']}\n  -> {label}\n"
                "rating 0 to 1 (Enter: stop): ",
                end="",
                file=sys.stderr,
            )
            text = sys.stdin.readline().strip()
            if not text:
                break
            ratings[rollout.id] = float(text)
        else:
            good = is_right(rollout) == (rng.random() < 0.9)
            ratings[rollout.id] = rng.choice([0.8, 0.9, 1.0]) if good else rng.choice([0.0, 0.2, 0.5])
    return ratings


def metrics(before: Sequence[TaskRun], after: Sequence[TaskRun]) -> dict[str, dict[str, Any]]:
    """The four metrics under `before` and `after`."""
    rows = before_and_after(before, after)
    return {side: {str(row["name"]).replace(" ", "_"): row[side] for row in rows} for side in ("before", "after")}


def reasoning_of(rollout: Rollout) -> str:
    """What the model wrote before the label; empty where it wrote nothing, or gave no label."""
    output = rollout.transitions[-1].output if rollout.transitions else ""
    return output.rpartition("label:")[0].strip().removeprefix("thought:").strip()


def samples(
    before: Evaluation, after: Evaluation, first: Mapping[str, Rollout], second: Mapping[str, Rollout], count: int
) -> list[dict[str, Any]]:
    """The first `count` tasks of both evaluations, not chosen by their scores; `first` and `second` are the rollouts
    by task id."""
    rows = []
    for task_id in [one for one in before.results if one in after.results and one in first and one in second][:count]:
        sides = {}
        for side, evaluation, rollouts in (("before", before, first), ("after", after, second)):
            run, rollout = evaluation.runs[task_id, 0], rollouts[task_id]
            sides[side] = {
                "answer": run.answer,
                "score": run.score,
                "confidence": run.confidence,
                "reasoning": reasoning_of(rollout),
            }
        rollout = first[task_id]
        rows.append({"text": rollout.inputs["text"], "expected": rollout.expected["label"], **sides})
    return rows


def show(result: Mapping[str, Any], held_out: int) -> None:
    """The tables, for people."""
    gain, rich = result["gain"], Rich(highlight=False, markup=False)
    table = Table("", "before", "after", "points", title=f"{held_out} held-out messages")
    for name, old in result["before"].items():
        new = result["after"][name]
        points = "" if old is None or new is None else f"{100 * (new - old):+.1f}"
        table.add_row(
            name.replace("_", " "), *("" if value is None else f"{value:.2f}" for value in (old, new)), points
        )
    rich.print(table)
    rich.print(
        f"gain of the score, paired: {gain['mean']:+.2f}, 95 % interval [{gain['low']:+.2f}, {gain['high']:+.2f}]"
    )
    table = Table("message", "expected", "before", "after", title="Sample interactions", show_lines=True)
    for sample in result["samples"]:
        table.add_row(sample["text"], sample["expected"], *(_cell(sample[side]) for side in ("before", "after")))
    rich.print(table)
    rich.print(
        f"{result['rated']} rated (by {result['rater']}), {result['kept']} at least {KEEP_AT}: "
        f"{result['right_among_rated']:.0%} of the rated were "
        f"right, {result['right_among_kept']:.0%} of the kept\nmodel: {result['model']}"
    )


def _cell(side: Mapping[str, Any]) -> str:
    score, confidence = ("unknown" if side[key] is None else f"{side[key]:.2f}" for key in ("score", "confidence"))
    return f"{side['answer']}\nscore {score}, confidence {confidence}\n{side['reasoning'] or '(no reasoning)'}"


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="rated", help="Folder of the data, the store and the adapter.")
    parser.add_argument("--to-rate", action="store_true", help="Write the answers to rate, and stop.")
    parser.add_argument("--ratings", help="File of ratings, JSON lines.")
    parser.add_argument(
        "--rater", choices=["stand-in", "me"], default="stand-in", help="Who rates where no file is given."
    )
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--name", default="rated", help="Name of the adapter; a new one for each run.")
    parser.add_argument("--tasks", type=int, default=150, help="Number of messages that are sorted and rated.")
    parser.add_argument("--answers", type=int, default=2, help="Answers of each of them.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--test-size", type=int, default=60, help="Number of held-out messages.")
    parser.add_argument(
        "--reasoning-depth", type=int, default=4, help="2 to this power tokens of reasoning; up to 3: none."
    )
    parser.add_argument("--samples", type=int, default=5, help="Number of sample interactions to show.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    return parser.parse_args(words)


def rated_rollouts(
    arguments: argparse.Namespace, folder: Path, job: Mapping[str, Any]
) -> tuple[list[Rollout], dict[str, float]]:
    """Collected answers and their ratings, which are stored too. Answers that the store has are not collected again."""
    store = Path(job["store"])
    if not store.exists():
        parameters = {"temperature": 1.0, "reasoning_depth": arguments.reasoning_depth}
        assay.collect(
            "classify",
            **job,
            model=arguments.model,
            n=arguments.answers,
            sizes={"train": arguments.tasks},
            parameters=parameters,
        )
    with assay.Store(store) as opened:
        rollouts = [opened.rollout(one.id) for one in opened.rollouts(limit=None) if one.phase == "collect"]
        rows = (
            {"rollout": one.id, "text": one.inputs["text"], "answer": one.prediction, "reasoning": reasoning_of(one)}
            for one in rollouts
        )
        (folder / "to_rate.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if arguments.to_rate:
            raise SystemExit(f"{len(rollouts)} answers to rate: {folder / 'to_rate.jsonl'}")
        if arguments.ratings:
            lines = Path(arguments.ratings).read_text().splitlines()
            ratings = {row["rollout"]: float(row["rating"]) for row in map(json.loads, filter(str.strip, lines))}
        else:
            ratings = rate(rollouts, arguments.rater, arguments.seed)
        for rollout_id, rating in ratings.items():
            opened.rate(rollout_id, rating)
    return rollouts, ratings


def evaluated(
    arguments: argparse.Namespace, job: Mapping[str, Any], model: str
) -> tuple[Evaluation, dict[str, Rollout]]:
    """The held-out messages sorted by one model: the evaluation, and its first rollouts by task id."""
    parameters = {"temperature": 0.1, "reasoning_depth": arguments.reasoning_depth}
    evaluation = assay.evaluate(
        "classify", **job, split="test", model=model, parameters=parameters, sizes={"test": arguments.test_size}
    ).evaluation
    rollouts = dict[str, Rollout]()
    wanted = list(evaluation.results)[: arguments.samples]
    with assay.Store(job["store"]) as opened:
        for task_id in wanted:
            newest = next(
                one for one in opened.rollouts(task_id=task_id, split="test", limit=None) if one.phase == "evaluate"
            )
            rollouts[task_id] = opened.rollout(newest.id)
    return evaluation, rollouts


def main() -> None:
    arguments = parsed()
    folder, progress = Path(arguments.folder), Console()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ASSAY_ADAPTERS", str(folder / "adapters"))
    data = folder / "messages.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in messages(arguments.seed)))
    job = {
        "rubric": "classify",
        "data": str(data),
        "prompt_format": "lean",
        "seed": arguments.seed,
        "store": folder / "a.db",
        "progress": progress,
    }

    rollouts, ratings = rated_rollouts(arguments, folder, job)
    rows = folder / f"rows-{len(list(folder.glob('rows-*')))}"
    assay.export("sft", rows, store=job["store"], selection=Selection(rated=True), gates=Gates(min_clean=0))
    config = SFTSettings(model=arguments.model, min_quality=KEEP_AT, epochs=arguments.epochs, seed=arguments.seed)
    trained = train_sft(rows, arguments.name, config, progress=progress)
    if trained.name is None:
        raise SystemExit(
            f"{arguments.model} is not an embedded model, so its adapter {trained.path} cannot be run here: "
            "use --model embedded/NAME"
        )

    (before, first), (after, second) = (evaluated(arguments, job, model) for model in (arguments.model, trained.name))
    right, selected = (
        {one.id for one in rollouts if is_right(one)},
        {one for one, rating in ratings.items() if rating >= KEEP_AT},
    )
    result = {
        **metrics(list(before.runs.values()), list(after.runs.values())),
        "samples": samples(before, after, first, second, arguments.samples),
        "gain": paired_gain(before.scores, after.scores).to_dict(),
        "rated": len(ratings), "kept": len(selected),
        "right_among_rated": len(right & set(ratings)) / max(1, len(ratings)),
        "right_among_kept": len(right & selected) / max(1, len(selected)),
        "rows": trained.rows, "model": trained.name, "rater": "a file" if arguments.ratings else arguments.rater,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, len(before))


if __name__ == "__main__":
    main()
