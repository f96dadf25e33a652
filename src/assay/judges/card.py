"""The reliability card: how far a judge can be trusted, as JSON and as a picture. Asks no model."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import MissingExtra
from assay.judges.agreement import Agreement, Answers, calibration_error
from assay.judges.labels import Item
from assay.rubrics import JudgeSpec

__all__ = ["draw_card", "reliability_card"]

_POWER = 1.959964 + 0.841621  # two-sided 5 %, power 80 %: the normal quantiles of 0.975 and 0.8
_RESAMPLES = 500
_LITTLE_MASS = 0.1
_FEW = 20  # under which nothing is claimed of a bias


def reliability_card(
    answers: Answers,
    items: Sequence[Item],
    spec: JudgeSpec,
    *,
    found: Agreement,
    people: Agreement,
    objective: str,
    retest: tuple[Answers, Answers] | None = None,
    padded: tuple[Answers, Answers] | None = None,
    masses: Sequence[float] = (),
    model: str = "",
    cost_usd: float | None = 0.0,
) -> dict[str, Any]:
    """JSON-ready. What is undefined, or was not measured, is null, and `undefined` says why; `alarms` say what should not be
    trusted, each by the rule that it broke.

    Args:
        found: the judge's agreement with people on these items.
        people: the human ceiling, `assay.judges.agreement.ceiling`.
        retest: two sets of answers to the same items, asked apart.
        padded: answers to the same items as they are, and with words added that say nothing (`assay.judges.audit.padded`).
        masses: of every reading, the probability that was on the scale (`assay.judges.reading.scale_masses`).
        model: that judges, by name: outputs whose column `model` (`model_a`, `model_b`) names it are its own.
        cost_usd: of all verdicts; None where it is not known.
    """
    error, points = calibration_error(answers, items)
    measured = {
        "calibration_error": (error, "the model gives no probabilities"),
        "test_retest": (_same(retest), "not measured"),
        "position_flip_rate": (_flips(answers, spec), "no verdict has two orders"),
        "prefers_first": (_prefers_first(answers, spec), "no verdict has two orders"),
        "mass": (_mass_on_scale(masses), "the verdicts were not read from token probabilities"),
        "length_bias": (_length_bias(answers, items, spec), "fewer than 20 verdicts, or outputs of one length"),
        "explained_by": (_explained(answers, items, spec), "fewer than 40 verdicts, or the judge differs from raters by the same throughout"),
        "verbosity_bias": (_verbosity(padded, spec), _why_no_verbosity(padded, spec)),
        "self_preference": (_self_preference(answers, items, spec, model), "the labels do not tell outputs of the judge's model from others"),
        "smallest_difference": (_smallest_difference(answers, spec), "fewer than two verdicts, all alike, or a scale without an order"),
    }
    best, top = found.values[objective], people.values[objective]
    card = {
        "objective": objective,
        "agreement": found.to_dict(),
        "ceiling": people.to_dict(),
        "of_ceiling": None if best is None or not top or top <= 0 else best / top,
        "coverage": found.n / (found.n + found.unscored) if found.n + found.unscored else 0.0,
        "confusion": {"labels": list(spec.scale), "verdicts_by_people": _confusion(answers, items, spec)},
        **{name: value for name, (value, _) in measured.items()},
        "brier": found.values["brier"],
        "reliability": points,
        "cost_usd_per_verdict": None if cost_usd is None else cost_usd / len(items) if items else 0.0,
        "undefined": {**found.why, **{name: why for name, (value, why) in measured.items() if value is None}},
    }
    return {**card, "alarms": _alarms(card)}


def _short(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _alarms(card: dict[str, Any]) -> list[str]:
    """What should not be trusted. The limits are ours: conventions, not laws."""
    objective, found = card["objective"], card["agreement"]
    value, interval = found[objective], found["intervals"].get(objective)
    rows = [sum(row) > 0 for row in card["confusion"]["verdicts_by_people"]]
    biases = {
        "length_bias": ("follows the length of the output", "rho", 0.3),
        "verbosity_bias": ("changes with words that say nothing", "mean", 0.1),
        "self_preference": ("prefers outputs of its own model beyond people", "mean", 0.05),
    }
    chance = objective != "brier" and interval is not None and interval[0] <= 0
    retest, flips, error = card["test_retest"], card["position_flip_rate"], card["calibration_error"]
    rules = [
        (sum(rows) == 1 and found["n"] >= _FEW, "gives one verdict to everything"),
        (value is None, f"cannot be held against people: {objective} is undefined: {found['undefined'].get(objective)}"),
        (chance, f"agrees with people no better than chance: {objective} {_short(value)}, 95 % from {_short(interval and interval[0])}"),
        (card["coverage"] < 0.95, f"gives no verdict on {1 - card['coverage']:.0%} of the items"),
        (retest is not None and retest < 0.9, f"says the same when asked again only in {retest or 0:.0%}"),
        (flips is not None and flips > 0.2, f"names another output when two change places in {flips or 0:.0%} of the pairs"),
        (error is not None and error > 0.2, f"is {error or 0:.2f} off in its confidence"),
    ]
    for row in card["explained_by"] or ():
        rules.append((True, f"{_over(row['effect'])} outputs with {row['feature']}: {row['effect']:+.2f} of the scale against raters"))
    mass = card["mass"]
    if mass is not None and mass["mean"] < _LITTLE_MASS:
        rules.append((True, f"puts only {mass['mean']:.0%} of its probability on the words of its scale: it would rather say something else"))
    for name, (what, key, limit) in biases.items():
        bias = card[name]
        rules.append((bias is not None and abs(bias[key]) >= limit and bias["low"] * bias["high"] > 0, f"{what}: {bias and round(bias[key], 3)}"))
    return [text for broken, text in rules if broken]


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


def _mass_on_scale(masses: Sequence[float]) -> dict[str, float] | None:
    """Mean and lowest probability that the words of the scale had, before they were made to sum to one."""
    return {"mean": float(np.mean(masses)), "lowest": min(masses)} if masses else None


def _flips(answers: Answers, spec: JudgeSpec) -> float | None:
    """Share of the pairs whose verdict names another output when the two change places."""
    pairs = [orders for orders in answers.orders if orders is not None]
    return sum(orders[0] == orders[1] != spec.scale[1] for orders in pairs) / len(pairs) if pairs else None


def _prefers_first(answers: Answers, spec: JudgeSpec) -> float | None:
    """Share of the verdicts that name an output which name the one shown first: 0.5 where place does not count."""
    named = [verdict for orders in answers.orders if orders is not None for verdict in orders if verdict != spec.scale[1]]
    return named.count(spec.scale[0]) / len(named) if named else None


def _people_gap(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[tuple[Item, float]]:
    """How far the judge's place is above people's mean one, in shares of the scale; on a nominal scale the judge's error."""
    steps, width = dict(zip(spec.scale, spec.steps, strict=True)), spec.steps[-1] - spec.steps[0]
    rows = []
    for verdict, place, item in zip(answers.verdicts, answers.places, items, strict=True):
        if verdict is not None:
            people = math.fsum(steps[label] * share for label, share in item.shares.items())
            rows.append((item, 1 - item.shares.get(verdict, 0.0) if spec.kind == "nominal" else (place - people) / width))
    return rows


