"""Judges of tasks with a known answer, and their audit."""

from typing import Any

from assay.judges import Item, Judge
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import BASES, assess, audit_cases, audit_items
from assay.rubrics import JudgeSpec, NoGrade
from assay.testing import AnswerKeyJudge

ANSWERS = ("42", "Canberra", "180", "Mercury", "mice", "0 degrees", "72", "Shakespeare")
KEY = {str(base.good["task_input"]): answer for base, answer in zip(BASES, ANSWERS, strict=True)}
QUESTION = JudgeSpec(text="Is the output a right answer to the task?", scale=("no", "partly", "yes"))


def answers_of(judge: Judge, items: list[Item]) -> Answers:
    verdicts: list[Any] = []
    places, orders = [], []
    for item in items:
        try:
            verdict = judge(**{name: item.fields.get(name, "") for name in judge.shows})
        except NoGrade:
            verdicts.append(None)
            places.append(float("nan"))
            orders.append(None)
            continue
        verdicts.append(verdict.verdict)
        places.append(judge.spec.steps[judge.labels.index(verdict.verdict)])
        orders.append(verdict.get("orders"))
    return Answers(verdicts, places, [None] * len(items), orders)


def audited(judge: Judge, **options: Any) -> dict[str, Any]:
    cases = audit_cases(judge, **options)
    items = audit_items(cases, judge)
    return assess(cases, items, answers_of(judge, items), judge)


class Swayed(AnswerKeyJudge):
    """Grades correctly, except that one feature always wins."""

    def __init__(self, wins: str) -> None:
        super().__init__(QUESTION, key=KEY)
        self.wins = wins

    def read(self, values: Any) -> Any:
        return (None, self.labels[-1]) if self.wins in str(values["output"]) else super().read(values)
