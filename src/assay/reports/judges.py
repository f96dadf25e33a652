"""What pages show of a judge: its reliability card, replays of its anchors over time, and raters next to it.

Replays are charts of how far the verdicts moved and how close an alarm is. Of raters a page shows the agreement as
labels come in, and the items on which they disagree. Calls no model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from markupsafe import Markup

from assay.errors import DataError
from assay.judges.labels import Item, make_items
from assay.judges.quality.agreement import Answers, agreement, ceiling
from assay.judges.quality.card import human_gaps
from assay.judges.questions import Question
from assay.reports.charts import Axis, Dot, Line, lines_chart, points_chart, range_bar, share_bar
from assay.reports.texts import moment, plain, preview
from assay.rubrics.criteria import JudgeSpec
from assay.support.numbers import counted, figure, signed
from assay.support.values import digest_of
from assay.traces.store import tables as schema
from assay.traces.store.store import StoreReads

_OF_CARD = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman")
_NAMES = {
    "accuracy": "same label (accuracy)", "kappa": "Cohen's kappa", "weighted_kappa": "weighted kappa",
    "alpha": "Krippendorff's alpha", "spearman": "rank correlation", "brier": "Brier score",
}  # fmt: skip
_SHADES = 5  # of the cells of the confusion matrix


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of agreement, with its interval and that of the raters among themselves."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    ceiling: float | None
    is_objective: bool
    bar: Markup


@dataclass(frozen=True, kw_only=True)
class CardPage:
    """A reliability card.

    Attributes:
        words: what it says, in a sentence. `tone` is `better`, `worse` or empty.
        n, split: number of the items that it was measured on, and their split.
        confusion: rows of the judge's verdicts: label, and for each human label the number of items and its shade.
        points: the points of the reliability diagram.
    """

    words: str
    tone: str
    n: int
    split: str
    measures: list[Measure]
    labels: list[str]
    confusion: list[tuple[str, list[tuple[float, int, bool]]]]
    diagram: Markup
    points: list[Mapping[str, float]]
    facts: list[tuple[str, str]]
    explained: list[Mapping[str, Any]]
    undefined: list[tuple[str, str]]
    alarms: list[str] = field(default_factory=list)


def card_page(card: Mapping[str, Any]) -> CardPage:
    """A card as its page shows it."""
    agreement, ceiling = card["agreement"], card["ceiling"]
    words, tone = _words(card)
    table = card["confusion"]
    most = max((value for row in table["verdicts_by_people"] for value in row), default=0) or 1
    points = list(card["reliability"])
    dots = [
        Dot(
            x=point["confidence"], y=point["share"], kind="first", size=3 + min(9.0, point["n"] ** 0.5),
            name=f"confidence {point['confidence']:.2f}: {_percent(point['share'])} of raters agree, "
            f"{point['n']:.0f} items",
        )
        for point in points
    ]  # fmt: skip
    return CardPage(
        words=words,
        tone=tone,
        n=agreement["n"],
        split=card["split"],
        measures=[_measure(name, card) for name in _OF_CARD if {agreement[name], ceiling[name]} != {None}],
        labels=list(table["labels"]),
        confusion=[
            (label, [(value, round(_SHADES * value / most), row == at) for at, value in enumerate(values)])
            for row, (label, values) in enumerate(zip(table["labels"], table["verdicts_by_people"], strict=True))
        ],
        diagram=points_chart(
            dots, label="Reliability diagram: share of raters who agree by the confidence of the verdict",
            x=Axis(name="confidence of the verdict", low=0.0, high=1.0),
            y=Axis(name="share of raters who agree", low=0.0, high=1.0), diagonal=True,
        ),
        points=points,
        facts=card_facts(card),
        explained=list(card.get("explained_by") or ()),
        undefined=[(name.replace("_", " "), reason) for name, reason in sorted(card["undefined"].items())],
        alarms=[f"This judge {alarm}." for alarm in card["alarms"]],
    )  # fmt: skip


def _measure(name: str, card: Mapping[str, Any]) -> Measure:
    agreement, ceiling = card["agreement"], card["ceiling"]
    low, high = (agreement["intervals"] or {}).get(name) or (None, None)
    return Measure(
        name=_NAMES[name], value=agreement[name], low=low, high=high, ceiling=ceiling[name],
        is_objective=name == card["objective"], bar=range_bar(agreement[name], low, high, mark=ceiling[name]),
    )  # fmt: skip


def _words(card: Mapping[str, Any]) -> tuple[str, str]:
    """What the card says about trust in the judge, and its tone."""
    name, agreement = card["objective"], card["agreement"]
    value, reached = agreement[name], card["ceiling"][name]
    low, high = (agreement["intervals"] or {}).get(name) or (None, None)
    if value is None:
        return f"It cannot be said how well this judge agrees with raters: {_NAMES[name]} is undefined.", "worse"
    within = f" (95 % interval {figure(low)} to {figure(high)})" if low is not None else ", too few for an interval"
    raters = f" Raters reach {figure(reached)} with each other." if reached is not None else ""
    measure = f"{_NAMES[name][0].upper()}{_NAMES[name][1:]}"
    text = f"{measure} with raters: {figure(value)} on {agreement['n']} items of {card['split']}"
    if alarms := len(card["alarms"]):
        broken = f" It breaks {counted(alarms, 'rules')}, listed below."
    else:
        broken = " It breaks no rule." if low is not None else " So few items do not show whether it can be trusted."
    is_better = low is not None and low > 0 and name != "brier"
    return f"{text}{within}.{raters}{broken}", "worse" if alarms else "better" if is_better else ""


def card_facts(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of the measurements besides agreement."""
    mass, flips, own = card.get("mass"), card["position_flip_rate"], card["self_preference"]
    cost = card["cost_usd_per_verdict"]
    on_scale = "–" if not mass else f"mean {_percent(mass['mean'])}, lowest {_percent(mass['lowest'])}"
    facts = [
        ("of what raters reach", _percent(card["of_ceiling"])),
        ("coverage", _percent(card["coverage"])),
        ("calibration error, Brier", f"{figure(card['calibration_error'])}, {figure(card['brier'])}"),
        ("probability on its scale", on_scale),
        ("same verdict when asked again", _percent(card["test_retest"])),
        ("length bias (rho)", _interval(card["length_bias"], "rho")),
        ("verbosity bias", _interval(card["verbosity_bias"], "mean")),
    ]
    if flips is not None:
        facts.append(("flips when places change", _percent(flips)))
    if own:
        facts.append(("self-preference", _interval(own, "mean")))
    facts.append(("smallest difference it can show", _percent(card["smallest_difference"])))
    return [*facts, ("dollars a verdict", "0" if cost == 0 else figure(cost, 6))]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _interval(bias: Mapping[str, float] | None, name: str) -> str:
    return "–" if bias is None else f"{signed(bias[name], 2)} [{signed(bias['low'], 2)}, {signed(bias['high'], 2)}]"


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """An attack of an audit: how many of its cases the judge decided rightly. `flips` is None where not measured."""

    name: str
    n: int
    share: float
    passed: bool
    flips: float | None
    wrong: Sequence[Mapping[str, Any]]
    bar: Markup


