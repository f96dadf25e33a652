"""A rubric and its rows for programs, tools and judges that never end."""

from typing import Any

import assay
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm

DATA = [{"id": str(at), "question": f"{at}", "answer": f"{at}"} for at in range(4)]


RIGHT = Rubric(
    "r",
    [Criterion(name="right", check=lambda task, prediction, rollout: prediction["answer"] == task.expected["answer"])],
)


def scored(program: Any, rubric: Any = RIGHT, **options: Any) -> Any:
    keywords = {
        "lm": scripted_lm(lambda r: "yes"),
        "split": "val",
        "rename": {},
        "preflight": False,
        "threads": 2,
        "salt": "s",
    }
    rows = [{**row, "split": "val"} for row in DATA]
    return assay.evaluate(program, rubric=rubric, data=rows, **{**keywords, **options}).evaluation


def by_question(evaluation: Any) -> dict[str, Any]:
    return dict(sorted(evaluation.results.items()))
