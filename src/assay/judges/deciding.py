"""Adapts judges to a rubric's criteria: one output, a group of outputs, or all criteria in one call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import dspy

from assay.datasets import Task
from assay.errors import FailureKind, RubricError
from assay.judges.base import Judge, attempt
from assay.judges.comparing import ListwiseJudge, bradley_terry, pairings, win_rates
from assay.judges.loading import AnyJudge, load_judge
from assay.judges.pointwise import PointwiseJudge
from assay.judges.questions import one_of, output_of, shown_values
from assay.judges.reading import GUARD, WrittenAdapter, fenced_text, meanings
from assay.models import sibling
from assay.rubrics import Criterion, Grade, JudgeSpec, NoGrade
from assay.rubrics.criteria import SHOWS
from assay.support.scrubbing import error_text
from assay.traces import Rollout
from assay.traces.recorder import aside


class _JudgeCall:
    """Calls a judge model. The calls are recorded as a separate rollout of the judged task."""

    def __init__(self, judge: Any, lm: dspy.LM, name: str) -> None:
        self.judge, self.lm, self.name = judge, lm, name

    def recording(
        self, task: Task, inputs: Mapping[str, Any], rollout: Rollout | None
    ) -> tuple[AbstractContextManager[Any], Rollout]:
        judge_rollout = Rollout(
            task_id=task.id,
            task_type=task.task_type,
            group_id=task.id,
            source="judge",
            program=self.name[:200],
            split=rollout.split if rollout else "",
            inputs=dict(inputs),
            tenant=rollout.tenant if rollout else None,
            data_subject=rollout.data_subject if rollout else None,
            consent=rollout.consent if rollout else None,
        )
        stack = ExitStack()
        stack.enter_context(dspy.context(lm=self.lm, trace=[]))
        stack.enter_context(aside(judge_rollout))
        return stack, judge_rollout

    @contextmanager
    def named_failure(self, judge_rollout: Rollout) -> Iterator[None]:
        """Adds the judge's question and model to a failure. In the store it is a failure of the judge."""
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, NoGrade) else error_text(error)
            model = getattr(self.judge, "model", None) or getattr(self.lm, "model", self.lm)
            judge_rollout.status, judge_rollout.error, judge_rollout.failure = "error", reason, FailureKind.JUDGE
            raise NoGrade(f"judge {self.name[:80]!r} ({model}): {reason}") from error


class JudgeDecider(_JudgeCall):
    """Grades one criterion with a pointwise judge.

    Args:
        lm: the judge's model.
    """

    def __init__(self, judge: Judge, lm: dspy.LM) -> None:
        super().__init__(judge, lm, judge.spec.text)

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        inputs = _shown_of(task, prediction, self.judge.shows)
        context, judge_rollout = self.recording(task, inputs, rollout)
        with context, self.named_failure(judge_rollout):
            result = self.judge(**inputs)
            judge_rollout.prediction = {key: result[key] for key in ("verdict", "confidence", "value")}
        if result.value is None:
            raise NoGrade(f"the judge returned {result.verdict!r}, and the labels of its scale have no grades")
        reason = f"The judge said {result.verdict!r} to: {self.judge.spec.text}"
        return Grade(value=result.value, label=result.verdict, confidence=result.confidence, reason=reason)


class JudgeVerifier:
    """A judge as the verifier of a program that runs now; see `assay.load_verifier`.

    Args:
        lm: the judge's model; None uses the model configured in DSPy at the call.
    """

    def __init__(self, judge: Judge, lm: dspy.LM | None) -> None:
        self.judge, self.lm = judge, lm

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        lm = self.lm or dspy.settings.lm
        if lm is None and self.judge.model is None:
            raise NoGrade("no language model is configured for the verifier")
        return JudgeDecider(self.judge, lm)(task, prediction, rollout)


class GroupDecider(_JudgeCall):
    """Grades one criterion with a comparing judge.

    With a pairwise judge, the grade of an output is its mean probability of being preferred to another output of the
    group (Bradley-Terry). With a listwise judge, it is the grade that the judge returns.
    """

    def __init__(self, judge: AnyJudge, lm: dspy.LM) -> None:
        super().__init__(judge, lm, judge.spec.text)

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        raise NoGrade("this judge compares outputs of one task; score them together with score_group")

    def grade_group(
        self, task: Task, predictions: Sequence[dict[str, Any]], rollouts: Sequence[Rollout | None]
    ) -> list[Grade | NoGrade]:
        """Returns a grade, or `NoGrade` with the reason, per prediction, in order."""
        outputs = [output_of(prediction) for prediction in predictions]
        context, judge_rollout = self.recording(
            task, {"task_input": one_of(task.inputs), "outputs": outputs}, next((r for r in rollouts if r), None)
        )
        with context, self.named_failure(judge_rollout):
            values = (self._by_list if isinstance(self.judge, ListwiseJudge) else self._by_pairs)(task, outputs)
            judge_rollout.prediction = {
                "values": {str(index): value for index, value in values.items() if not isinstance(value, NoGrade)}
            }
        reason = f"Compared with the others by: {self.judge.spec.text}"
        missing = NoGrade("the judge's answers contain no grade for this output")
        grades = [values.get(index, missing) for index in range(len(outputs))]
        return [value if isinstance(value, NoGrade) else Grade(value=value, reason=reason) for value in grades]

    def _by_list(self, task: Task, outputs: Sequence[Any]) -> dict[int, Any]:
        return dict(self.judge(task_input=one_of(task.inputs), outputs=dict(enumerate(outputs))).grades)

    def _by_pairs(self, task: Task, outputs: Sequence[Any]) -> dict[int, Any]:
        judge, compared, reasons = self.judge, [], list[str]()
        others = [name for name in judge.shows if name not in ("output_a", "output_b")]
        shown = _shown_of(task, {}, others)
        for a, b in pairings(len(outputs)):
            result, reason = attempt(judge, {**shown, "output_a": outputs[a], "output_b": outputs[b]})
            if result is None:
                reasons.append(reason)
            else:
                # A pairwise grade is 1 if the second output is better; `bradley_terry` takes the outcome of the first.
                compared.append((a, b, 1 - judge.spec.grade(result.verdict)))
        strengths = bradley_terry(compared)
        values: dict[int, Any] = dict(zip(strengths, win_rates(list(strengths.values())), strict=True))
        return {
            index: values.get(index, NoGrade(reasons[0] if reasons else "nothing to compare with"))
            for index in range(len(outputs))
        }


