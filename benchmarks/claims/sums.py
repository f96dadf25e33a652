"""One compile run on chain sums: task completion, tool adoption, and sums of another length.

The program is `calculator_agent.py`, compiled against `calculator_agent.yaml`. Each seed has tasks of its own; the
reported ones are sealed test tasks. The longer sums are of a kind that the compile run never saw.
"""

import copy
from pathlib import Path
from typing import Any

import assay
from assay.evaluation import Evaluation
from claims.calculator_agent import Sums
from claims.storing import Lines, Measured, Setting

PROGRAM, RUBRIC = (Path(__file__).parent / f"calculator_agent.{ending}" for ending in ("py", "yaml"))
COMMAND = (
    "assay compile calculator_agent.py --rubric calculator_agent.yaml --data DATA --prompt-format lean "
    "--set temperature=0.1 --demos 6"
)
DATA, LONGER = "arithmetic:terms=2-3&digits=2-3&size=600", "arithmetic:terms=5-6&digits=3-4&size=600"
SEARCH_CALLS, DEMOS, TEST, LONG = 80, 6, 16, 10


def measure(setting: Setting) -> Measured:
    report = assay.compile(
        f"{PROGRAM}:Sums",
        data=f"{DATA}&seed={setting.seed}",
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,  # nearest demonstrations differ by task, so each prompt is read anew: few keep a run short
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "compiled",
        **common(setting),
    )
    sides: dict[str, Any] = {"before": Sums(prompt_format="lean"), "after": report.artifact}
    on_test = {side: evaluated(setting, program, DATA, TEST) for side, program in sides.items()}
    on_longer = {side: evaluated(setting, program, LONGER, LONG) for side, program in sides.items()}
    values: dict[str, Any] = {
        "correct": {side: grades(evaluation, "correct") for side, evaluation in on_test.items()},
        "adoption": {side: grades(evaluation, "tool_adoption") for side, evaluation in on_test.items()},
        "longer": {side: grades(evaluation, "correct") for side, evaluation in on_longer.items()},
        "tokens": {side: dict(evaluation.tokens) for side, evaluation in on_test.items()},
    }
    facts = {"winner": report.outcome.winner, "search_calls": report.to_dict()["search_calls"]}
    return Measured(values=values, facts=facts)


def common(setting: Setting) -> dict[str, Any]:
    return {
        "rubric": RUBRIC,
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "sums.db",
        "threads": 1,
        "progress": Lines(),
    }


def evaluated(setting: Setting, program: Any, data: str, count: int) -> Evaluation:
    return assay.evaluate(
        copy.deepcopy(program),
        data=f"{data}&seed={setting.seed}",
        split="test",
        sizes={"test": count},
        **common(setting),
    ).evaluation


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    return {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
