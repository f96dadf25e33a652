"""`answer_from_documents` on generated documents: as it comes, and compiled; score, and abstention without a passage.

In 30 % of the tasks the passage with the answer is removed. The reported tasks are sealed test tasks of the same seed.
"""

import copy
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.programs import AnswerFromDocuments
from claims.storing import Lines, Measured, Setting

DATA = "documents:facts?size=400&passages=12"
SEARCH_CALLS, DEMOS, K, TRAIN, VAL, TEST = 400, 4, 3, 40, 20, 24


def measure(setting: Setting) -> Measured:
    plain = AnswerFromDocuments(prompt_format="lean", k=K)
    report = assay.compile(
        copy.deepcopy(plain),
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,
        sizes={"train": TRAIN, "val": VAL},
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "compiled",
        **common(setting),
    )
    sides: dict[str, Any] = {"before": plain, "after": report.artifact}
    on_test = {side: evaluated(setting, program) for side, program in sides.items()}
    values: dict[str, Any] = {
        "score": {
            side: {task: result.score for task, result in found.results.items()} for side, found in on_test.items()
        },
        **{
            figure: {side: grades(found, figure) for side, found in on_test.items()}
            for figure in ("correct", "abstained", "retrieved", "answer_supported")
        },
    }
    facts = {"winner": report.outcome.winner, "search_calls": report.to_dict()["search_calls"]}
    return Measured(values=values, facts=facts)


def common(setting: Setting) -> dict[str, Any]:
    return {
        "rubric": "answer_from_documents",
        "data": f"{DATA}&seed={setting.seed}",
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "documents.db",
        "threads": 1,
        "progress": Lines(),
    }


def evaluated(setting: Setting, program: Any) -> Evaluation:
    return assay.evaluate(copy.deepcopy(program), split="test", sizes={"test": TEST}, **common(setting)).evaluation


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    """Grades of the tasks to which a criterion applies."""
    return {task: result.grades[criterion] for task, result in evaluation.results.items() if criterion in result.grades}
