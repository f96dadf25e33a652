"""Anchor sets: verdicts of a judge on frozen items, stored and repeated after a change of judge or model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy
import numpy as np

from assay.evaluation import Session
from assay.evaluation.judged import judge_items
from assay.jobs.loading import compiled_parts, load_judge
from assay.judges import Item, Judge
from assay.judges.quality.agreement import Answers
from assay.judges.quality.drift import Anchor, AnchorSet, compare
from assay.judges.reading import scale_masses
from assay.models import sibling
from assay.optimizers.judges import agreement_rubric
from assay.programs import program_version
from assay.rubrics import Rubric
from assay.sources.artifact_files import unproven_note
from assay.support.package import __version__
from assay.support.values import digest_of

ANCHORS = "anchors.json"  # in the folder of a compiled judge


def values_of(answers: Answers, judge: Judge) -> list[float | None]:
    """The value of each verdict in [0, 1]; None for an unscored item or a scale without grades."""
    spec = judge.spec
    values: list[float | None] = []
    for verdict, masses in zip(answers.verdicts, answers.probabilities, strict=True):
        if verdict is None or not spec.graded:
            values.append(None)
        elif masses is None:
            values.append(spec.grade(verdict))
        else:
            values.append(math.fsum(p * spec.grade(label) for label, p in masses.items()))
    return values


def made_by(judge: Judge, session: Session) -> dict[str, str]:
    """Everything that a verdict depends on, by name."""
    config = judge.config
    backend = (sibling(session.lm, judge.model, judge.endpoint) if judge.model else session.lm).recording.backend
    return {
        "model": judge.model or session.lm.model,
        "weights": str(backend.weights or getattr(backend, "address", "")),
        "adapters": " ".join(backend.adapters),
        "question": digest_of(
            {"text": judge.spec.text, "scale": list(judge.spec.scale), "anchors": dict(judge.spec.anchors)}
        ),
        "prompt": program_version(judge, None),
        "calibration": digest_of({"calibration": config.pop("calibration", None)}),
        "settings": digest_of({key: value for key, value in config.items() if key not in ("spec", "model")}),
        "assay": __version__,
        "dspy": dspy.__version__,
    }


def freeze(judge: Judge, items: Sequence[Item], first: Answers, repeat: Answers, session: Session) -> AnchorSet:
    """The anchor set of a judge's verdicts on the items.

    Args:
        first: verdicts on all items.
        repeat: repeated verdicts on the first of them; their deviation from `first` is the judge's noise.
    """
    values, repeated = values_of(first, judge), values_of(repeat, judge)
    gaps = [b - a for a, b in zip(values, repeated, strict=False) if a is not None and b is not None]
    flips = sum(gap != 0 for gap in gaps)
    noise = float(np.std(gaps)) if gaps else 0.0
    anchors = [
        Anchor(dict(item.fields), value, verdict)
        for item, value, verdict in zip(items, values, first.verdicts, strict=True)
    ]
    return AnchorSet(made_by(judge, session), noise, anchors, repeated=len(gaps), flips=flips)


def items_of(frozen: AnchorSet) -> list[Item]:
    """The items of a frozen set, without ratings."""
    return [Item(id=str(index), fields=anchor.fields, ratings=()) for index, anchor in enumerate(frozen.anchors)]


def replay(judge: Judge, frozen: AnchorSet, session: Session) -> dict[str, Any]:
    """Judges the frozen items again and compares: see `assay.judges.quality.drift.compare`."""
    judged = judge_items(judge, items_of(frozen), session, name="anchors", split="anchors")
    written = None  # shares of samples or of votes have few levels
    if scale_masses(judged.raw):
        written = False
    elif all(masses is None for masses in judged.answers.probabilities):
        written = True
    report = compare(frozen, values_of(judged.answers, judge), made_by(judge, session), written=written)
    return {**report, **judged.coverage(judge)}


def replay_changed(source: Any, judge: Judge, session: Session) -> list[str]:
    """Alarms from a replay of a compiled judge's own anchors; each is also reported to the user.

    Replays only if something that its verdicts depend on has changed since it was compiled.

    Args:
        source: where the judge was loaded from. Without an artifact with anchors there are no alarms.
    """
    path = Path(source) / ANCHORS if isinstance(source, str | Path) else None
    if path is None or not path.is_file():
        return []
    frozen = AnchorSet.load(path)
    if dict(frozen.made_by) == made_by(judge, session):
        return []
    with session.phase("anchors"):
        report = replay(judge, frozen, session)
    changed = ", ".join(report["changed"])
    session.progress.say(
        f"the judge {source} was compiled with another {changed}: its {len(frozen.anchors)} anchors were replayed"
    )
    alarms = [f"judge {source}: {alarm}" for alarm in report["alarms"]]
    for alarm in alarms:
        session.progress.say(f"ALARM: {alarm}")
    return alarms


def replay_of_rubric(rubric: Rubric, session: Session) -> list[str]:
    """The alarms of all compiled judges that a rubric uses, with the rubric's judge model."""
    alarms: list[str] = []
    uses: Mapping[str, None] = dict.fromkeys(
        c.judge.use for c in rubric.criteria if c.judge is not None and c.judge.use
    )
    for source in dict.fromkeys(part for use in uses for part in compiled_parts(use)):
        if (note := unproven_note(source)) is not None:
            session.progress.say(f"note: {note}")
        judge = load_judge(source, own_model=session.own_models)
        if isinstance(judge, Judge):
            judge_run = replace(session, lm=session.judge_lm or session.lm, rubric=agreement_rubric(judge.spec))
            alarms += replay_changed(source, judge, judge_run)
    return alarms
