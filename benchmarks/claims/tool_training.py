"""Adoption and abstention of `tool_user` on tools that are in no train task, before and after fine-tuning.

Tasks are those of the stage `irrelevant` of the shipped curriculum `tool_use`: two tools, of which one, both or (30 %)
none are needed. The model is fine-tuned on runs of a scripted agent, which makes the expected calls, on train tasks of
that stage; half of them need no tool. No tool of val and test is in them. The agent has no demonstrations.

Each side has a threshold of its own, fitted in the same way: the lowest of `THRESHOLDS` at which the agent abstains on
at least `ABSTAIN` of the val tasks that need no tool. This is more than the claim asks for, because the best of several
val figures is too good. So adoption is compared at about equal abstention. Only the first decision counts here, so the
arguments of calls are not written. All constants were declared before the first run of the seeds that are reported.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import dspy

import assay
from assay.datasets import Task, load_tasks
from assay.evaluation import Evaluation
from assay.programs import ToolUser
from assay.programs.agent import WRITTEN_DECISIONS
from claims.storing import Lines, Measured, Setting
from claims.trained import use_scratch_adapters, warmed_up

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
ABSTAIN, SIZE, VAL, TEST = 0.98, 1400, 200, 150
PAIRS, RATE = 64, 1e-3  # train tasks that need tools, and as many that need none; learning rate
PARAMETERS = {"temperature": 0.1, "max_steps": 2, "context_length": 5000}
FIGURES = {"adoption": "adoption_when_needed", "abstention": "abstention_when_not"}
ANY = """name: any
criteria:
  - {name: ended, weight: 1, check: "claims.edit_agent:ended"}
"""


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    data = f"tools:irrelevant?size={SIZE}&seed={setting.seed}"
    models = {"before": setting.model, "after": trained(setting, load_tasks(data))}
    results, facts = dict[str, dict[str, dict[str, float]]](), dict[str, Any]()
    for side, model in models.items():
        means = {at: means_of(run(setting, data, model, at, "val", VAL)) for at in THRESHOLDS}
        best = fitted(means)
        results[side] = run(setting, data, model, best, "test", TEST)
        facts[side] = {"threshold": best, "val": {str(at): of for at, of in means.items()}}
    values: dict[str, Any] = {name: {side: of[name] for side, of in results.items()} for name in FIGURES}
    return Measured(values=values, facts=facts)


def run(
    setting: Setting, data: str, model: str, threshold: float, split: str, size: int
) -> dict[str, dict[str, float]]:
    """The figures by task."""
    return figures(
        assay.evaluate(
            FirstDecision(),
            rubric="tool_user",
            data=data,
            split=split,
            sizes={split: size},
            model=model,
            parameters={**PARAMETERS, "tool_usage_threshold": threshold},
            seed=setting.seed,
            store=setting.scratch / "tool_training.db",  # one response cache: decisions do not depend on the threshold
            threads=1,
            progress=Lines(),
        ).evaluation
    )


class FirstDecision(ToolUser):
    """`tool_user` that makes its first decision and no more: arguments and answer are not written."""

    input_names: ClassVar[tuple[str, ...]] = ("question", "tools")

    def __init__(self) -> None:
        super().__init__(prompt_format="lean", parallel=False, thinking="off")

    def _written(self, name: str, inputs: dict[str, Any], observations: list[str]) -> dict[str, Any]:
        return {"tool": name, "name": self.tools[name].name, "arguments": {}, "result": None, "error": None}

    def _answer(self, inputs: dict[str, Any], observations: list[str]) -> dict[str, Any]:
        return {"answer": "no tool fits"}


def trained(setting: Setting, tasks: Sequence[Task]) -> str:
    """The model after fine-tuning on the expected calls of train tasks; its name."""
    rows = balanced([task for task in tasks if task.split == "train"])
    wanted = {task.inputs["question"]: task.expected["calls"] for task in rows}
    (setting.scratch / "any.yaml").write_text(ANY)

    def answer(request: Any) -> str:
        asked = request.messages[-1].parts[0].text
        calls = wanted[max((question for question in wanted if question in asked), key=len)]
        return f"action: {calls[0]['name'] if calls else 'answer'}"

    with dspy.context(**{WRITTEN_DECISIONS: True}):  # decisions as the model writes them
        return warmed_up(
            setting,
            FirstDecision(),
            answer,
            rows=len(rows),
            learning_rate=RATE,
            rubric=str(setting.scratch / "any.yaml"),
            data=[
                {"inputs": task.inputs, "expected": task.expected, "metadata": task.metadata, "split": "train"}
                for task in rows
            ],
            parameters=PARAMETERS,
        )


def balanced(train: Sequence[Task]) -> list[Task]:
    """As many tasks that need tools as tasks that need none."""
    parts = [[task for task in train if bool(task.expected["calls"]) is needs][:PAIRS] for needs in (True, False)]
    return [task for pair in zip(*parts, strict=True) for task in pair]


def fitted(means: Mapping[float, Mapping[str, float]]) -> float:
    """The lowest threshold that abstains often enough on val; the highest where none does."""
    return min((at for at, of in means.items() if of["abstention"] >= ABSTAIN), default=max(means))


def figures(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Of the tasks that need a tool, whether one was called; of the others, whether none was."""
    runs = {task: run.tool_figures for (task, _), run in evaluation.runs.items()}
    return {
        name: {task: values[figure] for task, values in runs.items() if figure in values}
        for name, figure in FIGURES.items()
    }


def means_of(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of.values()) / len(of) if of else float("nan") for name, of in figures.items()}
