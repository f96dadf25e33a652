"""Accuracy of a judge of tweets on sealed items, calibrated on human ratings and uncompiled.

Where gate keeps the uncompiled judge, both are its accuracy on the gate items.

The ratings are those of VADER (Hutto and Gilbert, ICWSM 2014), read by `benchmarks/judges.py` from the source
distribution of vaderSentiment. Each seed draws its items and splits them by another salt. An item's accuracy is 1 if
the verdict is the label that most raters chose; tied labels share it.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from judges import SCALE, ratings, write_labels

import assay
from assay.judges import Item, load_labels, split_items
from assay.judges.quality.agreement import Answers
from claims.storing import Lines, Measured, Setting

PER_CLASS = 120
QUESTION = "What is the sentiment of the text?"
SOURCE, FOLDER = "vaderSentiment==3.3.2", "hutto_ICWSM_2014"


def measure(setting: Setting) -> Measured:
    labels, salt = setting.scratch / "labels.jsonl", f"seed {setting.seed}"
    write_labels(labels, ratings(downloaded(setting.downloads), "tweets"), PER_CLASS, setting.seed)
    report = assay.compile_judge(
        QUESTION,
        labels=str(labels),
        scale=SCALE,
        model=setting.model,
        seed=setting.seed,
        salt=salt,
        optimizer="calibrate",
        objective="accuracy",
        store=setting.scratch / "judge.db",
        out=setting.scratch / "judge",
        progress=Lines(),
    )
    outcome = report.outcome
    items = getattr(split_items(load_labels(str(labels), labels=SCALE), salt=salt), outcome.split)
    sides = {"before": outcome.before or outcome.judged, "after": outcome.judged}
    values = {side: accuracies(items, judged.answers) for side, judged in sides.items()}
    stated = {"before": outcome.test_baseline or outcome.agreement, "after": outcome.agreement}
    facts = {
        "winner": outcome.winner,
        "replaces": outcome.replaces,
        "accuracy": {side: agreement.values["accuracy"] for side, agreement in stated.items()},
        "calls": report.calls,
    }
    return Measured(values={"accuracy": values}, facts=facts)


def accuracies(items: list[Item], answers: Answers) -> dict[str, float]:
    judged = zip(items, answers.verdicts, strict=True)
    return {
        item.id: float("nan") if verdict is None else (verdict in item.modes) / len(item.modes)
        for item, verdict in judged
    }


def downloaded(folder: Path) -> Path:
    """The folder with the ratings, from the package registry if it is not there."""
    target = folder / FOLDER
    if not target.is_dir():
        words = ["download", "--quiet", "--no-binary", ":all:", "--no-deps", "--dest", str(folder), SOURCE]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (source,) = folder.glob("vader*.tar.gz")
        with tarfile.open(source) as outer:
            name = next(name for name in outer.getnames() if name.endswith(f"{FOLDER}.tar.gz"))
            file = outer.extractfile(name)
            assert file is not None
            inner = io.BytesIO(file.read())
        with tarfile.open(fileobj=inner) as archive:
            archive.extractall(folder, filter="data")
    return target
