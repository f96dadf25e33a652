"""The result of a run or an artifact in a few words, from its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.reports.markdown import with_interval
from assay.support.numbers import counted, figure


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """Mean scores of a run, on test if it has one; None for what it has not."""

    before: float | None = None
    after: float | None = None


def run_scores(report: Mapping[str, Any]) -> RunScores:
    """Mean scores on test of a run of `compile`, `tune` or `train`, from its report."""
    validations = report.get("validation") or {}  # of a training, by rubric and sampling
    for sides in (report.get("test"), *(next(iter(modes.values()), None) for modes in validations.values())):
        if isinstance(sides, Mapping):
            before = _score_of(sides, ("baseline", "default", "before"))
            after = _score_of(sides, ("compiled", "tuned", "after"))
            if after is not None:
                return RunScores(before=before, after=after)
    return RunScores()


def _score_of(sides: Mapping[str, Any], names: Sequence[str]) -> float | None:
    parts = (sides.get(name) for name in names)
    scores = (part.get("score") for part in parts if isinstance(part, Mapping))
    return next((float(score) for score in scores if isinstance(score, int | float)), None)


def result_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Score, agreement and gain of an artifact, where its report has them."""
    test = report.get("test") or {}
    after = test.get("compiled") or test.get("tuned") or {}
    if isinstance(after.get("score"), float):
        yield f"score on test: {after['score']:.3f} ({counted(after['n'], 'tasks')})"
    if (card := report.get("card")) and (measure := card.get("objective")):
        name, agreement = measure.replace("_", " "), card["agreement"]
        value, reach = figure(agreement[measure]), figure(card["ceiling"][measure])
        items = f"{agreement['n']} items of {card['split']}"
        yield f"{name} with raters: {value} on {items}; raters with each other: {reach}"
    for name, gain in (("gate", report.get("gate")), ("test", test.get("gain"))):
        if gain and gain.get("mean") is not None:
            yield f"gain on {name}: {with_interval({**gain, 'n': None})}"
