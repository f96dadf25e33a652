"""The result of a run in a few lines, from its report."""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.reports.markdown import with_interval

__all__ = ["result_lines"]


def result_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Score, gain and artifact of a run of `compile`, `judge compile` or `tune`, where its report has them."""
    test = report.get("test") or {}
    after = test.get("compiled") or test.get("tuned") or {}
    if isinstance(after.get("score"), float):
        yield f"score on test: {after['score']:.3f} ({after['n']} tasks)"
    for name, gain in (("gate", report.get("gate")), ("test", test.get("gain"))):
        if gain and gain.get("mean") is not None:
            yield f"gain on {name}: {with_interval({**gain, 'n': None})}"
    if report.get("artifact"):
        yield f"artifact: {report['artifact']}"
