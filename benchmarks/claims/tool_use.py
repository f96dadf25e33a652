"""Adoption and abstention of `tool_user` on tools that are in no train task: as it comes, and with a fitted threshold.

Tasks are those of the stage `irrelevant` of `tools:`: two tools, of which one, both or (30 %) none are needed. As it
comes, the agent may call several tools in one step and calls one from an estimated need of 0.5 on. The other side calls
one tool in a step, and its `tool_usage_threshold` is that with the highest adoption among those that abstain on at
least `ABSTAIN` of the val tasks that need no tool; the highest where none does. Only the first decision counts here, so
a run has one step.
"""

from collections.abc import Mapping
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.programs import ToolUser
from claims.storing import Lines, Measured, Setting

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)
ABSTAIN, VAL, TEST = 0.9, 40, 40
FIGURES = {"adoption": "adoption_when_needed", "abstention": "abstention_when_not"}


def measure(setting: Setting) -> Measured:
    def run(program: ToolUser, threshold: float, split: str, size: int) -> dict[str, dict[str, float]]:
        return figures(
            assay.evaluate(
                program.deepcopy(),
                rubric="tool_user",
                data=f"tools:irrelevant?size=400&seed={setting.seed}",
                split=split,
                sizes={split: size},
                model=setting.model,
                parameters={"temperature": 0.1, "max_steps": 2, "tool_usage_threshold": threshold},
                seed=setting.seed,
                store=setting.scratch / "tool_use.db",  # one response cache: decisions do not depend on the threshold
                threads=1,
                progress=Lines(),
            ).evaluation
        )

    plain, single = ToolUser(prompt_format="lean"), ToolUser(prompt_format="lean", parallel=False)
    means: dict[float, dict[str, float]] = {}
    for threshold in THRESHOLDS:
        means[threshold] = {name: mean(values) for name, values in run(single, threshold, "val", VAL).items()}
    fitting = [threshold for threshold in THRESHOLDS if means[threshold]["abstention"] >= ABSTAIN]
    best = max(fitting, key=lambda threshold: means[threshold]["adoption"]) if fitting else THRESHOLDS[-1]
    before, after = run(plain, 0.5, "test", TEST), run(single, best, "test", TEST)
    values: dict[str, Any] = {name: {"before": before[name], "after": after[name]} for name in FIGURES}
    val = {str(threshold): of for threshold, of in means.items()}
    return Measured(values=values, facts={"threshold": best, "val": val})


def figures(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Of the tasks that need a tool, whether one was called; of the others, whether none was."""
    runs = {task: run.tool_figures for (task, _), run in evaluation.runs.items()}
    return {
        name: {task: found[figure] for task, found in runs.items() if figure in found}
        for name, figure in FIGURES.items()
    }


def mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values) if values else float("nan")
