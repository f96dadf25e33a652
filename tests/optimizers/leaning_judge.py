"""A biased model, labels that disagree with it, and a judge compiled from them."""

import json
import random
from pathlib import Path
from typing import Any

import assay
from assay.testing import scripted_lm

SCALE = "negative,neutral,positive"
WORDS = {"negative": "awful", "neutral": "plain", "positive": "lovely"}


def labels_file(path: Path, *, count: int = 300, raters: int = 3, noise: float = 0.1) -> str:
    """Items whose text names its class, rated by raters with occasional errors."""
    rng, scale = random.Random(0), SCALE.split(",")
    with path.open("w") as file:
        for number in range(count):
            truth = scale[number % 3]
            for rater in range(raters):
                text = rng.choice(scale) if rng.random() < noise else truth
                row = {
                    "item_id": str(number),
                    "output": f"{WORDS[truth]} thing {number}",
                    "rater": f"r{rater}",
                    "label": text,
                    "rationale": f"it says {WORDS[truth]}",
                }
                file.write(json.dumps(row) + "\n")
    return str(path)


def leaning(request: Any) -> Any:
    """A model that almost always says positive; only its probabilities distinguish the classes."""
    text = request.messages[-1].text or ""
    truth = next((label for label, word in WORDS.items() if word in text), "neutral")
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
    odds = {"negative": 0.05, "neutral": 0.1, "positive": 0.5}
    odds[truth] += 0.2
    return {
        (
            chr(ord("A") + SCALE.split(",").index(k))
            if "one letter" in (request.system or str(request.messages[0].text))
            else k
        ): v
        for k, v in odds.items()
    }


def compiled(tmp_path: Path, script: Any = leaning, *, logprobs: bool = True, **options: Any) -> Any:
    labels = options.pop("labels", None) or labels_file(tmp_path / "labels.jsonl")
    options = {
        "scale": SCALE.split(","),
        "sizes": {"train": 36, "val": 30, "gate": 30, "test": 30},
        "store": tmp_path / ".assay" / "a.db",
        **options,
    }
    judge = options.pop("judge", "What is the mood of the text?")
    if not isinstance(judge, str):
        options.pop("scale")
    return assay.compile_judge(judge, labels=labels, lm=scripted_lm(script, logprobs=logprobs), **options)
