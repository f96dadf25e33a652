"""A judge of sentiment against the raters of VADER (Hutto and Gilbert, ICWSM 2014), as it comes and compiled, by seed.

RATINGS is the folder `hutto_ICWSM_2014` from the source distribution of vaderSentiment 3.3.2 (additional_resources).
Each seed draws other items, the same number of each class, and splits them by another salt. The rating's sign is the
label.
"""

import argparse
import json
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from claims.storing import Lines

import assay

SCALE = ["negative", "neutral", "positive"]
RATERS = 20  # of an item at most; some tweets have nearly a hundred


def ratings(folder: Path, name: str) -> list[tuple[str, str, list[str]]]:
    """Id, text and the raters' labels of each item."""
    lines = {
        kind: (folder / f"{name}_{kind}.txt").read_text("utf-8", "replace").splitlines()
        for kind in ("GroundTruth", "anonDataRatings")
    }
    texts = {row.split("\t")[0]: row.split("\t")[-1] for row in lines["GroundTruth"]}
    rows = (row.split("\t") for row in lines["anonDataRatings"])
    return [
        (row[0], texts[row[0]], [SCALE[1 + (mark > 0) - (mark < 0)] for mark in json.loads(row[3])[:RATERS]])
        for row in rows
    ]


def write_labels(path: Path, items: list[tuple[str, str, list[str]]], per_class: int, seed: int) -> None:
    classes = defaultdict(list)
    for item in items:
        classes[Counter(item[2]).most_common(1)[0][0]].append(item)
    rng = random.Random(seed)
    with path.open("w") as file:
        for label in SCALE:
            for item_id, text, labels in rng.sample(classes[label], per_class):
                for rater, rating in enumerate(labels):
                    file.write(
                        json.dumps({"item_id": item_id, "output": text, "rater": str(rater), "label": rating}) + "\n"
                    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ratings", type=Path)
    parser.add_argument(
        "--set",
        default="tweets",
        choices=["tweets", "nytEditorialSnippets", "amazonReviewSnippets", "movieReviewSnippets"],
    )
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--optimizer", default="auto")
    parser.add_argument(
        "--objectives", nargs="+", default=["accuracy", "weighted_kappa"], help="one compile each, of the same readings"
    )
    arguments = parser.parse_args()

    items = ratings(arguments.ratings, arguments.set)
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            labels = Path(folder) / "labels.jsonl"
            write_labels(labels, items, arguments.per_class, seed)
            for objective in arguments.objectives:
                data = assay.compile_judge(
                    "What is the sentiment of the text?",
                    labels=str(labels),
                    scale=SCALE,
                    model=arguments.model,
                    seed=seed,
                    salt=f"seed {seed}",
                    optimizer=arguments.optimizer,
                    objective=objective,
                    store=Path(folder) / ".assay" / "a.db",
                    progress=Lines(),
                ).to_dict()
                fields = (
                    "objective",
                    "winner",
                    "sizes",
                    "replaces",
                    "gate",
                    "calls",
                    "ceiling",
                    "test",
                    "candidates",
                    "card",
                )
                print(
                    json.dumps({"set": arguments.set, "seed": seed, **{name: data[name] for name in fields}}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
