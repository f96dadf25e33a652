"""Items with labels of raters."""

import json
from pathlib import Path

from assay.judges.labels import Item, Rating


def item(number: int, *labels: str) -> Item:
    return Item(
        id=str(number),
        fields={"output": f"text {number}"},
        ratings=tuple(Rating(rater=str(i), label=label) for i, label in enumerate(labels)),
    )


def labels_file(folder: Path, *, good: str = "good", count: int = 30) -> str:
    """A file of outputs, half of them with a word for good ones and the label yes."""
    rows = [
        {"input": f"q{at}", "output": f"{word} answer {at}", "rater": "r", "label": label}
        for at in range(count)
        for word, label in ((good, "yes"), ("bad", "no"))
    ]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "labels.jsonl")
