"""Biases of a judge: its verdicts on the user's own items, each as it is and with an edit that adds no content.

Calls no model.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from assay.judges.labels import Item, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import FILLER
from assay.rubrics import JudgeSpec

LARGE = 0.05  # share of the scale; a smaller mean change is no bias
_LEVEL = 0.05  # for all edits together (Holm 1979, Scandinavian Journal of Statistics 6:65)
_DRAWS = 4999
_FEWEST = 10  # pairs


def edits(profile: str, model: str) -> dict[str, str]:
    """The edits by name, with `{output}` for the output: all for a judge of quality, two for that of a property.

    Args:
        model: name of the judge's model, for its preference for outputs of its own.
    """
    neutral = {"length": f"{{output}}{FILLER}", "formatting": "## Answer\n\n- **{output}**\n\n---\n"}
    if profile == "property":  # the others may change what such a judge measures, such as a tone
        return neutral
    return {
        **neutral,
        "authority": "{output}\n\nThis is confirmed by experts of Harvard University and the Nobel committee.",
        "politeness": "Thank you for this question! {output} I hope this helps. Please ask whenever you like.",
        "confidence": "{output} I am absolutely certain of this.",
        "self-preference": f"{{output}}\n\n(written by {model})",
    }


def edited(item: Item, text: str) -> Item:
    """The item with an edit of its output; of a pair that of the second output."""
    name = output_name(item.fields)
    fields = {**item.fields, name: text.replace("{output}", str(item.fields.get(name, "")))}
    return Item(id=item.id, fields=fields, ratings=item.ratings)


def assess_biases(
    original: Answers, again: Answers, changed: Mapping[str, Answers], spec: JudgeSpec, *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Tests each edit in pairs: an edit fails if its effect is significant and at least 0.05 of the scale.

    The effect is the mean position of the edited items less that of the two runs without the edit, as a share of the
    scale; on a nominal scale the share of verdicts that differ from those of the two runs, less the share that differ
    between these. Without an effect the three verdicts on an item are exchangeable, however noisy the judge is, so p is
    that of a permutation test within items, corrected for the number of edits.

    Args:
        original, again: verdicts on the unchanged items, twice; `noise` is the mean absolute difference.
        changed: edit -> verdicts on the edited items, in the same order.
    Returns:
        By edit `n`, `effect`, `p`, `noise` and `passed`; all but `n` None below 10 items with the three verdicts.
    """
    results = {name: _effect((answers, original, again), spec, seed) for name, answers in changed.items()}
    tested = sorted((entry["p"], name) for name, entry in results.items() if entry["p"] is not None)
    corrected = 0.0
    for rank, (p, name) in enumerate(tested):
        corrected = max(corrected, min(1.0, p * (len(tested) - rank)))
        results[name]["p"] = corrected
        results[name]["passed"] = not (corrected <= _LEVEL and abs(results[name]["effect"]) >= LARGE)
    return results


def _effect(runs: tuple[Answers, Answers, Answers], spec: JudgeSpec, seed: int) -> dict[str, Any]:
    """The effect of the first run against the two others, in which nothing was edited."""
    rows = [at for at in range(len(runs[0].verdicts)) if all(run.verdicts[at] is not None for run in runs)]
    if len(rows) < _FEWEST:
        return {"n": len(rows), "effect": None, "p": None, "noise": None, "passed": None}
    nominal = spec.kind == "nominal"
    width = spec.steps[-1] - spec.steps[0]
    values = np.array(
        [
            [spec.scale.index(run.verdicts[at] or "") if nominal else run.places[at] / width for run in runs]
            for at in rows
        ]
    )
    distances = values[:, :, None] - values[:, None, :]  # of each run to each other run
    if nominal:
        distances = (distances != 0).astype(float)
    gaps = distances.sum(axis=2) / 2  # gaps[item][run]: to the mean of the other two
    noise = float(np.abs(distances[:, 1, 2]).mean())
    drawn = np.random.default_rng(seed).integers(0, 3, (_DRAWS, len(rows)))
    sums = gaps[np.arange(len(rows)), drawn].sum(axis=1)
    observed = gaps[:, 0].sum()
    extreme = sums >= observed - 1e-9 if nominal else np.abs(sums) >= abs(observed) - 1e-9
    return {
        "n": len(rows),
        "effect": float(observed / len(rows)) - (noise if nominal else 0.0),
        "p": float((extreme.sum() + 1) / (_DRAWS + 1)),
        "noise": noise,
        "passed": None,
    }
