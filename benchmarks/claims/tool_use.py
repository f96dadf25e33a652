"""Adoption and abstention of `tool_user` on tools that are in no train task, before and after its threshold is fitted.

Tasks are those of the stage `irrelevant` of `tools:`: two tools, of which one, both or (30 %) none are needed. The
agent has labelled decisions of train tasks as demonstrations, as many that call a tool as that call none. Before, it
calls a tool from an estimated need of 0.5 on, the default of `tool_usage_threshold`. After, its threshold is the lowest
of `THRESHOLDS` at which it abstains on at least `ABSTAIN` of the val tasks that need no tool: more than the claim asks
for, because the best of several val figures is too good. Only the first decision counts here, so a run has one step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import dspy

import assay
from assay.datasets import Task, load_tasks
from assay.evaluation import Evaluation
from assay.programs import ToolUser
from assay.programs.toolbox import listing, schema_tool
from claims.storing import Lines, Measured, Setting

DEFAULT, THRESHOLDS = 0.5, (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
ABSTAIN, PAIRS, VAL, TEST = 0.95, 3, 40, 40
ANSWER = 40  # characters: answers do not count here
FIGURES = {"adoption": "adoption_when_needed", "abstention": "abstention_when_not"}


def measure(setting: Setting) -> Measured:
    data = f"tools:irrelevant?size=400&seed={setting.seed}"
    agent = demonstrated([task for task in load_tasks(data) if task.split == "train"])

    def run(threshold: float, split: str, size: int) -> dict[str, dict[str, float]]:
        return figures(
            assay.evaluate(
                agent.deepcopy(),
                rubric="tool_user",
                data=data,
                split=split,
                sizes={split: size},
                model=setting.model,
                parameters={
                    "temperature": 0.1, "max_steps": 2, "tool_usage_threshold": threshold, "context_length": 5000
                },
                seed=setting.seed,
                store=setting.scratch / "tool_use.db",  # one response cache: decisions do not depend on the threshold
                threads=1,
                progress=Lines(),
            ).evaluation
        )  # fmt: skip

    means: dict[float, dict[str, float]] = {}
    for threshold in THRESHOLDS:
        means[threshold] = {name: mean(values) for name, values in run(threshold, "val", VAL).items()}
    best = fitted(means)
    before, after = run(DEFAULT, "test", TEST), run(best, "test", TEST)
    values: dict[str, Any] = {name: {"before": before[name], "after": after[name]} for name in FIGURES}
    val = {str(threshold): of for threshold, of in means.items()}
    return Measured(values=values, facts={"threshold": best, "val": val})


def fitted(means: Mapping[float, Mapping[str, float]]) -> float:
    """The lowest threshold that abstains often enough on val; the highest where none does."""
    return min((at for at, of in means.items() if of["abstention"] >= ABSTAIN), default=max(means))


def demonstrated(train: Sequence[Task]) -> ToolUser:
    """`tool_user` with the decisions of train tasks that need one tool, and of as many that need none."""
    agent = ToolUser(prompt_format="lean", parallel=False, thinking="off")
    needing = [task for task in train if len(task.expected["calls"]) == 1][:PAIRS]
    others = [task for task in train if not task.expected["calls"]][:PAIRS]
    agent.decide.demos = [demonstration(task) for pair in zip(needing, others, strict=True) for task in pair]
    fields: dict[str, Any] = {"answer": dspy.OutputField(max_length=ANSWER)}
    for predictor in (agent.respond, agent.review):
        for name, field in fields.items():
            predictor.signature = predictor.signature.delete(name).append(name, field, str)
    return agent


def demonstration(task: Task) -> dict[str, Any]:
    calls = task.expected["calls"]
    return {
        "question": task.inputs["question"],
        "tools": listing([schema_tool(schema) for schema in task.inputs["tools"]], 4000),
        "results": "",
        "action": calls[0]["name"] if calls else "answer",
    }


def figures(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Of the tasks that need a tool, whether one was called; of the others, whether none was."""
    runs = {task: run.tool_figures for (task, _), run in evaluation.runs.items()}
    return {
        name: {task: values[figure] for task, values in runs.items() if figure in values}
        for name, figure in FIGURES.items()
    }


def mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values) if values else float("nan")
