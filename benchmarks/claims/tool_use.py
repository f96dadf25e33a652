"""Adoption and abstention of `tool_user` on tools that it has not seen, with labelled decisions and without.

Tasks are those of the stage `irrelevant` of `tools:`: two tools, of which one, both or (30 %) none are needed. The
tools of the test split are in no other split. Adoption and abstention can be traded by `tool_usage_threshold`, so both
sides get the threshold with the highest adoption among those that abstain on at least `ABSTAIN` of the val tasks that
need no tool (the highest threshold where none does), and are compared on test. The labelled side shows the first
decision of `SHOWN` train tasks, with the tool that the task's expected calls name, or `answer`.

Only the first decision matters here, so a run has one step and no `also`.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import assay
from assay.datasets import Task, load_splits
from assay.evaluation import Evaluation
from assay.programs import ToolUser
from assay.programs.toolbox import listing, schema_tool
from claims.storing import Lines, Measured, Setting

THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 1.0)
ABSTAIN, SHOWN, VAL, TEST = 0.9, 12, 20, 40
FIGURES = {"adoption": "adoption_when_needed", "abstention": "abstention_when_not"}


def measure(setting: Setting) -> Measured:
    data = f"tools:irrelevant?size=400&seed={setting.seed}"
    train = load_splits(data).train
    sides = {"before": ToolUser(prompt_format="lean", parallel=False), "after": shown(train, setting.seed)}
    chosen: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {figure: {} for figure in FIGURES}

    def run(side: str, threshold: float, split: str, size: int) -> Evaluation:
        return assay.evaluate(
            sides[side].deepcopy(),
            rubric="tool_user",
            data=data,
            split=split,
            sizes={split: size},
            model=setting.model,
            parameters={"temperature": 0.1, "max_steps": 2, "tool_usage_threshold": threshold, "context_length": 5000},
            seed=setting.seed,
            store=setting.scratch / "tool_use.db",  # one response cache: most decisions are those of other thresholds
            threads=1,
            progress=Lines(),
        ).evaluation

    for side in sides:
        found = {threshold: figures(run(side, threshold, "val", VAL)) for threshold in THRESHOLDS}
        means = {threshold: {name: mean(of[name]) for name in FIGURES} for threshold, of in found.items()}
        fitting = [threshold for threshold in THRESHOLDS if means[threshold]["abstention"] >= ABSTAIN]
        best = max(fitting, key=lambda threshold: means[threshold]["adoption"]) if fitting else THRESHOLDS[-1]
        chosen[side] = {"threshold": best, "val": {str(key): value for key, value in means.items()}}
        for name, of in figures(run(side, best, "test", TEST)).items():
            values[name][side] = of
    return Measured(values=values, facts=chosen)


def figures(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Of the tasks that need a tool, whether one was called; of the others, whether none was."""
    runs = {task: run.tool_figures for (task, _), run in evaluation.runs.items()}
    return {
        name: {task: found[figure] for task, found in runs.items() if figure in found}
        for name, figure in FIGURES.items()
    }


def mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values) if values else float("nan")


def shown(train: list[Task], seed: int) -> ToolUser:
    """The agent with labelled first decisions: as many tasks that need a tool as tasks that need none."""
    agent, rng = ToolUser(prompt_format="lean", parallel=False), random.Random(seed)
    kinds = [[task for task in train if bool(task.expected["calls"]) is needed] for needed in (True, False)]
    tasks = [task for kind in kinds for task in rng.sample(kind, SHOWN // 2)]
    for task in rng.sample(tasks, len(tasks)):
        tools = task.inputs["tools"]
        offered = [schema_tool(tool) for tool in (json.loads(tools) if isinstance(tools, str) else tools)]
        calls = task.expected["calls"]
        action = str(calls[0]["name"]) if calls else "answer"
        agent.decide.demos.append(
            {
                "question": task.inputs["question"],
                "tools": listing(offered, 2 * 5000),
                "results": "",
                "thought": f"{action} does this." if calls else "None of the tools does this.",
                "action": action,
            }
        )
    return agent
