"""Raters next to a judge: agreement as labels come in, and the items on which they disagree. Calls no model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from markupsafe import Markup

from assay.errors import DataError
from assay.judges.labels import Item, make_items
from assay.judges.quality.agreement import Answers, agreement, ceiling
from assay.judges.quality.card import human_gaps
from assay.judges.questions import Question
from assay.reports.charts import Line, lines_chart
from assay.reports.texts import plain, preview
from assay.rubrics.criteria import JudgeSpec
from assay.support.values import digest_of
from assay.traces.store import tables as schema
from assay.traces.store.store import StoreReads

MEASURES = ("accuracy", "alpha")
_CHECKPOINTS = 10
_MOST = 1_000  # items whose verdicts are looked up
_PART = 400  # of them in one query
_PREVIEW = 160


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's verdict on an item, and the rollout in which it was given."""

    label: str
    confidence: float | None
    rollout_id: str


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """An item with the judge's verdict and the raters' labels. `gap` is judge minus raters, as a share of the scale;
    on a nominal scale, the share of raters who chose another label."""

    task: str
    output: str
    verdict: str
    confidence: float | None
    labels: str
    gap: float
    reasons: str
    rollout_id: str


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Agreement after the first labels, and after all. Values are None where they are undefined.

    Attributes:
        raters: number of labels by rater, most first.
        points: labels, agreement of the raters with each other, agreement of the judge with them (alpha).
        shared: number of items with two raters or more.
        same: share of items on which a rater and the others agree, weighted as for the human ceiling.
    """

    labels: int
    items: int
    shared: int
    raters: list[tuple[str, int]]
    points: list[tuple[int, float | None, float | None]]
    same: float | None
    alpha: float | None
    why: str
    judged: int
    judge_same: float | None
    judge_alpha: float | None
    chart: Markup


def label_rows(store: StoreReads, question: Question) -> list[dict[str, Any]]:
    """The labels of a question in the store, oldest first."""
    return list(store.labels(question.key))


def items_of(rows: Iterable[Mapping[str, Any]], question: Question) -> list[Item]:
    """The items of labels; empty without any, or if the labels are not on the question's scale."""
    located = [(f"label {at}", row) for at, row in enumerate(rows, 1)]
    try:
        return make_items(located, labels=question.spec.scale, shows=question.shows) if located else []
    except DataError:
        return []


def growth(rows: Sequence[Mapping[str, Any]], question: Question, verdicts: Mapping[str, Verdict]) -> Growth:
    """Agreement of the raters with each other and with the judge, as their labels came in.

    Args:
        rows: labels, oldest first.
        verdicts: of the judge, by item.
    """
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row["rater"])] = counts.get(str(row["rater"]), 0) + 1
    items = items_of(rows, question)
    both, judged = ceiling(items, question.spec, measures=MEASURES), _with_judge(items, question.spec, verdicts)
    points = []
    for count in dict.fromkeys(round(len(rows) * part / _CHECKPOINTS) for part in range(1, _CHECKPOINTS + 1)):
        first = items_of(rows[:count], question)
        if first:
            raters = ceiling(first, question.spec, measures=("alpha",))
            points.append((count, raters.values["alpha"], _with_judge(first, question.spec, verdicts)[1]["alpha"]))
    lines = [
        Line(name=name, points=[(row[0], value) for row in points if (value := row[at]) is not None], kind=kind)
        for at, (name, kind) in enumerate((("raters with each other", "first"), ("judge with raters", "second")), 1)
    ]  # fmt: skip
    return Growth(
        labels=len(rows), items=len(items), shared=sum(len(item.ratings) > 1 for item in items),
        raters=sorted(counts.items(), key=lambda pair: -pair[1]), points=points,
        same=both.values["accuracy"], alpha=both.values["alpha"], why=both.why.get("alpha", ""), judged=judged[0],
        judge_same=judged[1]["accuracy"], judge_alpha=judged[1]["alpha"],
        chart=lines_chart(
            lines, label="Krippendorff's alpha as labels came in", x_name="labels", y_name="Krippendorff's alpha",
            unit=all(value >= 0 for line in lines for _, value in line.points),  # no tick above 1, which alpha never is
        ),
    )  # fmt: skip


def _with_judge(
    items: Sequence[Item], spec: JudgeSpec, verdicts: Mapping[str, Verdict]
) -> tuple[int, Mapping[str, float | None]]:
    """Number of the items that the judge decided, and its agreement with their raters."""
    judged = [item for item in items if item.id in verdicts]
    if not judged:
        return 0, dict.fromkeys(MEASURES)
    measured = agreement(_answers(judged, spec, verdicts), judged, spec, intervals=False, measures=MEASURES)
    return len(judged), measured.values


