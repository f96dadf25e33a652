"""Thinking tokens of the calculator agent on mixed chain sums: with a fitted policy, and thinking once at every step.

As in `benchmarks/thinking.py`: demonstrations without thoughts, a fixed budget for each decision; here an agent with
one decision, so that many tasks are cheap. The policy is fitted on one set of tasks and measured on another. `MARGIN`
was declared before the first run. Both sides have one response cache: where they decide alike, the calls that follow
are the same, and so is the score.
"""

from collections.abc import Sequence
from typing import Any

from thinking import demonstrations

import assay
from assay.datasets import Task, load_tasks
from assay.evaluation import Evaluation
from assay.optimizers.prompts.thinking import POLICIES, fitted_policy
from assay.programs import MathQA
from assay.programs.budgets import with_policy
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import numeric
from claims.storing import Lines, Measured, Setting

MARGIN = 0.01
DATA = "arithmetic:terms=2-4&digits=1-2&ops=+-"
BUDGET, SHOWN, VAL, TEST = 48, 4, 10, 102
TRIED = ("thinks once", "probe 0.3", "probe 0.6", "stops when stable")


def measure(setting: Setting) -> Measured:
    tasks = load_tasks(f"{DATA}&size={SHOWN + VAL + TEST}&seed={setting.seed}")
    shown, val, test = tasks[:SHOWN], tasks[SHOWN : SHOWN + VAL], tasks[SHOWN + VAL :]
    agent = MathQA(prompt_format="lean", thinking=BUDGET)
    agent.set_parameters({"max_steps": 2, "temperature": 0.1})
    demonstrations(agent, shown)

    def run(name: str, asked: Sequence[Task]) -> Evaluation:
        return assay.evaluate(
            with_policy(agent, POLICIES[name]),
            rubric=Rubric("right", [Criterion(name="right", check=numeric)]),
            data=[{**task.inputs, **task.expected, "split": "test"} for task in asked],
            split="test",
            model=setting.model,
            seed=setting.seed,
            store=setting.scratch / "thinking.db",
            threads=1,
            progress=Lines(),
        ).evaluation

    chosen, fits = fitted_policy({name: run(name, val) for name in TRIED}, margin=MARGIN)
    sides = {"before": run(TRIED[0], test), "after": run(chosen, test)}
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in sides.items()},
        "thinking": {side: spent(evaluation, "tokens") for side, evaluation in sides.items()},
        "loops": {side: spent(evaluation, "loops") for side, evaluation in sides.items()},
        "tokens": {side: dict(evaluation.tokens) for side, evaluation in sides.items()},
    }
    return Measured(values=values, facts={"fitted": chosen, "val": fits, "budget": BUDGET, "margin": MARGIN})


def spent(evaluation: Evaluation, name: str) -> dict[str, float]:
    uses = {task: run.thinking for (task, _), run in evaluation.runs.items()}
    return {task: float("nan") if use is None else float(getattr(use, name) or 0) for task, use in uses.items()}
