"""Means of judge criteria, corrected by human labels (prediction-powered inference)."""

from collections import defaultdict
from dataclasses import asdict
from typing import Any

import numpy as np

from assay.jobs.loading import load_judge
from assay.judges import Judge, PointwiseJudge
from assay.judges.loading import AnyJudge
from assay.judges.quality.drift import FEWEST_PEOPLE, corrected_mean
from assay.judges.questions import item_to_label, key_of, remember
from assay.rubrics import Rubric
from assay.traces import Rollout, Store
from assay.traces.records import NOT_AGENTS


def corrected_means(rubric: Rubric, store: Store, run_id: str, *, file: str = "") -> dict[str, dict[str, Any]]:
    """Means of a run's judge criteria, corrected by labels that `assay judge label` collected for some of its outputs.

    The store gets the questions of these criteria, so that raters can be asked on the local page.

    Args:
        file: the rubric's YAML file, by which its judges are named in commands.
    Returns:
        By criterion, `assay.judges.quality.drift.CorrectedMean` as a mapping. Left out: criteria with fewer than
        20 labelled outputs or fewer than two unlabelled ones.
    """
    judges = _judges_of(rubric)
    for name, judge in judges.items():
        if isinstance(judge, Judge):
            remember(store, judge, f"{file}:{name}" if file else "")
    grades_by_item: dict[str, dict[str, list[float]]] = {}
    for name, judge in judges.items():
        labels: dict[str, list[float]] = defaultdict(list)
        for row in store.labels(key_of(judge)) if judge.spec.graded else ():
            labels[row["item_id"]].append(judge.spec.grade(row["label"]))
        if len(labels) >= FEWEST_PEOPLE:
            grades_by_item[name] = labels
    if not grades_by_item:
        return {}
    columns: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in grades_by_item}
    latest: dict[str, Rollout] = {}
    for rollout in store.rollouts(run_id=run_id):  # newest first
        if rollout.source not in NOT_AGENTS and rollout.prediction:
            latest.setdefault(rollout.task_id, rollout)
    for rollout in latest.values():
        grades = {verdict.criterion: verdict.grade for verdict in rollout.verdicts if verdict.grade is not None}
        for name in columns.keys() & grades.keys():
            label_grades, graded, unlabelled = columns[name]
            entry = item_to_label(rollout, judges[name])
            if entry is not None and entry.item_id in grades_by_item[name]:
                label_grades.append(float(np.mean(grades_by_item[name][entry.item_id])))
                graded.append(grades[name])
            else:
                unlabelled.append(grades[name])
    return {
        name: asdict(corrected_mean(label_grades, graded, unlabelled))
        for name, (label_grades, graded, unlabelled) in columns.items()
        if len(label_grades) >= FEWEST_PEOPLE and len(unlabelled) > 1
    }


def _judges_of(rubric: Rubric) -> dict[str, AnyJudge]:
    """The judges of a rubric's final criteria, by criterion."""
    return {
        c.name: load_judge(c.judge.use, own_model=False) if c.judge.use else PointwiseJudge(c.judge)
        for c in rubric.finals
        if c.judge is not None
    }
