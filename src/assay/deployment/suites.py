"""The validation suite of an agent: tasks and a rubric with thresholds that a candidate must pass before stage 0.

Does not store it (`assay.deployment.suite_records`) or run it (`assay.api.deploy.start`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from assay.support.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class SuiteThresholds(Settings):
    """What a candidate must reach on a validation suite."""

    threshold: float = setting(0.0, "Mean score on the suite that a candidate must reach.", ge=0, le=1)
    pass_rate: float = setting(0.0, "Share of the suite's tasks that a candidate must pass.", ge=0, le=1)
    pass_at: float = setting(0.5, "Minimum score with which a task of the suite counts as passed.", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class Suite(SuiteThresholds):
    """A validation suite. The candidate runs the val split of its tasks."""

    data: str = setting(help="Tasks.")
    rubric: str = setting(help="Rubric.")


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """How a candidate did on the suite; kept with its deployment.

    Attributes:
        score: mean over the scored tasks, with its 95 % interval; NaN without one.
        pass_rate: share of all tasks that were scored and reached `pass_at`.
        missed: the thresholds that were not reached; empty if it passed.
    """

    suite: Suite
    score: float
    low: float
    high: float
    n: int
    unscored: int
    pass_rate: float
    missed: tuple[str, ...]

    @classmethod
    def of(cls, suite: Suite, scores: Mapping[str, float], interval: tuple[float, float]) -> "SuiteResult":
        """From the scores by task id; NaN where unscored."""
        scored = [value for value in scores.values() if value == value]
        mean = sum(scored) / len(scored) if scored else float("nan")
        passed = sum(value >= suite.pass_at for value in scored) / len(scores) if scores else 0.0
        missed = []
        if not mean >= suite.threshold:
            missed.append(f"scores {mean:.3f} on the validation suite, {suite.threshold:g} is needed")
        if passed < suite.pass_rate:
            missed.append(f"passes {passed:.1%} of the validation suite's tasks, {suite.pass_rate:.1%} are needed")
        return cls(
            suite=suite, score=mean, low=interval[0], high=interval[1], n=len(scores),
            unscored=len(scores) - len(scored), pass_rate=passed, missed=tuple(missed),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        values = {name: value if value == value else None for name, value in vars(self).items()}
        return {**values, "suite": asdict(self.suite), "missed": list(self.missed)}
