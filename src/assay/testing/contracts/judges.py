"""Contracts of a criterion that code grades, and of pointwise, pairwise and listwise judges."""

import copy
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import dspy

from assay.datasets import Task
from assay.errors import AssayError, ConfigError
from assay.judges.base import Judge, rebuilt
from assay.judges.comparing import ListwiseJudge
from assay.rubrics import Criterion, Grade, NoGrade, Rubric
from assay.rubrics.calling import call
from assay.testing.contracts.base import HOSTILE_TEXTS, Contract, require
from assay.testing.fakes import scripted_lm


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


_ODD: tuple[Any, ...] = (*HOSTILE_TEXTS, None, 42, math.nan, ["a", "list"], {"a": {"mapping": 1}}, b"\xff")
_NONSENSE = ("", "%%%", "null", "[]", '{"verdict": "certainly"}', '{"verdict": ["yes", "no"]}', "yes no yes no " * 500)


def nonsense_lm(answer: str) -> Any:
    """A model that gives the same response to every request."""
    return scripted_lm(lambda request: answer)


class JudgeContract(Contract):
    """Checks a judge (`assay.judges.Judge`).

    - The verdict is a label of the judge's scale. Probabilities are None, or in [0, 1] for exactly the labels of the
      scale, with sum 1. Confidence is None or in [0, 1]. The value is in [0, 1], higher is better, or None on a scale
      without grades.
    - `better` has a value of at least that of `worse`.
    - The same inputs get the same verdict (unless `deterministic = False`), and are not changed.
    - A missing input raises `ConfigError` that names it.
    - Hostile inputs, inputs of other types and nonsense responses of the model give a verdict or raise `NoGrade` or
      another `AssayError`.
    - `config` is JSON, and a judge that is built from it gives the same verdict.
    """

    deterministic = True

    def make(self) -> Judge:
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def better(self) -> Mapping[str, Any]:
        """Inputs with a value at least as high as that of `worse`, by name as in the judge's `shows`."""
        return {"task_input": "How much is 2 + 2?", "output": "4"}

    def worse(self) -> Mapping[str, Any]:
        return {"task_input": "How much is 2 + 2?", "output": "a banana"}

    def test_verdict_probabilities_confidence_and_value_are_in_range(self) -> None:
        with self.context():
            judge = self.make()
            for inputs in (self.better(), self.worse()):
                self._check_reading(judge, judge(**inputs), inputs)

    def test_the_better_output_has_no_lower_value(self) -> None:
        with self.context():
            judge = self.make()
            better, worse = judge(**self.better()).value, judge(**self.worse()).value
        if better is not None and worse is not None:
            require(better >= worse, f"`better` has the value {better!r} and `worse` {worse!r}")

    def test_the_same_inputs_get_the_same_verdict_and_are_not_changed(self) -> None:
        inputs = dict(self.better())
        before = copy.deepcopy(inputs)
        with self.context():
            judge = self.make()
            # a new judge too, whose verdict cannot come from what the first one remembers
            results = [*(judge(**inputs) for _ in range(3)), self.make()(**inputs)]
            verdicts = [(result.verdict, result.value) for result in results]
        require(inputs == before, f"the inputs {before!r} became {inputs!r}")
        if self.deterministic:
            require(len(set(verdicts)) == 1, f"verdicts and values of one input are {verdicts}")

    def test_a_missing_input_is_named(self) -> None:
        with self.context():
            judge = self.make()
            for name in judge.shows:
                inputs = {key: value for key, value in self.better().items() if key != name}
                try:
                    judge(**inputs)
                except ConfigError as error:
                    require(name in str(error), f"the error for a missing {name!r} does not name it: {error}")
                else:
                    raise AssertionError(f"a missing {name!r} raises no ConfigError")

    def test_hostile_inputs_give_a_verdict_or_none(self) -> None:
        with self.context():
            judge = self.make()
            for value in _ODD:
                inputs = {**self.better(), judge.shows[-1]: value}
                self._check_call(judge, inputs, f"{judge.shows[-1]}={value!r:.60}")

    def test_a_model_that_answers_nonsense_gives_a_verdict_or_none(self) -> None:
        for answer in _NONSENSE:
            with self.context(), dspy.context(lm=nonsense_lm(answer)):
                self._check_call(self.make(), self.better(), f"the model's response {answer!r:.60}")

    def test_a_judge_built_from_its_config_gives_the_same_verdict(self) -> None:
        with self.context():
            judge = self.make()
            other = rebuilt(type(judge), json.loads(json.dumps(judge.config)))
            same = json.dumps(other.config) == json.dumps(judge.config)
            require(same, "a judge built from config has another config")
            if self.deterministic:
                verdicts = [tested(**self.better()).verdict for tested in (judge, other)]
                require(verdicts[0] == verdicts[1], f"the judge and the one built from its config give {verdicts}")

    def _check_call(self, judge: Judge, inputs: Mapping[str, Any], case: str) -> None:
        """Requires a verdict in range, `NoGrade` or another `AssayError`."""
        try:
            result = judge(**inputs)
        except (NoGrade, AssayError):
            return
        except Exception as error:
            raise AssertionError(f"{case} raises {type(error).__name__}: {error}") from error
        self._check_reading(judge, result, inputs)

    def _check_reading(self, judge: Judge, result: Any, inputs: Mapping[str, Any]) -> None:
        of = f"for {dict(inputs)!r:.120}"
        labels = list(judge.labels)
        require(result.verdict in labels, f"the verdict {result.verdict!r} is not one of {labels} {of}")
        if result.probabilities is not None:
            names, values = set(result.probabilities), list(result.probabilities.values())
            require(names == set(judge.labels), f"probabilities are of {sorted(names)}, not of the scale, {of}")
            require(_in_range(values), f"probabilities {values} are not in [0, 1] {of}")
            require(abs(math.fsum(values) - 1) < 1e-6, f"probabilities {values} do not sum to 1 {of}")
        for name in ("confidence", "value"):
            number = getattr(result, name)
            require(number is None or _in_range([number]), f"{name} is {number!r}, not in [0, 1] {of}")
        graded = result.value is not None
        require(graded == judge.spec.graded, f"value is {result.value!r} on the scale {judge.labels} {of}")


