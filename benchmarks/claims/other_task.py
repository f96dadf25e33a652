"""A task that no training here is about: write a chain sum as an expression, from demonstrations.

The score is the share of expressions whose value is the answer. One call a task, nearly greedy.
"""

import dspy

import assay
from assay.datasets import Task, load_tasks
from assay.programs import Agent
from assay.programs.calculator import CalculatorError, calculator
from assay.rubrics import Criterion, Rubric
from claims.storing import Lines, Setting

DATA = "arithmetic:terms=2-3&digits=2-3&ops=+-"
SHOWN, TEST = 4, 40


class Expression(Agent):
    """Writes the expression."""

    input_names = ("question",)

    def __init__(self, shown: list[Task]) -> None:
        super().__init__(prompt_format="lean")
        expression = dspy.OutputField(pattern=r"^[0-9+* ()-]{1,60}$")
        fields = {"question": (str, dspy.InputField()), "expression": (str, expression)}
        self.write = dspy.Predict(dspy.Signature(fields, "Write the sum."))
        self.write.demos = [{**task.inputs, "expression": task.metadata["expression"]} for task in shown]

    def solve(self, **inputs: str) -> dspy.Prediction:
        return dspy.Prediction(expression=self.write(**inputs).expression)


def right(task: Task, prediction: dict[str, str], rollout: object) -> float:
    try:
        return float(calculator(prediction["expression"]) == task.expected["answer"])
    except CalculatorError:
        return 0.0


def scores(setting: Setting, model: str) -> dict[str, float]:
    """Score by task."""
    tasks = load_tasks(f"{DATA}&size={SHOWN + TEST}&seed={setting.seed}")
    program = Expression(tasks[:SHOWN])
    program.set_parameters({"temperature": 0.1})
    evaluation = assay.evaluate(
        program,
        rubric=Rubric("expressions", [Criterion(name="right", check=right)]),
        data=[{**task.inputs, **task.expected, "split": "test"} for task in tasks[SHOWN:]],
        split="test",
        model=model,
        seed=setting.seed,
        store=setting.scratch / "other.db",
        threads=1,
        progress=Lines(),
    ).evaluation
    return dict(evaluation.scores)
