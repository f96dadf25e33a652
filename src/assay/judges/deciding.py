"""Judges as the deciders of a rubric's criteria."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import dspy

from assay.datasets import Task
from assay.errors import FailureKind, RubricError
from assay.judges.base import Judge, attempt
from assay.judges.listwise import ListwiseJudge
from assay.judges.loading import AnyJudge, load_judge
from assay.judges.pointwise import PointwiseJudge
from assay.judges.ranking import bradley_terry, pairings, win_rates
from assay.judges.reading import GUARD, meanings, shown_as
from assay.models import sibling
from assay.rubrics import Criterion, Grade, JudgeSpec, NoGrade
from assay.rubrics.rubric import Resolver
from assay.scrubbing import said
from assay.traces import Rollout
from assay.traces.recorder import aside

__all__ = ["GroupDecider", "JudgeDecider", "one_of", "output_of", "resolver"]


class _Asking:
    """A model that judges. Its calls are a rollout of their own, of the task it judges, and counted like any other."""

    def __init__(self, judge: Any, lm: dspy.LM, named: str) -> None:
        self.judge, self.lm, self.named = judge, lm, named

    def asking(self, task: Task, given: Mapping[str, Any], rollout: Rollout | None) -> tuple[AbstractContextManager[Any], Rollout]:
        own = Rollout(
            task_id=task.id, task_type=task.task_type, group_id=task.id, source="judge", program=self.named[:200],
            split=rollout.split if rollout else "", inputs=dict(given), tenant=rollout.tenant if rollout else None,
            data_subject=rollout.data_subject if rollout else None, consent=rollout.consent if rollout else None,
        )  # fmt: skip
        stack = ExitStack()
        stack.enter_context(dspy.context(lm=self.lm, trace=[]))
        stack.enter_context(aside(own))
        return stack, own

    @contextmanager
    def named_failure(self, own: Rollout) -> Iterator[None]:
        """A failure says which judge it is of: its question and its model. In the store it is the judge's."""
        try:
            yield
        except Exception as error:
            what = str(error) if isinstance(error, NoGrade) else said(error)
            model = getattr(self.judge, "model", None) or getattr(self.lm, "model", self.lm)
            own.status, own.error, own.failure = "error", what, FailureKind.JUDGE
            raise NoGrade(f"judge {self.named[:80]!r} ({model}): {what}") from error


class JudgeDecider(_Asking):
    """Grades one criterion by a judge of one output.

    Args:
        lm: the model that judges.
    """

    def __init__(self, judge: Judge, lm: dspy.LM) -> None:
        super().__init__(judge, lm, judge.spec.text)

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        seen = {**prediction, **task.inputs, "task_input": one_of(task.inputs), "output": output_of(prediction)}
        given = _given(self.judge, seen)
        context, own = self.asking(task, given, rollout)
        with context, self.named_failure(own):
            found = self.judge(**given)
            own.prediction = {key: found[key] for key in ("verdict", "confidence", "value")}
        if found.value is None:
            raise NoGrade(f"the judge said {found.verdict!r}, and the words of its scale have no grades")
        said = f"The judge said {found.verdict!r} to: {self.judge.spec.text}"
        return Grade(value=found.value, label=found.verdict, confidence=found.confidence, reason=said)


class GroupDecider(_Asking):
    """Grades one criterion by a judge that compares: each output's grade is the mean probability of being preferred to
    another of its group (by Bradley-Terry where pairs are judged), or its grade on the scale where a list is graded."""

    def __init__(self, judge: AnyJudge, lm: dspy.LM) -> None:
        super().__init__(judge, lm, judge.spec.text)

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        raise NoGrade("this judge compares outputs of one task: score them together with score_group")

    def grade_group(self, task: Task, predictions: Sequence[dict[str, Any]], rollouts: Sequence[Rollout | None]) -> list[Grade | NoGrade]:
        """A grade for each prediction, in order, or why it has none."""
        outputs = [output_of(prediction) for prediction in predictions]
        context, own = self.asking(task, {"task_input": one_of(task.inputs), "outputs": outputs}, next((r for r in rollouts if r), None))
        with context, self.named_failure(own):
            values = (self._by_list if isinstance(self.judge, ListwiseJudge) else self._by_pairs)(task, outputs)
            own.prediction = {"values": {str(index): value for index, value in values.items() if not isinstance(value, NoGrade)}}
        said = f"Compared with the others by: {self.judge.spec.text}"
        missing = NoGrade("the judge's answers named no grade for this output")
        found = [values.get(index, missing) for index in range(len(outputs))]
        return [value if isinstance(value, NoGrade) else Grade(value=value, reason=said) for value in found]

    def _by_list(self, task: Task, outputs: Sequence[Any]) -> dict[int, Any]:
        return dict(self.judge(task_input=one_of(task.inputs), outputs=dict(enumerate(outputs))).grades)

    def _by_pairs(self, task: Task, outputs: Sequence[Any]) -> dict[int, Any]:
        judge, compared, reasons = self.judge, [], list[str]()
        for a, b in pairings(len(outputs)):
            seen = {**task.inputs, "task_input": one_of(task.inputs), "output_a": outputs[a], "output_b": outputs[b]}
            found, reason = attempt(judge, _given(judge, seen))
            if found is None:
                reasons.append(reason)
            else:
                compared.append((a, b, 1 - judge.spec.grade(found.verdict)))
        strengths = bradley_terry(compared)
        values: dict[int, Any] = dict(zip(strengths, win_rates(list(strengths.values())), strict=True))
        return {index: values.get(index, NoGrade(reasons[0] if reasons else "nothing to compare with")) for index in range(len(outputs))}


