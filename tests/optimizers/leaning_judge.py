"""A biased model, labels that disagree with it, and judges compiled from them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import assay
from assay.testing import scripted_lm

SCALE = ["negative", "neutral", "positive"]
WORDS = {"negative": "awful", "neutral": "plain", "positive": "lovely"}
MOODS = {"text": "Which mood?", "scale": SCALE}
SIZES = {"train": 36, "val": 30, "gate": 30, "test": 30}
FEW = {"train": 18, "val": 20, "gate": 20, "test": 20}


def labels_file(
    path: Path, *, count: int = 300, raters: int = 3, noise: float = 0.1, text: Callable[[int], str] | None = None
) -> str:
    """Items whose text names its class, rated by raters with occasional errors."""
    rng, rows = random.Random(0), []
    for number in range(count):
        truth = SCALE[number % 3]
        output = text(number) if text else f"{WORDS[truth]} thing {number}"
        for rater in range(raters):
            label = rng.choice(SCALE) if rng.random() < noise else truth
            item = {"item_id": str(number), "output": output, "rater": f"r{rater}", "label": label}
            rows.append({**item, "rationale": f"it says {WORDS[truth]}"})
    return write_rows(path, rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def truth_of(request: Any) -> str:
    text = request.messages[-1].text or ""
    return next((label for label, word in WORDS.items() if word in text), "neutral")


def leaning(request: Any, lean: float = 0.4) -> Any:
    """A model that prefers positive by `lean`: almost always says it, and only its probabilities tell the classes."""
    if not request.config.logprobs:
        return json.dumps(
            {
                "verdict": "positive",
                "reasoning": "r",
                "proposed_instruction": "Judge the mood.",
                "proposed_prefix_for_output_field": "Verdict:",
                "natural_language_rules": "rule",
            }
        )
    odds = {"negative": 0.05, "neutral": 0.1, "positive": 0.1 + lean}
    odds[truth_of(request)] += 0.2
    letters = "one letter" in (request.system or str(request.messages[0].text))
    return dict(zip("ABC", odds.values(), strict=True)) if letters else odds


QUESTION = "What is the mood of the text?"


def compiled(folder: Path, script: Any = leaning, *, judge: Any = QUESTION, logprobs: bool = True, **more: Any) -> Any:
    labels = more.pop("labels", None) or labels_file(folder / "labels.jsonl")
    options = {"sizes": SIZES, "store": folder / ".assay" / "a.db", **more}
    if judge == QUESTION:
        options = {"scale": SCALE, **options}
    return assay.compile_judge(judge, labels=labels, lm=scripted_lm(script, logprobs=logprobs), **options)
