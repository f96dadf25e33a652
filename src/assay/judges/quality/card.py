"""Reliability card of a judge: agreement, biases and alarms as JSON. Calls no model."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.judges.labels import Item, output_name
from assay.judges.quality.agreement import Agreement, Answers
from assay.rubrics import JudgeSpec
from assay.support.numbers import figure, signed

# -- Calibration error of a judge's confidence.


def calibration_error(
    answers: Answers, items: Sequence[Item], *, bins: int = 10
) -> tuple[float | None, list[dict[str, float]]]:
    """Returns the expected calibration error of the confidence, and the points of the reliability diagram.

    Each point has the mean `confidence`, the `share` of raters who chose the verdict's label, and `n`. The error is the
    mean gap between the two, weighted by n, in [0, 1]; None if no verdict has probabilities.

    Source: Naeini et al. 2015.
    """
    pairs = [
        (probabilities[verdict], item.shares.get(verdict, 0.0))
        for verdict, probabilities, item in zip(answers.verdicts, answers.probabilities, items, strict=False)
        if verdict is not None and probabilities is not None
    ]
    points = []
    for index in range(bins):
        inside = [(c, s) for c, s in pairs if index / bins < c <= (index + 1) / bins or (index == 0 and c == 0)]
        if inside:
            confidence, share = (math.fsum(column) / len(inside) for column in zip(*inside, strict=True))
            points.append({"confidence": confidence, "share": share, "n": float(len(inside))})
    if not pairs:
        return None, []
    return math.fsum(p["n"] * abs(p["confidence"] - p["share"]) for p in points) / len(pairs), points


# -- Finds words and features of outputs that explain the difference between a judge and its raters. Calls no model.
#
# A judge with one bias can agree well with raters and pass every attack that does not test that bias. This scan tests
# all common words and some features at once:
#
# 1. The part explained by the raters' mean is removed from the difference and from the features, because a noisy judge
#    underrates the best outputs and thereby every word in them.
# 2. Features are selected one by one, by their statistic alone or within a ridge regression on all features.
# 3. A permutation test of the largest statistic corrects for multiple testing (Westfall and Young 1993; residuals are
#    permuted as in Freedman and Lane 1983).


FEWEST = 40  # minimum number of verdicts
_PERMUTATIONS = 999
_MOST_WORDS = 400
_LEAST_SHARE = 0.03  # minimum share of outputs that contain a word, and of outputs that do not
_LEAST_COUNT = 4
_RIDGE = 0.3  # penalty, as a share of the mean eigenvalue
_LEVEL = 0.05
_SHAPES: Mapping[str, str] = {
    "an exclamation mark": r"!",
    "a question mark": r"\?",
    "a digit": r"\d",
    "a link": r"https?://|www\.",
    "a list": r"(?m)^\s*(?:[-*+]|\d+[.)])\s",
    "a heading": r"(?m)^#{1,6}\s",
    "bold text": r"\*\*[^*]+\*\*",
    "a table": r"(?m)^\s*\|.*\|",
    "code": r"`[^`]+`",
    "a quotation": r"[\"“”»«]",
    "words in capitals": r"\b[A-Z]{3,}\b",
    "an emoji": r"[\U0001F300-\U0001FAFF☀-➿]",
    "an ellipsis": r"\.\.\.|…",
    "first person": r"(?i)\b(?:I|I'm|my|me)\b",
    "an apology": r"(?i)\b(?:sorry|apologi[sz]e)\b",
    "certainty": r"(?i)\b(?:certainly|definitely|absolutely|undoubtedly)\b",
}


def explained_by(
    outputs: Sequence[str | tuple[str, str]], gaps: Sequence[float], human: Sequence[float], *, seed: int = 0
) -> list[dict[str, Any]] | None:
    """Finds features that explain the gaps.

    Args:
        outputs: judged outputs, in order. For a pair, both outputs; its features are those of the second minus those of
            the first.
        gaps: the judge's position minus the raters' mean, as a share of the scale.
        human: the raters' mean position, in any unit.
    Returns:
        One row per feature, largest effect first; None for fewer than 40 gaps or if all are equal.
        `effect` is the change with the feature (for length: per standard deviation), as a share of the scale, with the
        other listed features held fixed. `low` and `high` are simultaneous 95 % intervals of all listed effects. `p` is
        corrected for all tested features. `n` is the number of outputs with the feature.
    """
    y = np.asarray(gaps, dtype=float)
    if len(y) < FEWEST or np.ptp(y) == 0:
        return None
    names, matrix = features_of(outputs)
    if not names:
        return []
    controls = _control_basis(np.asarray(human, dtype=float))
    chosen = _selected(matrix, controls, y, seed)
    effects = _effects(matrix[:, [at for at, _ in chosen]], controls, y)
    rows = [
        {
            "feature": names[at],
            "effect": effect,
            "low": low,
            "high": high,
            "p": p,
            "n": int(np.count_nonzero(matrix[:, at])),
        }
        for (at, p), (effect, low, high) in zip(chosen, effects, strict=True)
    ]
    return sorted(rows, key=lambda row: -abs(float(row["effect"])))


def features_of(outputs: Sequence[str | tuple[str, str]]) -> tuple[list[str], np.ndarray]:
    """Returns names and a matrix of outputs by features.

    A feature is the presence of a pattern or a word, or the standardized logarithm of the length.
    """
    texts = [text for output in outputs for text in (output if isinstance(output, tuple) else (output,))]
    words = [set(re.findall(r"\w+", text.casefold())) for text in texts]
    counts = Counter(word for distinct in words for word in distinct)
    least = max(_LEAST_COUNT, math.ceil(_LEAST_SHARE * len(texts)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))  # the order of a set is not deterministic
    common = [word for word in ranked if least <= counts[word] <= len(texts) - least][:_MOST_WORDS]
    groups: dict[tuple[bool, ...], list[str]] = {}  # words that occur in the same outputs are one feature
    for word in common:
        groups.setdefault(tuple(word in distinct for distinct in words), []).append(word)
    columns = {_feature_name(group): [float(present) for present in column] for column, group in groups.items()}
    columns |= {shape: [float(bool(re.search(pattern, text))) for text in texts] for shape, pattern in _SHAPES.items()}
    lengths = np.log1p([len(text) for text in texts])
    columns["length"] = list((lengths - lengths.mean()) / (lengths.std() or 1.0))
    matrix = np.array(list(columns.values()), dtype=float).T
    if outputs and isinstance(outputs[0], tuple):
        matrix = matrix[1::2] - matrix[::2]
    enough = np.array(
        [name == "length" or least <= np.count_nonzero(column) for name, column in zip(columns, matrix.T, strict=True)],
        dtype=bool,
    )
    return [name for name, keep in zip(columns, enough, strict=True) if keep], matrix[:, enough]


def _feature_name(words: Sequence[str]) -> str:
    listed = ", ".join(repr(word) for word in words[:3])
    return f"the word {listed}" if len(words) == 1 else f"the words {listed}"


def _control_basis(human: np.ndarray) -> np.ndarray:
    """Orthonormal basis of a constant, the raters' position and its square."""
    scaled = (human - human.mean()) / (human.std() or 1.0)
    basis, triangle = np.linalg.qr(np.column_stack([np.ones(len(human)), scaled, scaled**2]))
    return np.asarray(basis[:, np.abs(np.diag(triangle)) > 1e-9])