def _length_bias(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> dict[str, float] | None:
    """Partial rank correlation of the judge's place with the output's length (of a pair: by how much the second is longer),
    people's mean place held fixed, with a bootstrap interval: 0 where length does not sway the judge beyond people. On a
    nominal scale: Spearman's correlation of length and the judge's error."""
    rows = [
        (_length(item.shown), gap, math.fsum(step * item.shares.get(label, 0.0) for label, step in zip(spec.scale, spec.steps, strict=True)))
        for item, gap in _people_gap(answers, items, spec)
    ]
    data = np.array(rows, dtype=float)
    if len(rows) < _FEW or np.ptp(data[:, 0]) == 0:
        return None
    length, gap, people = data.T
    width = spec.steps[-1] - spec.steps[0]
    judge, held = (gap, np.zeros_like(people)) if spec.kind == "nominal" else (gap * width + people, people)
    rng = np.random.default_rng(0)
    draws = [_partial(length[rows], judge[rows], held[rows]) for rows in (rng.integers(0, len(data), len(data)) for _ in range(_RESAMPLES))]
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"rho": _partial(length, judge, held), "low": float(low), "high": float(high)}


def _partial(x: np.ndarray, y: np.ndarray, held: np.ndarray) -> float:
    """Correlation of the ranks of x and y once each is rid of its linear part in the ranks of `held`; 0 where nothing is left."""
    from scipy import stats

    centred = [ranks - ranks.mean() for ranks in (stats.rankdata(x), stats.rankdata(y), stats.rankdata(held))]
    base = centred[2]
    square = float(base @ base)
    left = [ranks - base * (float(ranks @ base) / square if square else 0.0) for ranks in centred[:2]]
    size = math.sqrt(float(left[0] @ left[0]) * float(left[1] @ left[1]))
    return float(left[0] @ left[1]) / size if size > 1e-9 * len(x) else 0.0