class Together(_JudgeCall):
    """Decides all judge criteria in one call. The answer has one verdict per criterion name."""

    def __init__(self, criteria: Sequence[Criterion], lm: dspy.LM) -> None:
        super().__init__(None, lm, "all criteria in one call")
        self.specs = {c.name: c.judge for c in criteria if c.judge is not None}
        if using := [name for name, spec in self.specs.items() if spec.use]:
            raise RubricError(
                f"criteria {using} use judges of their own, which are called one by one; set judging='each'"
            )
        self.shows = {name: spec.shows or SHOWS for name, spec in self.specs.items()}
        names = list(dict.fromkeys(name for shows in self.shows.values() for name in shows))
        if clashing := sorted(set(names) & set(self.specs)):
            raise RubricError(
                f"criteria {clashing} have the names of the judge's inputs; rename them for judging='together'"
            )
        questions = " ".join(f"{name}: {spec.text} {meanings(spec)}" for name, spec in self.specs.items())
        fields: dict[str, Any] = {name: (str, dspy.InputField()) for name in names}
        fields |= {name: (Literal[spec.scale], dspy.OutputField()) for name, spec in self.specs.items()}
        self.judge = dspy.Predict(dspy.Signature(fields, f"Decide each of these by itself. {questions}{GUARD}"))

    def grade_all(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> dict[str, Grade | NoGrade]:
        """Returns a grade, or `NoGrade` with the reason, per criterion name. Makes one call.

        The call shows what any of the criteria shows. A criterion one of whose values is missing is unscored.
        """
        shown, unseen = dict[str, Any](), dict[str, NoGrade]()
        for name, shows in self.shows.items():
            try:
                shown |= _shown_of(task, prediction, shows)
            except NoGrade as error:
                unseen[name] = error
        if not shown:
            return dict(unseen)
        inputs = {name: fenced_text(value) for name, value in shown.items()}
        context, judge_rollout = self.recording(task, inputs, rollout)
        with context, self.named_failure(judge_rollout), dspy.context(adapter=WrittenAdapter()):
            result = self.judge(**inputs)
            judge_rollout.prediction = {name: result.get(name) for name in self.specs}
        return {
            name: unseen.get(name) or self._grade(name, spec, result.get(name)) for name, spec in self.specs.items()
        }

    @staticmethod
    def _grade(name: str, spec: JudgeSpec, verdict: Any) -> Grade | NoGrade:
        if verdict not in spec.scale:
            return NoGrade(f"the judge answered {verdict!r} for {name}, not one of {list(spec.scale)}")
        return Grade(value=spec.grade(verdict), label=verdict, reason=f"The judge said {verdict!r} to: {spec.text}")


def _shown_of(task: Task, prediction: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return shown_values(names, inputs=task.inputs, prediction=prediction, expected=task.expected)


class JudgeResolver:
    """See `resolver`."""

    def __init__(self, lm: dspy.LM | None, find: Callable[[str], AnyJudge]) -> None:
        self.lm, self.find = lm, find

    def __call__(self, criterion: Criterion) -> JudgeDecider | GroupDecider | None:
        assert criterion.judge is not None
        judge = self.find(criterion.judge.use) if criterion.judge.use else PointwiseJudge(criterion.judge)
        lm = self.lm or (sibling(None, judge.model, judge.endpoint) if judge.model is not None else None)
        if lm is None:
            return None
        if judge.compares:
            return GroupDecider(judge, lm)
        if not judge.spec.graded:
            raise RubricError(
                f"criterion {criterion.name!r}: its judge's scale is nominal; set grades with the value of each label"
            )
        return JudgeDecider(judge, lm)

    def together(self, criteria: Sequence[Criterion]) -> Together | None:
        return Together(criteria, self.lm) if self.lm is not None else None


def resolver(lm: dspy.LM | None, find: Callable[[str], AnyJudge] = load_judge) -> JudgeResolver:
    """Returns a resolver that creates graders for a rubric's judge criteria.

    Args:
        lm: model of the judges that name no model of their own; if None, a rubric with such a judge does not score.
        find: loads a judge referenced by `use`, from its file or folder.
    """
    return JudgeResolver(lm, find)