class PairwiseJudgeContract(JudgeContract):
    """Checks a judge of pairs: `JudgeContract`, and swapping the outputs swaps the verdict.

    The value is the preference for the second output: 1 minus the value of the swapped pair.
    """

    def better(self) -> Mapping[str, Any]:
        """A pair whose second output is at least as good as that of `worse`."""
        return {"task_input": "How much is 2 + 2?", "output_a": "a banana", "output_b": "4"}

    def worse(self) -> Mapping[str, Any]:
        return {"task_input": "How much is 2 + 2?", "output_a": "4", "output_b": "a banana"}

    def test_swapped_outputs_swap_the_verdict(self) -> None:
        if not self.deterministic:
            return
        with self.context():
            judge, inputs = self.make(), self.better()
            result = judge(**inputs)
            swapped = judge(**{**inputs, "output_a": inputs["output_b"], "output_b": inputs["output_a"]})
        expected = judge.labels[::-1][judge.labels.index(result.verdict)]
        require(swapped.verdict == expected, f"the verdict is {result.verdict!r}, swapped {swapped.verdict!r}")
        require(abs(swapped.value - (1 - result.value)) < 1e-6, f"the value is {result.value}, swapped {swapped.value}")


class ListwiseJudgeContract(Contract):
    """Checks a listwise judge (`assay.judges.ListwiseJudge`).

    - Grades are in [0, 1], higher is better, and only for ids of the outputs; the ranking contains the same ids, best
      first. An output without a grade is absent, never 0.
    - The first of `outputs` is graded at least as high as the last one, in either order.
    - The same outputs get the same grades (unless `deterministic = False`), and are not changed.
    - Fewer than two outputs raise `NoGrade`. Hostile outputs and nonsense responses of the model give grades or raise
      `NoGrade` or another `AssayError`.
    """

    deterministic = True

    def make(self) -> ListwiseJudge:
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def outputs(self) -> Sequence[str]:
        """Outputs for the question "How much is 2 + 2?", best first."""
        return ["4", "5", "a banana"]

    def test_grades_are_in_range_and_the_ranking_has_their_order(self) -> None:
        with self.context():
            outputs = dict(enumerate(self.outputs()))
            self._check_grades(self.make()(task_input="How much is 2 + 2?", outputs=outputs), outputs)

    def test_the_best_output_is_not_graded_below_the_worst(self) -> None:
        outputs = dict(enumerate(self.outputs()))
        with self.context():
            for order in (list(outputs), list(reversed(outputs))):
                ordered = {key: outputs[key] for key in order}
                grades = self.make()(task_input="How much is 2 + 2?", outputs=ordered).grades
                best, worst = grades.get(0, 1.0), grades.get(len(outputs) - 1, 0.0)
                require(best >= worst, f"the best output has the grade {best}, the worst {worst}, in the order {order}")

    def test_the_same_outputs_get_the_same_grades_and_are_not_changed(self) -> None:
        outputs = dict(enumerate(self.outputs()))
        before = copy.deepcopy(outputs)
        with self.context():
            grades = [self.make()(task_input="How much is 2 + 2?", outputs=outputs).grades for _ in range(2)]
        require(outputs == before, f"the outputs {before!r} became {outputs!r}")
        if self.deterministic:
            require(grades[0] == grades[1], f"grades of the same outputs are {grades}")

    def test_fewer_than_two_outputs_are_not_graded(self) -> None:
        for outputs in ({}, {0: "4"}):
            with self.context():
                try:
                    result = self.make()(task_input="How much is 2 + 2?", outputs=outputs)
                except NoGrade:
                    continue
            raise AssertionError(f"{len(outputs)} outputs get the grades {result.grades}")

    def test_hostile_outputs_give_grades_or_none(self) -> None:
        for value in _ODD:
            outputs = {0: "4", 1: value}
            with self.context():
                self._check_call(outputs, f"an output {value!r:.60}")

    def test_a_model_that_answers_nonsense_gives_grades_or_none(self) -> None:
        for answer in (*_NONSENSE, '{"grades": [{"id": "Z", "grade": "yes"}, {"id": "A", "grade": "superb"}]}'):
            with self.context(), dspy.context(lm=nonsense_lm(answer)):
                self._check_call(dict(enumerate(self.outputs())), f"the model's response {answer!r:.60}")

    def _check_call(self, outputs: Mapping[Any, Any], case: str) -> None:
        """Requires grades in range, `NoGrade` or another `AssayError`."""
        try:
            result = self.make()(task_input="How much is 2 + 2?", outputs=outputs)
        except (NoGrade, AssayError):
            return
        except Exception as error:
            raise AssertionError(f"{case} raises {type(error).__name__}: {error}") from error
        self._check_grades(result, outputs)

    def _check_grades(self, result: Any, outputs: Mapping[Any, Any]) -> None:
        grades, ranking = dict(result.grades), list(result.ranking)
        require(grades.keys() <= outputs.keys(), f"grades are of {list(grades)}, outputs of {list(outputs)}")
        require(_in_range(list(grades.values())), f"grades {grades} are not in [0, 1]")
        require(sorted(ranking) == sorted(grades), f"the ranking {ranking} has other ids than the grades {grades}")
        ranked = [grades[key] for key in ranking]
        require(ranked == sorted(ranked, reverse=True), f"the ranking {ranking} does not follow the grades {grades}")


def _in_range(values: Sequence[float]) -> bool:
    return all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)