def _explained(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[dict[str, Any]] | None:
    """Words and features that explain the judge minus its raters; on a nominal scale, its errors."""
    from assay.judges.scan import explained_by

    rows = _people_gap(answers, items, spec)
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    people = [math.fsum(steps[label] * share for label, share in item.shares.items()) for item, _ in rows]
    if any("output" not in item.shown and not {"output_a", "output_b"} <= item.shown.keys() for item, _ in rows):
        return None
    outputs = [
        (str(item.shown["output_a"]), str(item.shown["output_b"])) if "output_b" in item.shown else str(item.shown["output"]) for item, _ in rows
    ]
    return explained_by(outputs, [gap for _, gap in rows], people)


def _over(effect: float) -> str:
    return "overrates" if effect > 0 else "underrates"


def _length(shown: Any) -> int:
    if "output_b" in shown:
        return len(str(shown["output_b"])) - len(str(shown["output_a"]))
    return len(str(shown.get("output", "")))


def _verbosity(padded: tuple[Answers, Answers] | None, spec: JudgeSpec) -> dict[str, float] | None:
    """Mean change of the place, in shares of the scale, when words that say nothing are added; with a t interval."""
    if padded is None or spec.kind == "nominal":
        return None
    width = spec.steps[-1] - spec.steps[0]
    changes = [
        (after - before) / width
        for a, b, before, after in zip(padded[0].verdicts, padded[1].verdicts, padded[0].places, padded[1].places, strict=True)
        if a is not None and b is not None
    ]
    return _mean_interval(changes)


def _why_no_verbosity(padded: tuple[Answers, Answers] | None, spec: JudgeSpec) -> str:
    if padded is None:
        return "not measured"
    if spec.kind == "nominal":
        return "a scale without an order"
    both = sum(a is not None and b is not None for a, b in zip(padded[0].verdicts, padded[1].verdicts, strict=True))
    return f"{both} items have a verdict with and without the words, and it needs {_FEW}"


def _self_preference(answers: Answers, items: Sequence[Item], spec: JudgeSpec, model: str) -> dict[str, float] | None:
    """How much further above people the judge puts its own model's outputs than others': the difference of the mean gaps; of
    pairs with one output of each, the mean gap in favour of its own."""
    if spec.kind == "nominal" or not model:
        return None
    rows = _people_gap(answers, items, spec)
    pairs = []
    for item, gap in rows:
        first, second = (item.beside.get(name) == model for name in ("model_a", "model_b"))
        if first != second:
            pairs.append(gap if second else -gap)
    if pairs:
        return _mean_interval(pairs)
    own, others = ([gap for item, gap in rows if "model" in item.beside and (item.beside["model"] == model) is mine] for mine in (True, False))
    if min(len(own), len(others)) < _FEW:
        return None
    from scipy import stats

    interval = stats.ttest_ind(own, others, equal_var=False).confidence_interval()
    return {"mean": float(np.mean(own) - np.mean(others)), "low": float(interval.low), "high": float(interval.high)}


def _mean_interval(values: Sequence[float]) -> dict[str, float] | None:
    from scipy import stats

    if len(values) < _FEW:
        return None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def _smallest_difference(answers: Answers, spec: JudgeSpec) -> float | None:
    """The smallest difference between two systems' mean places, in shares of the scale, that as many verdicts of each as
    stand here would show (two-sided 5 %, power 80 %)."""
    places = np.array([place for verdict, place in zip(answers.verdicts, answers.places, strict=True) if verdict is not None])
    if len(places) < 2 or spec.kind == "nominal" or np.ptp(places) == 0:
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
    middle.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="confidence of the verdict", ylabel="share of people who agree")
    shown = (
        "no probabilities" if card["calibration_error"] is None else f"calibration error {card['calibration_error']:.3f}, Brier {card['brier']:.3f}"
    )
    middle.set_title(f"reliability: {shown}", fontsize=10)
    table, labels = np.array(card["confusion"]["verdicts_by_people"]), card["confusion"]["labels"]
    right.imshow(table, cmap="Blues")
    for (row, column), value in np.ndenumerate(table):
        right.text(column, row, f"{value:.4g}", ha="center", va="center", color="white" if value > table.max() / 2 else "black")
    right.set_xticks(range(len(labels)), labels, rotation=30)
    right.set_yticks(range(len(labels)), labels)
    right.set(xlabel="people", ylabel="judge")
    right.set_title("confusion (items)", fontsize=10)
    figure.suptitle(f"reliability on {card['agreement']['n']} sealed items", fontsize=11)
    figure.savefig(path, dpi=120)
    return path


def _draw_agreement(axes: Any, card: dict[str, Any]) -> None:
    found, people = card["agreement"], card["ceiling"]
    names = [name for name in ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman") if found[name] is not None]
    for at, name in enumerate(names):
        interval = found["intervals"].get(name)
        axes.plot(found[name], at, "o", color="tab:blue", label=("judge, 95 %" if any(found["intervals"].values()) else "judge") if not at else None)
        if interval:
            axes.plot(interval, [at, at], color="tab:blue")
        if people[name] is not None:
            axes.plot(people[name], at, "|", color="tab:red", markersize=16, label="people (one against the others)" if not at else None)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(min(-0.1, *(found[name] for name in names)) if names else -0.1, 1.02))
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    axes.set_title("agreement with people", fontsize=10)
