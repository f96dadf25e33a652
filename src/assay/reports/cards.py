"""What a page shows of a judge's reliability card. Reads the card, calls no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from assay.reports.charts import Axis, Dot, points_chart, range_bar, share_bar
from assay.support.numbers import counted, figure, signed

MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman")
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
        measures=[_measure(name, card) for name in MEASURES if {agreement[name], ceiling[name]} != {None}],
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