def _selected(matrix: np.ndarray, controls: np.ndarray, y: np.ndarray, seed: int) -> list[tuple[int, float]]:
    """Selects features one by one, each with its corrected p, until none explains the remaining difference."""
    chosen: list[tuple[int, float]] = []
    for _ in range(max(1, len(y) // 10)):
        basis, triangle = np.linalg.qr(np.column_stack([controls, matrix[:, [at for at, _ in chosen]]]))
        basis = basis[:, np.abs(np.diag(triangle)) > 1e-9]
        x, rest = matrix - basis @ (basis.T @ matrix), y - basis @ (basis.T @ y)
        spread = x.std(axis=0)
        candidates = np.flatnonzero(spread > 1e-6)
        if not len(candidates) or rest.std() < 1e-9:
            break
        best, p = _strongest(x[:, candidates] / spread[candidates], rest, seed)
        if p > _LEVEL:
            break
        chosen.append((int(candidates[best]), p))
    return chosen


def _strongest(x: np.ndarray, rest: np.ndarray, seed: int) -> tuple[int, float]:
    """The feature with the largest statistic, and the share of permutations whose largest statistic is at least that.

    Both the feature alone and its part in the ridge regression are tested: correlated features share their part in the
    regression, and a single feature can be masked by another.
    """
    gram = x @ x.T
    ridge = x.T @ np.linalg.inv(gram + _RIDGE * max(float(np.trace(gram)) / len(gram), 1e-9) * np.eye(len(gram)))
    weights = np.concatenate([part / np.sqrt((part**2).sum(axis=1, keepdims=True)) for part in (x.T, ridge)])
    rng = np.random.default_rng(seed)
    solo = np.abs(weights @ rest)
    best = int(solo.argmax())
    largest = np.array([np.abs(weights @ rng.permutation(rest)).max() for _ in range(_PERMUTATIONS)])
    return best % x.shape[1], float((1 + np.count_nonzero(largest >= solo[best] - 1e-12)) / (1 + _PERMUTATIONS))


def _effects(features: np.ndarray, controls: np.ndarray, y: np.ndarray) -> list[tuple[float, float, float]]:
    """Least squares of the gap on the chosen features and the controls.

    Standard errors are HC3 (MacKinnon and White 1985); t intervals are Bonferroni-corrected.
    """
    from scipy import stats

    count = features.shape[1]
    if not count:
        return []
    design = np.column_stack([features, controls])
    inverse = np.linalg.pinv(design.T @ design)
    beta = inverse @ design.T @ y
    leverage = np.clip(np.einsum("ij,jk,ik->i", design, inverse, design), 0, 1 - 1e-6)
    scaled = (y - design @ beta) / (1 - leverage)
    errors = np.sqrt(np.diag(inverse @ (design.T * scaled**2) @ design @ inverse))
    reach = stats.t.ppf(1 - _LEVEL / (2 * count), max(1, len(y) - design.shape[1])) * errors
    return [(float(beta[at]), float(beta[at] - reach[at]), float(beta[at] + reach[at])) for at in range(count)]


# -- Card.


_POWER = 1.959964 + 0.841621  # normal quantiles of 0.975 and 0.8: two-sided 5 %, power 80 %
_RESAMPLES = 500
_LITTLE_MASS = 0.1
_FEWEST = 20  # minimum number of items for a bias


def reliability_card(
    answers: Answers,
    items: Sequence[Item],
    spec: JudgeSpec,
    *,
    agreement: Agreement,
    ceiling: Agreement,
    objective: str,
    split: str = "test",
    retest: tuple[Answers, Answers] | None = None,
    padded: tuple[Answers, Answers] | None = None,
    masses: Sequence[float] = (),
    model: str = "",
    cost_usd: float | None = 0.0,
) -> dict[str, Any]:
    """Computes the reliability card, JSON-serializable.

    Values that are undefined or were not measured are null, with the reason in `undefined`. `alarms` lists the rules
    that the judge breaks.

    Args:
        agreement: the judge's agreement with the raters on these items.
        ceiling: the human ceiling, from `assay.judges.quality.agreement.ceiling`.
        split: the split of the items.
        retest: two independent sets of answers to the same items.
        padded: answers to the same items unchanged and with padding (`assay.judges.quality.audit.padded`).
        masses: total probability of the labels of every reading (`assay.judges.reading.scale_masses`).
        model: name of the judge's model. Outputs whose column `model` (`model_a`, `model_b`) names it are its own.
        cost_usd: cost of all verdicts; None if unknown.
    """
    error, points = calibration_error(answers, items)
    measured = _measured(answers, items, spec, retest, padded, masses, model, error)
    best, top = agreement.values[objective], ceiling.values[objective]
    card = {
        "objective": objective,
        "split": split,
        "agreement": agreement.to_dict(),
        "ceiling": ceiling.to_dict(),
        "of_ceiling": None if best is None or not top or top <= 0 else best / top,
        "coverage": agreement.n / (agreement.n + agreement.unscored) if agreement.n + agreement.unscored else 0.0,
        "confusion": {"labels": list(spec.scale), "verdicts_by_people": _confusion(answers, items, spec)},
        **{name: value for name, (value, _) in measured.items()},
        "brier": agreement.values["brier"],
        "reliability": points,
        "cost_usd_per_verdict": None if cost_usd is None else cost_usd / len(items) if items else 0.0,
        "undefined": {**agreement.why, **{name: why for name, (value, why) in measured.items() if value is None}},
    }
    return {**card, "alarms": _alarms(card)}


def _measured(
    answers: Answers,
    items: Sequence[Item],
    spec: JudgeSpec,
    retest: tuple[Answers, Answers] | None,
    padded: tuple[Answers, Answers] | None,
    masses: Sequence[float],
    model: str,
    error: float | None,
) -> dict[str, tuple[Any, str]]:
    """Values of the card with the reason to give if they are undefined."""
    return {
        "calibration_error": (error, "the model gives no probabilities"),
        "test_retest": (_agreement_rate(retest), "not measured"),
        "position_flip_rate": (_flips(answers, spec), "no verdict has two orders"),
        "prefers_first": (_prefers_first(answers, spec), "no verdict has two orders"),
        "mass": (_mass_on_scale(masses), "the verdicts were not read from token probabilities"),
        "length_bias": (_length_bias(answers, items, spec), "fewer than 20 verdicts, or outputs of one length"),
        "explained_by": (
            _explained(answers, items, spec),
            "fewer than 40 verdicts, or the judge differs from the raters equally on all items",
        ),
        "verbosity_bias": (_verbosity(padded, spec), _verbosity_reason(padded, spec)),
        "self_preference": (
            _self_preference(answers, items, spec, model),
            "the labels do not name the models of the outputs",
        ),
        "smallest_difference": (
            _smallest_difference(answers, spec),
            "fewer than two verdicts, all equal, or a nominal scale",
        ),
    }


def _number_text(value: float | None) -> str:
    return "undefined" if value is None else figure(value, 2)


def _alarms(card: dict[str, Any]) -> list[str]:
    """Rules that the judge breaks. The limits are conventions of this project."""
    objective, measures = card["objective"], card["agreement"]
    value, interval = measures[objective], measures["intervals"].get(objective)
    rows = [sum(row) > 0 for row in card["confusion"]["verdicts_by_people"]]
    biases = {
        "length_bias": ("correlates with the length of the output", "rho", 0.3),
        "verbosity_bias": ("changes with padding", "mean", 0.1),
        "self_preference": ("prefers outputs of its own model more than raters do", "mean", 0.05),
    }
    chance = objective != "brier" and interval is not None and interval[0] <= 0
    named = objective.replace("_", " ")
    retest, flips, error = card["test_retest"], card["position_flip_rate"], card["calibration_error"]
    rules = [
        (sum(rows) == 1 and measures["n"] >= _FEWEST, "gives the same verdict to every item"),
        (
            value is None,
            f"cannot be compared with raters: {named} is undefined: {measures['undefined'].get(objective)}",
        ),
        (
            chance,
            f"agrees with raters no better than chance: {named} {_number_text(value)}, "
            f"95 % from {_number_text(interval and interval[0])}",
        ),
        (card["coverage"] < 0.95, f"leaves {1 - card['coverage']:.0%} of the items unscored"),
        (retest is not None and retest < 0.9, f"repeats its verdict in only {retest or 0:.0%} of the items"),
        (flips is not None and flips > 0.2, f"changes its choice with the order in {flips or 0:.0%} of the pairs"),
        (error is not None and error > 0.2, f"has a calibration error of {error or 0:.2f}"),
    ]
    for row in card["explained_by"] or ():
        description, effect = f"outputs with {row['feature']}", f"{signed(row['effect'], 2)} of the scale"
        rules.append((True, f"{_over(row['effect'])} {description}: {effect} compared with raters"))
    mass = card["mass"]
    if mass is not None and mass["mean"] < _LITTLE_MASS:
        rules.append((True, f"puts only {mass['mean']:.0%} of its probability on the labels of its scale"))
    for name, (description, key, limit) in biases.items():
        bias = card[name]
        rules.append(
            (
                bias is not None and abs(bias[key]) >= limit and bias["low"] * bias["high"] > 0,
                f"{description}: {bias and round(bias[key], 3)}",
            )
        )
    return [text for broken, text in rules if broken]


def _confusion(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[list[float]]:
    """Row: verdict; column: human label. Each item is distributed over the labels of its raters."""
    index = {label: i for i, label in enumerate(spec.scale)}
    table = np.zeros((len(index), len(index)))
    for verdict, item in zip(answers.verdicts, items, strict=True):
        if verdict is not None:
            for label, share in item.shares.items():
                table[index[verdict], index[label]] += share
    return [[round(float(cell), 3) for cell in row] for row in table]


def _agreement_rate(retest: tuple[Answers, Answers] | None) -> float | None:
    """Share of items with the same verdict in both runs."""
    pairs = (
        []
        if retest is None
        else [
            (a, b)
            for a, b in zip(retest[0].verdicts, retest[1].verdicts, strict=True)
            if a is not None and b is not None
        ]
    )
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def _mass_on_scale(masses: Sequence[float]) -> dict[str, float] | None:
    """Mean and lowest total probability of the labels before normalization."""
    return {"mean": float(np.mean(masses)), "lowest": min(masses)} if masses else None


def _flips(answers: Answers, spec: JudgeSpec) -> float | None:
    """Share of the pairs for which the preferred output changes with the order."""
    pairs = [orders for orders in answers.orders if orders is not None]
    return sum(orders[0] == orders[1] != spec.scale[1] for orders in pairs) / len(pairs) if pairs else None


def _prefers_first(answers: Answers, spec: JudgeSpec) -> float | None:
    """Share of the first position among verdicts that are not a tie; 0.5 without position bias."""
    named = [
        verdict for orders in answers.orders if orders is not None for verdict in orders if verdict != spec.scale[1]
    ]
    return named.count(spec.scale[0]) / len(named) if named else None


def human_gaps(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[tuple[Item, float]]:
    """The judge's position minus the raters' mean, as a share of the scale; on a nominal scale the judge's error."""
    steps, width = dict(zip(spec.scale, spec.steps, strict=True)), spec.steps[-1] - spec.steps[0]
    rows = []
    for verdict, place, item in zip(answers.verdicts, answers.places, items, strict=True):
        if verdict is not None:
            human = math.fsum(steps[label] * share for label, share in item.shares.items())
            rows.append(
                (item, 1 - item.shares.get(verdict, 0.0) if spec.kind == "nominal" else (place - human) / width)
            )
    return rows


def _length_bias(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> dict[str, float] | None:
    """Partial rank correlation of the judge's position with the output's length, with a bootstrap interval.

    The control variable is the raters' mean position: 0 means that length affects the judge no more than the raters.
    For a pair, the length is that of the second output minus that of the first. On a nominal scale it is Spearman's
    correlation of length and the judge's error.
    """
    rows = [
        (
            _length(item.fields),
            gap,
            math.fsum(step * item.shares.get(label, 0.0) for label, step in zip(spec.scale, spec.steps, strict=True)),
        )
        for item, gap in human_gaps(answers, items, spec)
    ]
    data = np.array(rows, dtype=float)
    if len(rows) < _FEWEST or np.ptp(data[:, 0]) == 0:
        return None
    length, gap, human = data.T
    width = spec.steps[-1] - spec.steps[0]
    judge, control = (gap, np.zeros_like(human)) if spec.kind == "nominal" else (gap * width + human, human)
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(data), (_RESAMPLES, len(data)))
    low, high = np.percentile(partial_correlation(length[draws], judge[draws], control[draws]), [2.5, 97.5])
    return {"rho": float(partial_correlation(length, judge, control)), "low": float(low), "high": float(high)}


def partial_correlation(x: np.ndarray, y: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Correlation of the ranks of x and y after regressing out the ranks of `control`; 0 if nothing is left.

    Along the last axis: arrays of shape (n,) or (resamples, n) give a result of shape () or (resamples,).
    """
    from scipy import stats

    ranks = [stats.rankdata(values, axis=-1) for values in (x, y, control)]
    rank_x, rank_y, base = (values - values.mean(axis=-1, keepdims=True) for values in ranks)
    square = (base * base).sum(axis=-1, keepdims=True)

    def residuals(values: np.ndarray) -> np.ndarray:
        shared = np.divide(
            (values * base).sum(axis=-1, keepdims=True), square, where=square > 0, out=np.zeros_like(square)
        )
        return values - base * shared

    left, right = residuals(rank_x), residuals(rank_y)
    size = np.sqrt((left * left).sum(axis=-1) * (right * right).sum(axis=-1))
    defined = size > 1e-9 * x.shape[-1]
    return np.where(defined, (left * right).sum(axis=-1) / np.where(defined, size, 1.0), 0.0)


def _explained(answers: Answers, items: Sequence[Item], spec: JudgeSpec) -> list[dict[str, Any]] | None:
    """Words and features that explain the judge's difference from its raters; on a nominal scale, its errors."""

    rows = human_gaps(answers, items, spec)
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    human = [math.fsum(steps[label] * share for label, share in item.shares.items()) for item, _ in rows]
    if any(output_name(item.fields) not in item.fields for item, _ in rows):
        return None
    outputs = [
        (str(item.fields["output_a"]), str(item.fields["output_b"]))
        if "output_b" in item.fields
        else str(item.fields[output_name(item.fields)])
        for item, _ in rows
    ]
    return explained_by(outputs, [gap for _, gap in rows], human)


def _over(effect: float) -> str:
    return "overrates" if effect > 0 else "underrates"


def _length(fields: Any) -> int:
    if "output_b" in fields:
        return len(str(fields["output_b"])) - len(str(fields["output_a"]))
    return len(str(fields.get(output_name(fields), "")))


def _verbosity(padded: tuple[Answers, Answers] | None, spec: JudgeSpec) -> dict[str, float] | None:
    """Mean change of the position after padding, as a share of the scale, with a t interval."""
    if padded is None or spec.kind == "nominal":
        return None
    width = spec.steps[-1] - spec.steps[0]
    changes = [
        (after - before) / width
        for a, b, before, after in zip(
            padded[0].verdicts, padded[1].verdicts, padded[0].places, padded[1].places, strict=True
        )
        if a is not None and b is not None
    ]
    return _mean_interval(changes)


def _verbosity_reason(padded: tuple[Answers, Answers] | None, spec: JudgeSpec) -> str:
    if padded is None:
        return "not measured"
    if spec.kind == "nominal":
        return "a nominal scale"
    n_paired = sum(a is not None and b is not None for a, b in zip(padded[0].verdicts, padded[1].verdicts, strict=True))
    return f"{n_paired} items have a verdict with and without padding; at least {_FEWEST} are needed"


def _self_preference(answers: Answers, items: Sequence[Item], spec: JudgeSpec, model: str) -> dict[str, float] | None:
    """Difference of the mean gaps (judge minus raters) between outputs of the judge's own model and others.

    For pairs with one output of each, the mean gap in favor of its own.
    """
    if spec.kind == "nominal" or not model:
        return None
    rows = human_gaps(answers, items, spec)
    pairs = []
    for item, gap in rows:
        first, second = (item.columns.get(name) == model for name in ("model_a", "model_b"))
        if first != second:
            pairs.append(gap if second else -gap)
    if pairs:
        return _mean_interval(pairs)
    same, other = (
        [gap for item, gap in rows if "model" in item.columns and (item.columns["model"] == model) is same_model]
        for same_model in (True, False)
    )
    if min(len(same), len(other)) < _FEWEST:
        return None
    from scipy import stats

    interval = stats.ttest_ind(same, other, equal_var=False).confidence_interval()
    return {
        "mean": float(np.mean(same) - np.mean(other)),
        "low": float(interval.low),
        "high": float(interval.high),
    }


def _mean_interval(values: Sequence[float]) -> dict[str, float] | None:
    from scipy import stats

    if len(values) < _FEWEST:
        return None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def _smallest_difference(answers: Answers, spec: JudgeSpec) -> float | None:
    """Smallest detectable difference between two systems' mean positions, as a share of the scale.

    For as many verdicts of each system as in these answers (two-sided 5 %, power 80 %).
    """
    places = np.array(
        [place for verdict, place in zip(answers.verdicts, answers.places, strict=True) if verdict is not None]
    )
    if len(places) < 2 or spec.kind == "nominal" or np.ptp(places) == 0:
        return None
    return float(_POWER * places.std(ddof=1) * math.sqrt(2 / len(places)) / (spec.steps[-1] - spec.steps[0]))
