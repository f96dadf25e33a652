"""Labels of the shipped judges, drawn from public data, for their cards in `judges/README.md`.

RATINGS as in `judges.py`, PANDALM as in `pandalm.py`, BANKING77 is its `train.csv` (CC-BY-4.0). Writes three files into
OUT; then, for each NAME: `assay judge compile NAME --labels OUT/NAME.jsonl --optimizer calibrate --seed 0`.
"""

import argparse
import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pandalm
from judges import ratings, write_labels

ITEMS = 300


def topics(file: Path) -> Iterator[dict[str, object]]:
    """Messages with a topic, every second with that of another message."""
    rows, rng = list(csv.DictReader(file.open(encoding="utf-8"))), random.Random(0)
    names = sorted({row["category"] for row in rows})
    for at, row in enumerate(rng.sample(rows, ITEMS)):
        is_right = at % 2 == 0
        topic = row["category"] if is_right else rng.choice([name for name in names if name != row["category"]])
        fields = {"input": {"message": row["text"]}, "output": {"topic": topic.replace("_", " ")}}
        yield {"item_id": str(at), **fields, "rater": "banking77", "label": "yes" if is_right else "no"}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ratings", "pandalm", "banking77", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    write_labels(given.out / "sentiment.jsonl", ratings(given.ratings, "tweets"), ITEMS // 3, 0)
    for name, rows in (
        ("better_answer", pandalm.rows(given.pandalm, ITEMS, 0)),
        ("right_topic", topics(given.banking77)),
    ):
        (given.out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