def _answers(items: Sequence[Item], spec: JudgeSpec, verdicts: Mapping[str, Verdict]) -> Answers:
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    labels = [verdicts[item.id].label for item in items]
    return Answers(labels, [steps[label] for label in labels])


def disagreements(items: Sequence[Item], spec: JudgeSpec, verdicts: Mapping[str, Verdict]) -> list[Disagreement]:
    """The items that the judge decided, by the distance from their raters; the most distant first."""
    judged = [item for item in items if item.id in verdicts]
    disagreements = []
    for item, gap in human_gaps(_answers(judged, spec, verdicts), judged, spec):
        verdict, fields = verdicts[item.id], item.fields
        disagreements.append(
            Disagreement(
                task=_line(fields.get("task_input")),
                output=" | ".join(_line(fields[name]) for name in _outputs(fields)),
                verdict=verdict.label, confidence=verdict.confidence, labels=_labels(item), gap=float(gap),
                reasons="; ".join(item.rationales)[:300], rollout_id=verdict.rollout_id,
            )
        )  # fmt: skip
    return sorted(disagreements, key=lambda row: (-abs(row.gap), -(row.confidence or 0.0)))


def _outputs(fields: Mapping[str, Any]) -> list[str]:
    named = [name for name in fields if "output" in name]
    return named or [name for name in fields if name != "task_input"]


def _line(value: Any) -> str:
    return "" if value is None else preview(json.dumps({"": plain(value)}), _PREVIEW)


def _labels(item: Item) -> str:
    counts = {label: sum(rating.label == label for rating in item.ratings) for label in item.shares}
    return ", ".join(f"{label} {count}" if len(item.ratings) > 1 else label for label, count in counts.items())


def verdicts_of(
    store: StoreReads, question: Question, items: Sequence[Item], *, version: str = ""
) -> dict[str, Verdict]:
    """The newest verdict of the question's judges on each item, by item.

    Verdicts are found by the task that they are about, and belong to an item if the judge saw the same content.

    Args:
        version: the judge's version whose verdicts count before those of others.
    """
    by_content = {digest_of(item.fields): item.id for item in items[:_MOST]}
    keys = [item.id[:200] for item in items[:_MOST]] + _labelled_tasks(store, question.key)
    runs, by_item, preferred = set(question.runs), dict[str, Verdict](), set[str]()
    for row in _judgements(store, list(dict.fromkeys(keys))):  # oldest first
        prediction = json.loads(row.prediction_json or "{}")
        item_id = by_content.get(digest_of(json.loads(row.inputs_json)))
        own = row.run_id in runs or row.program == question.spec.text[:200]
        if item_id is None or not own or prediction.get("verdict") not in question.spec.scale:
            continue
        if item_id in preferred and row.program_version != version:
            continue
        if version and row.program_version == version:
            preferred.add(item_id)
        confidence = prediction.get("confidence")
        by_item[item_id] = Verdict(label=prediction["verdict"], confidence=confidence, rollout_id=row.id)
    return by_item


def _labelled_tasks(store: StoreReads, key: str) -> list[str]:
    """The tasks of the rollouts that have labels."""
    labels, table = schema.labels, schema.rollouts
    query = sa.select(labels.c.rollout_id).where(labels.c.question == key, labels.c.rollout_id != "").distinct()
    task_ids: list[str] = []
    with store.engine.connect() as connection:
        ids = list(connection.execute(query.limit(_MOST)).scalars())
        for start in range(0, len(ids), _PART):
            some = sa.select(table.c.task_id).where(table.c.id.in_(ids[start : start + _PART]))
            task_ids += connection.execute(some).scalars()
    return task_ids


def _judgements(store: StoreReads, task_ids: Sequence[str]) -> list[Any]:
    """Rollouts of judges on these tasks, oldest first."""
    table = schema.rollouts
    columns = (
        table.c.id, table.c.run_id, table.c.program, table.c.program_version, table.c.inputs_json,
        table.c.prediction_json, table.c.started_at,
    )  # fmt: skip
    rows: list[Any] = []
    with store.engine.connect() as connection:
        for start in range(0, len(task_ids), _PART):
            some = sa.select(*columns).where(
                table.c.task_id.in_(task_ids[start : start + _PART]), table.c.source == "judge"
            )
            rows += connection.execute(some.limit(20 * _PART)).all()
    return sorted(rows, key=lambda row: (row.started_at, row.id))
