"""Finds words and features of outputs that explain the difference between a judge and its raters. Calls no model.

A judge with one bias can agree well with raters and pass every attack that does not test that bias. This scan tests all
common words and some features at once:

1. The part explained by the raters' mean is removed from the difference and from the features, because a noisy judge
   underrates the best outputs and thereby every word in them.
2. Features are selected one by one, by their statistic alone or within a ridge regression on all features.
3. A permutation test of the largest statistic corrects for multiple testing (Westfall and Young 1993; residuals are
   permuted as in Freedman and Lane 1983).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