class Together(_Asking):
    """Decides all judge criteria in one call, with a verdict for each by its name."""

    def __init__(self, criteria: Sequence[Criterion], lm: dspy.LM) -> None:
        super().__init__(None, lm, "all criteria in one call")
        self.specs = {c.name: c.judge for c in criteria if c.judge is not None}
        if using := [name for name, spec in self.specs.items() if spec.use]:
            raise RubricError(f"criteria {using} use judges of their own, which are asked one by one; judging: each goes with them")
        if clashing := sorted({"task_input", "output"} & set(self.specs)):
            raise RubricError(f"criteria {clashing} have the names of what a judge sees; judging: together needs other names")
        asked = " ".join(f"{name}: {spec.text} {meanings(spec)}" for name, spec in self.specs.items())
        fields: dict[str, Any] = {"task_input": (str, dspy.InputField()), "output": (str, dspy.InputField())}
        fields |= {name: (Literal[spec.scale], dspy.OutputField()) for name, spec in self.specs.items()}
        self.judge = dspy.Predict(dspy.Signature(fields, f"Decide each of these by itself. {asked}{GUARD}"))

    def grade_all(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> dict[str, Grade | NoGrade]:
        """A grade for each criterion by name, or why it has none; one call."""
        given = {"task_input": shown_as(one_of(task.inputs)), "output": shown_as(output_of(prediction))}
        context, own = self.asking(task, given, rollout)
        with context, self.named_failure(own), dspy.context(adapter=dspy.JSONAdapter()):
            found = self.judge(**given)
            own.prediction = {name: found.get(name) for name in self.specs}
        return {name: self._grade(name, spec, found.get(name)) for name, spec in self.specs.items()}

    @staticmethod
    def _grade(name: str, spec: JudgeSpec, verdict: Any) -> Grade | NoGrade:
        if verdict not in spec.scale:
            return NoGrade(f"the judge answered {verdict!r} for {name}, not one of {list(spec.scale)}")
        return Grade(value=spec.grade(verdict), label=verdict, reason=f"The judge said {verdict!r} to: {spec.text}")


def _given(judge: Judge, seen: Mapping[str, Any]) -> dict[str, Any]:
    """What the judge sees.

    Raises:
        NoGrade: neither the task nor the prediction has it: a question about nothing has no verdict.
    """
    if missing := [name for name in judge.shows if name not in seen]:
        raise NoGrade(f"the judge sees {list(judge.shows)}, and neither the task nor the output has {', '.join(missing)}; there are {sorted(seen)}")
    return {name: seen[name] for name in judge.shows}


def output_of(prediction: Mapping[str, Any]) -> Any:
    """What is judged of a prediction: its one field, else all by name."""
    return one_of({k: v for k, v in prediction.items() if k != "steps"})


def one_of(fields: Any) -> Any:
    """The value of a single field, else all by name: what people would be shown. Empty text where every field is empty."""
    values = {key: value for key, value in dict(fields).items() if value not in (None, "")}
    return next(iter(values.values())) if len(values) == 1 else values or ""


class _Resolver:
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
            raise RubricError(f"criterion {criterion.name!r}: its judge's scale is nominal; say what each word is worth in grades")
        return JudgeDecider(judge, lm)

    def together(self, criteria: Sequence[Criterion]) -> Together | None:
        return Together(criteria, self.lm) if self.lm is not None else None


def resolver(lm: dspy.LM | None, find: Callable[[str], AnyJudge] = load_judge) -> Resolver:
    """Makes a rubric's judge criteria decidable by `lm`.

    Args:
        lm: decides criteria whose judge names no model of its own; where None they stay unscored.
        find: gives the judge that a criterion uses from elsewhere, by its file or folder.
    """
    return _Resolver(lm, find)
