"""`Refine` compared with voting: the same predictor writes an expression for a chain sum, and its result.

The verifier is the calculator: it computes the expression that the draft itself has, and says where the draft's answer
differs, or that the expression has not the numbers of the question. It sees no expected answer. Without a verifier, the
predictor spends its tokens on up to `SAMPLES` answers, of which the most frequent one is returned
(Adaptive-Consistency). Both sides have the same demonstrations and temperature; a single answer is measured too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import dspy

from assay.datasets import Task, load_tasks
from assay.programs import Agent, Refine, ThinkingPolicy
from assay.programs.calculator import CalculatorError, calculator
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import numeric
from assay.rubrics.criteria import Grade
from claims.storing import Measured, Setting, held_out

DATA = "arithmetic:terms=2-3&digits=2-3&ops=+-"
DEMONSTRATED, TEST, SAMPLES, DEPTH = 6, 24, 3, 6  # one round of revision at depth 6
TEMPERATURE = 0.7
NUMBER = re.compile(r"\d+")


class Once(Agent):
    """One answer, or with a policy the most frequent of several."""

    def __init__(self, predictor: dspy.Predict, **options: Any) -> None:
        super().__init__(prompt_format="lean", **options)
        self.predictor = predictor

    def solve(self, **inputs: Any) -> dspy.Prediction:
        prediction = self.predictor(**inputs)
        return dspy.Prediction(expression=prediction.expression, answer=prediction.answer)


def computed(task: Any, prediction: Mapping[str, Any], rollout: Any) -> Grade:
    """1 if the answer is the value of the expression and it has the question's numbers."""
    expression, answer = str(prediction["expression"]), str(prediction["answer"]).strip()
    if NUMBER.findall(expression) != NUMBER.findall(str(task.inputs["question"])):
        return Grade(value=0.0, reason=f"{expression} has not the numbers of the question")
    try:
        value = calculator(expression)
    except CalculatorError as error:
        return Grade(value=0.0, reason=f"{expression} cannot be computed: {error}")
    return Grade(value=1.0 if value == answer else 0.5, reason=f"{expression} = {value}")


def demonstration(task: Task, draft: int) -> dict[str, Any]:
    """A revision of a draft with a wrong answer, with what the verifier says of it."""
    inputs, expression = dict(task.inputs), str(task.metadata["expression"])
    wrong = {"expression": expression, "answer": str(draft)}
    return {
        **inputs,
        "draft": "; ".join(f"{name}: {value}" for name, value in wrong.items()),
        "feedback": computed(task, wrong, None).reason,
        "expression": expression,
        "answer": task.expected["answer"],
    }


def programs(demonstrated: Sequence[Task]) -> dict[str, Agent]:
    expression = dspy.OutputField(pattern=r"^[0-9+* ()-]{1,60}$")
    answer = dspy.OutputField(pattern=r"^[0-9-]{1,12}$")
    fields = {"question": (str, dspy.InputField()), "expression": (str, expression), "answer": (str, answer)}
    predictor = dspy.Predict(dspy.Signature(fields, "Write the sum, and its value."))
    predictor.demos = [
        {**task.inputs, "expression": task.metadata["expression"], "answer": task.expected["answer"]}
        for task in demonstrated
    ]
    refine = Refine(Once(predictor), computed, signature=predictor.signature)
    refine.revise.demos = [
        demonstration(task, int(task.expected["answer"]) + 7 * at - 20) for at, task in enumerate(demonstrated)
    ]
    agents = {
        "once": Once(predictor),
        "before": Once(predictor, policy=ThinkingPolicy(samples=SAMPLES)),
        "after": refine,
    }
    for name, program in agents.items():
        depth = {"reasoning_depth": DEPTH} if name == "after" else {}
        program.set_parameters({"temperature": TEMPERATURE, **depth})
    return agents


def measure(setting: Setting) -> Measured:
    tasks = load_tasks(f"{DATA}&size={DEMONSTRATED + TEST}&seed={setting.seed}")
    asked = [
        {"question": task.inputs["question"], "answer": task.expected["answer"], "split": "test"}
        for task in tasks[DEMONSTRATED:]
    ]
    evaluations = {
        side: held_out(
            setting,
            program,
            rubric=Rubric("sums", [Criterion(name="right", check=numeric)]),
            data=asked,
            cache=False,  # a draft that is a sample of another side would be cached, and cost no tokens
        )
        for side, program in programs(tasks[:DEMONSTRATED]).items()
    }
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in evaluations.items()},
        "tokens": {side: dict(evaluation.tokens) for side, evaluation in evaluations.items()},
        "calls": {side: dict(evaluation.calls) for side, evaluation in evaluations.items()},
    }
    return Measured(values=values, facts={"depth": DEPTH, "samples": SAMPLES, "shown": DEMONSTRATED})
