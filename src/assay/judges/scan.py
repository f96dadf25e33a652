"""What explains the difference between a judge and its raters: words and features of the outputs. Asks no model.

A judge that is right but lets one thing win agrees well with people and passes every attack that does not try that thing. Here
every word and some features are tried at once. The difference and the features are first rid of what the raters' mean explains
(a noisy judge is below people on their best outputs, and so on every word of these). Then features are chosen one after the other by
their statistic alone or in a ridge regression on all features, and a permutation test of the largest statistic corrects for their
number (Westfall and Young 1993; residuals are permuted as in Freedman and Lane 1983).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["explained_by", "features_of"]

FEWEST = 40  # verdicts under which nothing is claimed
_PERMUTATIONS = 999
_MOST_WORDS = 400
_LEAST_SHARE = 0.03  # of the outputs that must hold a word, and as many that must not
_LEAST_COUNT = 4
_RIDGE = 0.3  # penalty, as a share of the mean eigenvalue
_LEVEL = 0.05
_SHAPES: Mapping[str, str] = {
    "an exclamation mark": r"!", "a question mark": r"\?", "a digit": r"\d", "a link": r"https?://|www\.", "a list": r"(?m)^\s*(?:[-*+]|\d+[.)])\s",
    "a heading": r"(?m)^#{1,6}\s", "bold text": r"\*\*[^*]+\*\*", "a table": r"(?m)^\s*\|.*\|", "code": r"`[^`]+`", "a quotation": r"[\"“”»«]",
    "words in capitals": r"\b[A-Z]{3,}\b", "an emoji": r"[\U0001F300-\U0001FAFF☀-➿]", "an ellipsis": r"\.\.\.|…",
    "first person": r"(?i)\b(?:I|I'm|my|me)\b", "an apology": r"(?i)\b(?:sorry|apologi[sz]e)\b",
    "certainty": r"(?i)\b(?:certainly|definitely|absolutely|undoubtedly)\b",
}  # fmt: skip


def explained_by(
    outputs: Sequence[str | tuple[str, str]], gaps: Sequence[float], people: Sequence[float], *, seed: int = 0
) -> list[dict[str, Any]] | None:
    """Features that explain the gaps, largest effect first; None where there are under 40 gaps or all are alike.

    Args:
        outputs: what was judged, in order; of a pair the first and the second output, and its features are those of the second minus
            those of the first.
        gaps: how far the judge is above its raters, in shares of the scale.
        people: the raters' mean place, in any unit.
    Returns:
        `feature`; `effect` in shares of the scale, of having the feature against not having it (of length: of one standard
        deviation), the other listed features held fixed; `low` and `high`, an interval that holds all the listed effects at once with
        95 %; `p`, corrected for all features tried; `n`, the outputs that have it.
    """
    y = np.asarray(gaps, dtype=float)
    if len(y) < FEWEST or np.ptp(y) == 0:
        return None
    names, matrix = features_of(outputs)
    if not names:
        return []
    held = _held_fixed(np.asarray(people, dtype=float))
    chosen = _selected(matrix, held, y, seed)
    effects = _effects(matrix[:, [at for at, _ in chosen]], held, y)
    rows = [
        {"feature": names[at], "effect": effect, "low": low, "high": high, "p": p, "n": int(np.count_nonzero(matrix[:, at]))}
        for (at, p), (effect, low, high) in zip(chosen, effects, strict=True)
    ]
    return sorted(rows, key=lambda row: -abs(float(row["effect"])))


def features_of(outputs: Sequence[str | tuple[str, str]]) -> tuple[list[str], np.ndarray]:
    """Names, and a matrix of outputs by features: whether an output has a shape or a word, and its length as a standardised logarithm."""
    texts = [text for output in outputs for text in (output if isinstance(output, tuple) else (output,))]
    words = [set(re.findall(r"\w+", text.casefold())) for text in texts]
    counts = Counter(word for found in words for word in found)
    least = max(_LEAST_COUNT, math.ceil(_LEAST_SHARE * len(texts)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))  # a set's own order differs from process to process
    common = [word for word in ranked if least <= counts[word] <= len(texts) - least][:_MOST_WORDS]
    together: dict[tuple[bool, ...], list[str]] = {}  # words of the same outputs are one feature: nothing tells them apart
    for word in common:
        together.setdefault(tuple(word in found for found in words), []).append(word)
    columns = {_named(same): [float(there) for there in column] for column, same in together.items()}
    columns |= {shape: [float(bool(re.search(pattern, text))) for text in texts] for shape, pattern in _SHAPES.items()}
    lengths = np.log1p([len(text) for text in texts])
    columns["length"] = list((lengths - lengths.mean()) / (lengths.std() or 1.0))
    whole = np.array(list(columns.values()), dtype=float).T
    if outputs and isinstance(outputs[0], tuple):
        whole = whole[1::2] - whole[::2]
    enough = np.array([name == "length" or least <= np.count_nonzero(column) for name, column in zip(columns, whole.T, strict=True)], dtype=bool)
    return [name for name, kept in zip(columns, enough, strict=True) if kept], whole[:, enough]


def _named(words: Sequence[str]) -> str:
    shown = ", ".join(repr(word) for word in words[:3])
    return f"the word {shown}" if len(words) == 1 else f"the words {shown}"


def _held_fixed(people: np.ndarray) -> np.ndarray:
    """An orthonormal basis of a constant, the raters' place and its square."""
    scaled = (people - people.mean()) / (people.std() or 1.0)
    basis, triangle = np.linalg.qr(np.column_stack([np.ones(len(people)), scaled, scaled**2]))
    return np.asarray(basis[:, np.abs(np.diag(triangle)) > 1e-9])


