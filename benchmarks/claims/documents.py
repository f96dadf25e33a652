"""`answer_from_documents` on generated documents: as it comes, and compiled; score, and abstention without a passage.

In 30 % of the tasks the passage with the answer is removed. The reported tasks are sealed test tasks of the same seed.
"""

from typing import Any

from assay.evaluation import Evaluation
from assay.programs import AnswerFromDocuments
from claims.compiling import Compiling
from claims.storing import Measured, Setting

K = 3
FIGURES = ("correct", "abstained", "retrieved", "answer_supported")
COMPILING = Compiling(
    name="documents",
    rubric="answer_from_documents",
    data="documents:facts?size=400&passages=12",
    search_calls=300,
    demos=4,
    sizes={"train": 40, "val": 20, "gate": 24},
    test=24,
    gate=True,
)


def measure(setting: Setting) -> Measured:
    on_test, facts = COMPILING.before_and_after(setting, AnswerFromDocuments(prompt_format="lean", k=K))
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in on_test.items()},
        **{figure: {side: grades(evaluation, figure) for side, evaluation in on_test.items()} for figure in FIGURES},
    }
    return Measured(values=values, facts=facts)


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    """Grades of the tasks to which a criterion applies."""
    return {task: result.grades[criterion] for task, result in evaluation.results.items() if criterion in result.grades}