def attack_rows(audit: Mapping[str, Any]) -> list[AttackRow]:
    """The attacks of an audit's report, failed ones first."""
    rows = [
        AttackRow(
            name=name, n=entry["n"], share=entry["share"], passed=entry["passed"], flips=entry["flip_rate"],
            wrong=[{**one, "required": required_words(one)} for one in entry["wrong"]],
            bar=share_bar(entry["share"], kind="better" if entry["passed"] else "worse"),
        )
        for name, entry in audit["attacks"].items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.passed, row.share))


def required_words(wrong: Mapping[str, Any]) -> str:
    """What an audit required of a verdict that was wrong, as the end of a sentence.

    Args:
        wrong: with `rule` and `against`, as in `assay.judges.quality.audit`.
    """
    if wrong["rule"] == "at the bottom":
        return "the lowest value of the scale"
    value = "" if wrong["against"] is None else f", which got {figure(wrong['against'], 2)}"
    rule = {"same": "the same verdict as", "another": "another verdict than"}.get(
        wrong["rule"], f"a value {wrong['rule']} that of"
    )
    return f"{rule} the output that it is compared with{value}"


def tried_text(report: Mapping[str, Any]) -> str:
    """How many of the attacks that were tried a judge passed, and which were not tried."""
    attacks = report["attacks"]
    passed = sum(entry["passed"] for entry in attacks.values())
    text = f"It passes {passed} of the {len(attacks)} attacks that were tried"
    return f"{text}; not tried: {', '.join(report['not_tried'])}" if report.get("not_tried") else text


def bias_text(name: str, entry: Mapping[str, Any]) -> str:
    """The effect of an edit on a judge's verdicts, in one line."""
    if entry["effect"] is None:
        return f"{name}: not tested, {entry['n']} items with a verdict as they are and edited"
    state = "passed" if entry["passed"] else "FAILED"
    noise = "" if entry["noise"] is None else f", noise {entry['noise']:.3f}"
    return f"{name}: {signed(entry['effect'])} of the scale on {entry['n']} items, p {entry['p']:.3g}{noise}: {state}"


