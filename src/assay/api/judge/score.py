"""Public API for `assay judge score`: judges every row of a dataset."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import dspy
import numpy as np

from assay.api.judge.items import need_fields
from assay.api.judge.session import OPTIONAL, at_work, built_judge, judge_settings, preflight_items, spent_by
from assay.datasets.sources import iter_rows
from assay.datasets.splits import renamed
from assay.errors import BudgetExceeded
from assay.evaluation import Progress, default_progress, mean_interval
from assay.evaluation.judged import Judged, judge_items
from assay.judges import Item, Judge
from assay.judges.labels import make_items
from assay.judges.quality.drift import FEWEST_PEOPLE, corrected_mean
from assay.runs.anchors import replay_changed, values_of
from assay.runs.ending import advised
from assay.runs.settings import JudgeScoreSettings
from assay.runs.settings.options import JudgeScoreOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.places import check_writable, writing
from assay.support.reprs import ReportDict
from assay.support.scrubbing import results
from assay.support.values import json_text

_MAX_REASONS = 3
_FEWEST = 5  # verdicts below which no interval is reported


@takes(JudgeScoreSettings)
@trusts
def score_rows(
    judge: str | Judge, *, data: str, out: str | Path | None = None, lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False, progress: Progress | None = None, **options: Unpack[JudgeScoreOptions],
) -> dict[str, Any]:  # fmt: skip
    """Judges every item of a dataset, and reports the mean value with a 95 % interval.

    Rows have the format of a labels file. Rows with the same content, such as those of several raters, are one item,
    which is judged and counted once. Labels in some rows correct the mean (prediction-powered inference).

    Args:
        out: JSONL file with one line per item: its fields, `verdict`, `value`, `confidence`; `reason` if unscored.
        options: the fields of `assay.runs.settings.JudgeScoreSettings`.
    Raises:
        ConfigError: `out` cannot be written; nothing was judged.
        ModelError: a model of the judge did not answer.
    """
    config, lm = judge_settings(JudgeScoreSettings, judge, lm, data, options)
    if out is not None:
        check_writable(out, "out", inputs=(data, judge))
    built, progress, rename = built_judge(judge, config.scale), default_progress(progress), config.rename
    rows = [(where, renamed(row, rename, where) if rename else row) for where, row in iter_rows(data)]
    items = make_items(
        rows, labels=built.labels, spec=data, unrated=True, shows=built.shows, anchors=built.spec.anchors
    )
    need_fields(built, items, optional=OPTIONAL)
    if not built.spec.graded:
        progress.say("note: the words of this scale have no grades, so there is no mean value")
    with at_work(config, judge, lm, progress, store, resume=resume) as (judge_, session, run):
        if out is not None:
            run.store.put_searched(Path(out))
        try:
            preflight_items(judge_, items, session, config)
            alarms = replay_changed(judge, judge_, session)
            judged = judge_items(judge_, items, session, name="score")
        except BudgetExceeded as cap:
            raise BudgetExceeded(advised(str(cap))) from None
        spent = spent_by(session)
    values = values_of(judged.answers, judge_)
    if out is not None:
        _write(Path(out), items, judged, values)
    reasons = list(dict.fromkeys(reason for reason in judged.reasons if reason))
    report = {
        "n": len(items), "rows": len(rows), "unscored": judged.unscored, "why_unscored": reasons[:_MAX_REASONS],
        **judged.coverage(judge_), "out": str(out) if out else None,
        "labelled": sum(bool(item.ratings) for item in items), "missing_labels": items.gaps, "alarms": alarms,
        "verdicts": {label: judged.answers.verdicts.count(label) for label in judge_.labels},
        **_means(items, values, judge_), **spent,
    }  # fmt: skip
    return ReportDict("Verdicts", report, report["verdicts"])


def _means(items: Sequence[Item], values: Sequence[float | None], judge: Judge) -> dict[str, Any]:
    scored = [value for value in values if value is not None]
    if not scored:
        return {"mean": None, "interval": None, "corrected": None}
    label_grades, graded, unlabelled = [], [], []
    for item, value in zip(items, values, strict=True):
        if value is None:
            continue
        if item.ratings:
            label_grades.append(math.fsum(judge.spec.grade(label) * share for label, share in item.shares.items()))
            graded.append(value)
        else:
            unlabelled.append(value)
    corrected = (
        asdict(corrected_mean(label_grades, graded, unlabelled))
        if len(label_grades) >= FEWEST_PEOPLE and len(unlabelled) > 1
        else None
    )
    return {
        "mean": float(np.mean(scored)),
        "interval": list(mean_interval(scored)) if len(scored) >= _FEWEST else None,
        "corrected": corrected,
    }


def _write(path: Path, items: Sequence[Item], judged: Judged, values: Sequence[float | None]) -> None:
    answers = judged.answers
    with writing(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        for index, item in enumerate(items):
            masses, verdict = answers.probabilities[index], answers.verdicts[index]
            confidence, reason = masses[verdict] if masses and verdict else None, judged.reasons[index] or None
            row = {"verdict": verdict, "value": values[index], "confidence": confidence, "reason": reason}
            line = {"item_id": item.id, **item.fields, **row}
            file.write(json_text(results(line)) + "\n")