def _selected(matrix: np.ndarray, held: np.ndarray, y: np.ndarray, seed: int) -> list[tuple[int, float]]:
    """Features one after the other, each with its corrected p, until none explains what those before it leave."""
    chosen: list[tuple[int, float]] = []
    for _ in range(max(1, len(y) // 10)):
        basis, triangle = np.linalg.qr(np.column_stack([held, matrix[:, [at for at, _ in chosen]]]))
        basis = basis[:, np.abs(np.diag(triangle)) > 1e-9]
        x, rest = matrix - basis @ (basis.T @ matrix), y - basis @ (basis.T @ y)
        spread = x.std(axis=0)
        left = np.flatnonzero(spread > 1e-6)
        if not len(left) or rest.std() < 1e-9:
            break
        best, p = _most_telling(x[:, left] / spread[left], rest, seed)
        if p > _LEVEL:
            break
        chosen.append((int(left[best]), p))
    return chosen


def _most_telling(x: np.ndarray, rest: np.ndarray, seed: int) -> tuple[int, float]:
    """The feature with the largest statistic, alone or with its part of the ridge regression, and the share of permutations whose
    largest is at least that. Alone, because features that stand together share their part; with its part, because one alone may be
    hidden by another."""
    gram = x @ x.T
    ridge = x.T @ np.linalg.inv(gram + _RIDGE * max(float(np.trace(gram)) / len(gram), 1e-9) * np.eye(len(gram)))
    weights = np.concatenate([part / np.sqrt((part**2).sum(axis=1, keepdims=True)) for part in (x.T, ridge)])
    rng = np.random.default_rng(seed)
    own = np.abs(weights @ rest)
    best = int(own.argmax())
    largest = np.array([np.abs(weights @ rng.permutation(rest)).max() for _ in range(_PERMUTATIONS)])
    return best % x.shape[1], float((1 + np.count_nonzero(largest >= own[best] - 1e-12)) / (1 + _PERMUTATIONS))


def _effects(features: np.ndarray, held: np.ndarray, y: np.ndarray) -> list[tuple[float, float, float]]:
    """Least squares of the gap on the chosen features and what is held fixed, with HC3 errors (MacKinnon and White 1985) and t intervals
    that are corrected for their number (Bonferroni)."""
    from scipy import stats

    count = features.shape[1]
    if not count:
        return []
    design = np.column_stack([features, held])
    inverse = np.linalg.pinv(design.T @ design)
    beta = inverse @ design.T @ y
    leverage = np.clip(np.einsum("ij,jk,ik->i", design, inverse, design), 0, 1 - 1e-6)
    scaled = (y - design @ beta) / (1 - leverage)
    errors = np.sqrt(np.diag(inverse @ (design.T * scaled**2) @ design @ inverse))
    reach = stats.t.ppf(1 - _LEVEL / (2 * count), max(1, len(y) - design.shape[1])) * errors
    return [(float(beta[at]), float(beta[at] - reach[at]), float(beta[at] + reach[at])) for at in range(count)]
