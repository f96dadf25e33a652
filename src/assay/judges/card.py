"""The reliability card: how far a judge can be trusted, as JSON and as a picture. Asks no model."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import MissingExtra
from assay.judges.agreement import Agreement, Answers, brier, calibration_error
from assay.judges.labels import Item
from assay.rubrics import JudgeSpec

__all__ = ["draw_card", "reliability_card"]

_POWER = 1.959964 + 0.841621  # two-sided 5 %, power 80 %: the normal quantiles of 0.975 and 0.8
_RESAMPLES = 500


def reliability_card(
    answers: Answers,
    items: Sequence[Item],
    spec: JudgeSpec,
    *,
    found: Agreement,
    people: Agreement,
    objective: str,
    retest: tuple[Answers, Answers] | None = None,
    cost_usd: float = 0.0,
) -> dict[str, Any]:
    """JSON-ready. What is undefined, or was not measured, is null, and `undefined` says why.

    Args:
        found: the judge's agreement with people on these items.
        people: the human ceiling, `assay.judges.agreement.ceiling`.
        retest: two sets of answers to the same items, asked apart.
        cost_usd: of all verdicts.
    """
    error, points = calibration_error(answers, items)
    undefined: dict[str, str] = {**found.why, "position_flip_rate": "a judge of one output has no positions"}
    undefined["self_preference"] = "outputs of two models are not told apart in these labels"
    length = _length_bias(answers, items, spec)
    if length is None:
        undefined["length_bias"] = "fewer than 20 verdicts, or outputs of one length"
    again = _same(retest)
    if again is None:
        undefined["test_retest"] = "not measured"
    if error is None:
        undefined["calibration_error"] = "the model gives no probabilities"
    best, top = found.values[objective], people.values[objective]
    return {
        "objective": objective,
        "agreement": found.to_dict(),
        "ceiling": people.to_dict(),
        "of_ceiling": None if best is None or not top or top <= 0 else best / top,
        "coverage": found.n / (found.n + found.unscored) if found.n + found.unscored else 0.0,
        "confusion": {"labels": list(spec.scale), "verdicts_by_people": _confusion(answers, items, spec)},
        "calibration_error": error,
        "brier": brier(answers, items, spec),
        "reliability": points,
        "test_retest": again,
        "length_bias": length,
        "position_flip_rate": None,
        "self_preference": None,
        "smallest_difference": _smallest_difference(answers, spec),
        "cost_usd_per_verdict": cost_usd / len(items) if items else 0.0,
        "undefined": undefined,
    }


def _confusion(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[list[float]]:
    """Row: the verdict; column: people's label; each item spread over the labels of its raters."""
    index = {label: i for i, label in enumerate(spec.scale)}
    table = np.zeros((len(index), len(index)))
    for verdict, item in zip(answers.verdicts, items, strict=True):
        if verdict is not None:
            for label, share in item.shares.items():
                table[index[verdict], index[label]] += share
    return [[round(float(cell), 3) for cell in row] for row in table]


def _same(retest: tuple[Answers, Answers] | None) -> float | None:
    """Share of items that got the same verdict twice."""
    pairs = [] if retest is None else [(a, b) for a, b in zip(retest[0].verdicts, retest[1].verdicts, strict=True) if a is not None and b is not None]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def _length_bias(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> dict[str, float] | None:
    """Spearman's correlation of the output's length with how far the judge's place is above people's mean one (on a nominal
    scale: with the judge's error), with a bootstrap interval: 0 where length does not sway the judge beyond people."""
    from scipy import stats

    steps = dict(zip(spec.scale, spec.steps, strict=True))
    rows = []
    for verdict, place, item in zip(answers.verdicts, answers.places, items, strict=True):
        if verdict is None:
            continue
        people = math.fsum(steps[label] * share for label, share in item.shares.items())
        gap = 1 - item.shares.get(verdict, 0.0) if spec.kind == "nominal" else place - people
        rows.append((len(str(item.shown.get("output", ""))), gap))
    data = np.array(rows, dtype=float)
    if len(rows) < 20 or np.ptp(data[:, 0]) == 0 or np.ptp(data[:, 1]) == 0:
        return None
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = [float(stats.spearmanr(*data[rng.integers(0, len(data), len(data))].T).statistic) for _ in range(_RESAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])  # a draw of one place alone has no correlation
    return {"rho": float(stats.spearmanr(*data.T).statistic), "low": float(low), "high": float(high)}


def _smallest_difference(answers: Answers, spec: JudgeSpec) -> float | None:
    """The smallest difference between two systems' mean places, in shares of the scale, that as many verdicts of each as
    stand here would show (two-sided 5 %, power 80 %)."""
    places = np.array([place for verdict, place in zip(answers.verdicts, answers.places, strict=True) if verdict is not None])
    if len(places) < 2 or spec.kind == "nominal":
        return None
    return float(_POWER * places.std(ddof=1) * math.sqrt(2 / len(places)) / (spec.steps[-1] - spec.steps[0]))


def draw_card(card: dict[str, Any], path: Path) -> Path:
    """The card as a PNG: agreement beside the human ceiling, the reliability diagram, the confusion.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_agreement(left, card)
    middle.plot([0, 1], [0, 1], color="0.7", linestyle="--")
    for point in card["reliability"]:
        middle.scatter(point["confidence"], point["share"], s=20 + 3 * point["n"], color="tab:blue")
    middle.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence of the verdict", ylabel="share of people who agree")
    shown = (
        "no probabilities" if card["calibration_error"] is None else f"calibration error {card['calibration_error']:.3f}, Brier {card['brier']:.3f}"
    )
    middle.set_title(f"reliability: {shown}", fontsize=10)
    table, labels = np.array(card["confusion"]["verdicts_by_people"]), card["confusion"]["labels"]
    right.imshow(table, cmap="Blues")
    for (row, column), value in np.ndenumerate(table):
        right.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value > table.max() / 2 else "black")
    right.set_xticks(range(len(labels)), labels, rotation=30)
    right.set_yticks(range(len(labels)), labels)
    right.set(xlabel="people", ylabel="judge")
    right.set_title("confusion (items)", fontsize=10)
    figure.savefig(path, dpi=120)
    return path


def _draw_agreement(axes: Any, card: dict[str, Any]) -> None:
    found, people = card["agreement"], card["ceiling"]
    names = [name for name in ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman") if found[name] is not None]
    for at, name in enumerate(names):
        interval = found["intervals"].get(name)
        axes.plot(found[name], at, "o", color="tab:blue", label="judge, 95 %" if not at else None)
        if interval:
            axes.plot(interval, [at, at], color="tab:blue")
        if people[name] is not None:
            axes.plot(people[name], at, "|", color="tab:red", markersize=16, label="people (one against the others)" if not at else None)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(min(-0.1, *(found[name] for name in names)) if names else -0.1, 1.02))
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title("agreement with people", fontsize=10)
