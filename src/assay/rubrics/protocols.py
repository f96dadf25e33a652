"""Protocols for graders and scorers. Imports neither rubrics nor judges.

The runtime-checkable ones can be used with `isinstance` to test which methods an object has.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from assay.datasets.tasks import Task
from assay.rubrics.criteria import Check, Criterion, Grade, NoGrade
from assay.rubrics.scoring import ScoreResult
from assay.traces.records import Rollout


class Grader(Protocol):
    """Grades one prediction on one criterion: a check, or a judge with its model."""

    def __call__(
        self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **arguments: Any
    ) -> bool | float | Grade | None:
        """Returns a grade in [0, 1], higher is better; True is 1.

        If it cannot decide, it returns None or raises `NoGrade`; the criterion is then unscored.
        """


@runtime_checkable
class GroupGrader(Protocol):
    """A grader that compares several predictions of one task: a judge, or a check that is an object.

    Called with one prediction it raises `NoGrade` where it needs the others. A check gets its `with` arguments as
    keywords of `grade_group` too.
    """

    def grade_group(
        self, task: Task, predictions: Sequence[dict[str, Any]], rollouts: Sequence[Rollout | None]
    ) -> Sequence[bool | float | Grade | NoGrade]:
        """Returns one grade per prediction, in the same order; `NoGrade` for a prediction that could not be graded.

        Args:
            rollouts: one entry per prediction; None where a prediction has no rollout.
        """


class JointGrader(Protocol):
    """Grades several criteria of one prediction in a single call."""

    def grade_all(
        self, task: Task, prediction: dict[str, Any], rollout: Rollout | None
    ) -> Mapping[str, Grade | NoGrade]:
        """Returns one grade or `NoGrade` per criterion name, in the order of the criteria."""


class Resolver(Protocol):
    """Returns the grader for a judge criterion."""

    def __call__(self, criterion: Criterion, /) -> Check | None:
        """Returns the grader, or None if no model is available; the rubric then does not score."""


@runtime_checkable
class JointResolver(Protocol):
    """A resolver that also supports grading all criteria in one call (`judging="together"`)."""

    def __call__(self, criterion: Criterion, /) -> Check | None: ...

    def together(self, criteria: Sequence[Criterion]) -> JointGrader | None:
        """Returns one grader for all these criteria, or None if no model is available."""


class Scorer(Protocol):
    """Scores predictions. Implemented by `Rubric`; used by the DSPy metric and the TRL reward."""

    name: str

    @property
    def finals(self) -> tuple[Criterion, ...]: ...

    def score(self, task: Task | Mapping[str, Any], prediction: Any, rollout: Rollout | None = None) -> ScoreResult:
        """Returns the score of one prediction: a value in [0, 1], higher is better; NaN means unscored."""

    def score_group(
        self,
        task: Task | Mapping[str, Any],
        predictions: Sequence[Any],
        rollouts: Sequence[Rollout | None] | None = None,
    ) -> list[ScoreResult]:
        """Returns one score per prediction, in the same order."""
