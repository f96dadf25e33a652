"""Contract of a criterion that code grades."""

import copy
import math
import pickle
from collections.abc import Mapping
from numbers import Real
from typing import Any

from assay.datasets import Task
from assay.rubrics import Criterion, Grade, NoGrade, Rubric
from assay.rubrics.calling import call
from assay.testing.contracts.base import HOSTILE_TEXTS, Contract, require


class CriterionContract(Contract):
    """Checks a criterion with a `check`.

    - The check returns a bool, a number in [0, 1] or a `Grade`. If it cannot decide, it returns None or raises
      `NoGrade`.
    - `higher` gets a higher grade than `lower`. For a pitfall (negative weight) the grade is the degree to which it
      occurred.
    - The same prediction gets the same grade, and neither task nor prediction is changed.
    - Hostile text, other types and missing fields raise nothing but `NoGrade`; no grade is NaN or outside [0, 1].
    - A prediction without a grade is unscored with a reason, never a number.
    - The check can be pickled, which Ray needs for a check of an importable module (unless `pickles = False`).
    """

    pickles = True

    def make(self) -> Criterion:
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def task(self) -> Task:
        """A task that the criterion can grade."""
        raise NotImplementedError(f"{type(self).__name__} must override task()")

    def higher(self) -> Mapping[str, Any]:
        """A prediction for `task` with a higher grade than `lower`."""
        raise NotImplementedError(f"{type(self).__name__} must override higher()")

    def lower(self) -> Mapping[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} must override lower()")

    def test_the_higher_prediction_gets_the_higher_grade(self) -> None:
        high, low = (self._grade(dict(prediction)) for prediction in (self.higher(), self.lower()))
        require(
            high is not None and low is not None, f"grades are {high!r} and {low!r}; both predictions must be graded"
        )
        require((high or 0.0) > (low or 0.0), f"`higher` has the grade {high!r} and `lower` {low!r}")

    def test_the_same_prediction_gets_the_same_grade(self) -> None:
        for prediction in (self.higher(), self.lower()):
            grades = [self._grade(dict(prediction)) for _ in range(3)]
            require(len(set(grades)) == 1, f"grades of one prediction are {grades}")

    def test_task_and_prediction_are_not_changed(self) -> None:
        task, prediction = self.task(), dict(self.higher())
        before = copy.deepcopy((task, prediction))
        self._decide(task, prediction)
        require((task, prediction) == before, f"{before!r} became {(task, prediction)!r}")

    def test_hostile_predictions_raise_nothing(self) -> None:
        fields = list(self.higher())
        odd: list[Any] = [
            *HOSTILE_TEXTS,
            None,
            True,
            math.nan,
            math.inf,
            10**400,
            [],
            {},
            {"a": [1]},
            b"\xff",
            object(),
        ]
        predictions = [dict.fromkeys(fields, value) for value in odd] + [{}, {"another": "field"}]
        for prediction in predictions:
            try:
                self._grade(prediction)
            except AssertionError:
                raise
            except Exception as error:
                excerpt = f"{prediction!r:.120}"
                raise AssertionError(f"the check raises {type(error).__name__} on {excerpt}: {error}") from error

    def test_ungraded_predictions_are_unscored_with_a_reason(self) -> None:
        criterion = self.make()
        with self.context():
            result = Rubric("contract", [criterion]).score(self.task(), {})
        for verdict in result.verdicts:
            if verdict.grade is None:
                require(verdict.reason, "a prediction without fields is unscored without a reason")
            else:
                require(0 <= verdict.grade <= 1, f"a prediction without fields has the grade {verdict.grade!r}")
        require(math.isnan(result.value) or 0 <= result.value <= 1, f"the score is {result.value!r}")

    def test_it_can_be_pickled(self) -> None:
        if self.pickles:
            pickle.loads(pickle.dumps(self.make().check))

    def _decide(self, task: Task, prediction: dict[str, Any]) -> Any:
        criterion = self.make()
        check = criterion.check
        if check is None:
            raise AssertionError("the criterion has no check; use JudgeContract for a judge")
        with self.context():
            return call(check, (task, prediction, None), criterion.arguments)

    def _grade(self, prediction: dict[str, Any]) -> float | None:
        """The grade; None if the check cannot decide."""
        try:
            grade = self._decide(self.task(), prediction)
        except NoGrade:
            return None
        value = grade.value if isinstance(grade, Grade) else grade
        if value is None:
            return None
        excerpt = f"{prediction!r:.120}"
        require(isinstance(value, Real), f"the grade of {excerpt} is {value!r}, not a number")
        require(
            0 <= value <= 1,
            f"the grade of {excerpt} is {value!r}, not in [0, 1]; return None or raise NoGrade instead of NaN",
        )
        return float(value)
