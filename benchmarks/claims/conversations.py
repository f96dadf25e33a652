"""Conversations of 10 to 20 turns: the shipped program `converse`, plain and compiled.

The user is the rule-based one, so that both sides talk with the same user and its calls cost nothing. The tasks are
generated, split by the hash of their content; the reported ones are sealed test tasks. The demonstrations are guided
runs on train tasks: what their labels say that the agent should have done.
"""

from typing import Any

from assay.evaluation import Evaluation
from assay.programs import Converse
from claims.compiling import Compiling
from claims.storing import Measured, Setting

COMPILING = Compiling(
    name="conversations",
    rubric="converse",
    data="conversations:?facts=9-10&changes=0.2&size=400",
    search_calls=600,
    demos=6,
    sizes={"val": 8},
    test=12,
)


def measure(setting: Setting) -> Measured:
    on_test, facts = COMPILING.before_and_after(setting, Converse(prompt_format="lean"))
    values: dict[str, Any] = {
        figure: {side: grades(evaluation, figure) for side, evaluation in on_test.items()}
        for figure in ("completed", "filled")
    }
    return Measured(values=values, facts=facts)


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    return {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
