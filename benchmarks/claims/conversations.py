"""Conversations of 10 to 20 turns: the shipped program `converse`, plain and compiled.

The user is the rule-based one, so that both sides talk with the same user and its calls cost nothing. The tasks are
generated, split by the hash of their content; the reported ones are sealed test tasks. The demonstrations are guided
runs on train tasks: what their labels say that the agent should have done.
"""

import copy
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.programs import Converse
from claims.storing import Lines, Measured, Setting

DATA = "conversations:?facts=9-10&changes=0.2&size=400"
SEARCH_CALLS, DEMOS, VAL, TEST = 600, 6, 8, 12


def measure(setting: Setting) -> Measured:
    plain = Converse(prompt_format="lean")
    report = assay.compile(
        copy.deepcopy(plain),
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,
        sizes={"val": VAL},
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "conversations",
        **common(setting),
    )
    sides: dict[str, Any] = {"before": plain, "after": report.artifact}
    found = {side: evaluated(setting, program) for side, program in sides.items()}
    values: dict[str, Any] = {
        figure: {side: grades(evaluation, figure) for side, evaluation in found.items()}
        for figure in ("completed", "filled")
    }
    facts = {"winner": report.outcome.winner, "search_calls": report.to_dict()["search_calls"]}
    return Measured(values=values, facts=facts)


def common(setting: Setting) -> dict[str, Any]:
    return {
        "rubric": "converse",
        "data": f"{DATA}&seed={setting.seed}",
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "conversations.db",
        "threads": 1,
        "progress": Lines(),
    }


def evaluated(setting: Setting, program: Any) -> Evaluation:
    return assay.evaluate(copy.deepcopy(program), split="test", sizes={"test": TEST}, **common(setting)).evaluation


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    return {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