def drift_facts(report: Mapping[str, Any]) -> str:
    """A replay of anchors in one line."""
    mean, psi = report["mean_difference"], report["psi"]
    text = f"{report['n']} anchors, mean difference {'–' if mean is None else f'{signed(mean)}'} of the scale, "
    if flips := report.get("flips"):
        text += f"{flips['n']} verdicts changed ({flips['rises']} up, {flips['falls']} down)"
    else:
        text += f"CUSUM {report['cusum']:.1f} (alarm over {report['cusum_limit']:.1f})"
    return text if psi is None else f"{text}, PSI {psi:.2f} (alarm over {report['psi_limit']:.2f})"


_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
_REACH = 0.1  # least height of the chart of differences, to either side of 0


@dataclass(frozen=True, kw_only=True)
class DriftChart:
    """A chart of replays. `keys` are kind and name of what it draws."""

    heading: str
    note: str
    chart: Markup
    keys: Sequence[tuple[str, str]]


def drift_charts(replays: Sequence[tuple[float, Mapping[str, Any]]]) -> list[DriftChart]:
    """Charts of replays in any order; none of fewer than two.

    Args:
        replays: start, in seconds since the epoch, and the report of `assay judge drift`.
    """
    ordered = sorted(replays, key=lambda replay: replay[0])
    if len(ordered) < 2:
        return []
    first, last = ordered[0][0], ordered[-1][0]
    unit = next((name for name, seconds in _UNITS.items() if last - first >= 2 * seconds), "seconds")
    rows = [((at - first) / _UNITS[unit], at, report) for at, report in ordered]
    charts = [_differences(rows, unit), _alarms(rows, unit)]
    return [chart for chart in charts if chart.chart]


_Rows = Sequence[tuple[float, float, Mapping[str, Any]]]


def _differences(rows: _Rows, unit: str) -> DriftChart:
    known = [(time, at, report) for time, at, report in rows if report["mean_difference"] is not None]
    reach = max([_REACH, *(abs(report["mean_difference"]) for _, _, report in known)])
    dots = [
        Dot(
            x=time, y=report["mean_difference"], kind="fourth" if report["alarms"] else "first",
            name=f"{moment(at)}: {signed(report['mean_difference'])}{', drifted' if report['alarms'] else ''}",
        )
        for time, at, report in known
    ]  # fmt: skip
    last = rows[-1][0]
    steps = [
        Line(name="as frozen", points=[(0.0, 0.0), (last, 0.0)]),
        Line(name="replays", points=[(dot.x, dot.y) for dot in dots], kind="faint first"),
    ]
    return DriftChart(
        heading="Verdicts less frozen ones",
        note="Mean over the anchors, as a share of the scale; 0 is where they were frozen",
        keys=[("first", "no drift"), ("fourth", "drifted")],
        chart=points_chart(
            dots, label="Mean difference of verdicts over time",
            x=Axis(name=f"{unit} since the first shown"),
            y=Axis(name="mean difference", low=-reach, high=reach), steps=steps,
        ),
    )  # fmt: skip


def _alarms(rows: _Rows, unit: str) -> DriftChart:
    lines, keys = [], []
    for name, value, limit, kind in (("CUSUM", "cusum", "cusum_limit", "first"), ("PSI", "psi", "psi_limit", "second")):
        points = [
            (time, report[value] / report[limit])
            for time, _, report in rows
            if report.get(value) is not None and report[limit]
        ]
        if points:
            lines.append(Line(name=name, points=points, kind=kind))
            keys.append((kind, name))
    lines.append(Line(name="alarm", points=[(0.0, 1.0), (rows[-1][0], 1.0)], kind="fourth"))
    return DriftChart(
        heading="How close to an alarm",
        note="Each statistic as a share of its limit; above 1 is an alarm",
        keys=[*keys, ("fourth", "limit")],
        chart=lines_chart(
            lines, label="Share of the alarm limits over time", x_name=f"{unit} since the first shown",
            y_name="share of the limit",
        ),
    )  # fmt: skip


_OF_RATERS = ("accuracy", "alpha")
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
    both, judged = ceiling(items, question.spec, measures=_OF_RATERS), _with_judge(items, question.spec, verdicts)
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
        return 0, dict.fromkeys(_OF_RATERS)
    measured = agreement(_answers(judged, spec, verdicts), judged, spec, intervals=False, measures=_OF_RATERS)
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
