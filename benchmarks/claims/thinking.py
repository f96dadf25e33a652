"""Thinking tokens of the calculator agent on mixed chain sums: with a fitted policy, and thinking at every decision.

Two of three tasks are a bare number, so easy that no thought is needed; the others are chains of two or three terms.
The demonstrations write the intermediate sums as the thought. Without a thought this model takes many chains for bare
numbers and answers with their first term, so that the thought decides whether the calculator is called.

The policy is fitted on one set of tasks and measured on another. As in `assay compile` it is the one that saves most
among those that val shows to lose at most the margin (the upper end of a one-sided 95 % interval): 300 tasks without a
loss. But only thinking tokens count here: a probe repeats the prompt, which is 700 tokens for a thought of ten. Its
thresholds are near 1 because the model is overconfident without a thought. `MARGIN`, `VAL` and `TEST` were declared
before the first run. Both sides have one response cache: where they decide alike, the calls that follow are the same,
and so is the score.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.datasets import Task, load_tasks
from assay.evaluation import Evaluation
from assay.evaluation.statistics import largest_loss, paired_gain
from assay.programs import Agent, MathQA, ThinkingPolicy
from assay.programs.budgets import with_policy
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import numeric
from claims.storing import Measured, Setting, held_out

MARGIN = 0.01
EASY, HARD = "arithmetic:terms=1-1&digits=1-3", "arithmetic:terms=2-3&digits=1-3&ops=+-"
BUDGET, DEMONSTRATED, VAL, TEST = 16, 10, 300, 300
POLICIES = {"thinks once": ThinkingPolicy()} | {
    f"probe {margin}": ThinkingPolicy(probe_margin=margin) for margin in (0.95, 0.97, 0.98, 0.985, 0.99, 0.993)
}


def measure(setting: Setting) -> Measured:
    demonstrated, val, test = mixed(setting.seed)
    agent = MathQA(prompt_format="lean", thinking=BUDGET)
    agent.set_parameters({"max_steps": 2, "temperature": 0.1})
    demonstrate(agent, demonstrated)
    rubric = Rubric("right", [Criterion(name="right", check=numeric)])
    return allocated(agent, rubric, rows(val), rows(test), setting, model=setting.model)


def rows(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    return [{**task.inputs, **task.expected, "split": "test"} for task in tasks]


def allocated(
    agent: Agent,
    rubric: Rubric,
    val: Any,
    test: Any,
    setting: Setting,
    *,
    model: str,
    fitted_by: str = "loss_high",
    policies: Mapping[str, ThinkingPolicy] = POLICIES,
) -> Measured:
    """Fits a policy on `val`, and compares it with thinking at every decision on `test`.

    Args:
        fitted_by: the figure of a policy on val that must be within the margin: `loss_high`, or `loss`, its mean.
    """

    def run(name: str, data: Any) -> Evaluation:
        return held_out(setting, with_policy(agent, policies[name]), rubric=rubric, data=data, model=model)

    fits = compared({name: run(name, val) for name in policies})
    fitting = [name for name, fit in fits.items() if fit[fitted_by] <= MARGIN and fit["saved"] > 0]
    chosen = max(fitting, key=lambda name: fits[name]["saved"], default="thinks once")
    sides = {"before": run("thinks once", test), "after": run(chosen, test)}
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in sides.items()},
        "thinking": {side: spent(evaluation, "tokens") for side, evaluation in sides.items()},
        "loops": {side: spent(evaluation, "loops") for side, evaluation in sides.items()},
        "tokens": {side: dict(evaluation.tokens) for side, evaluation in sides.items()},
    }
    return Measured(values=values, facts={"fitted": chosen, "val": fits, "margin": MARGIN})


def mixed(seed: int) -> tuple[list[Task], list[Task], list[Task]]:
    """Demonstrations, half of them bare numbers, and the tasks of val and test; no task is in two of them."""
    size = DEMONSTRATED + VAL + TEST
    pools = {easy: iter(load_tasks(f"{EASY if easy else HARD}&size={size}&seed={seed}")) for easy in (True, False)}
    demonstrated = [next(pools[at % 2 == 0]) for at in range(DEMONSTRATED)]
    val, test = ([next(pools[at % 3 < 2]) for at in range(count)] for count in (VAL, TEST))
    return demonstrated, val, test


def demonstrate(agent: MathQA, tasks: Sequence[Task]) -> None:
    """Shows each predictor its part of solved tasks; a bare number needs no tool."""
    for task in tasks:
        question, answer, expression = task.inputs["question"], task.expected["answer"], task.metadata["expression"]
        asked, chain = {"question": question, "results": ""}, len(expression.split()) > 1
        action = "calculator" if chain else "answer"
        agent.decide.demos.append({**asked, "thought": thought(expression), "action": action})
        if chain:
            agent.use["calculator"].demos.append({**asked, "expression": expression})
        results = f"{expression} = {answer}" if chain else ""
        agent.respond.demos.append({**asked, "results": results, "answer": answer})


def thought(expression: str) -> str:
    """The intermediate sums, one after the other."""
    first, *rest = expression.split()
    if not rest:
        return f"{first} is a number, nothing to compute."
    total, sums = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        sums.append(f"{total} {operator} {term} = {result}")
        total = result
    return "; ".join(sums) + "."


def compared(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[str, float]]:
    """Loss of score and saved share of the thinking tokens, of each policy against the plain one."""
    plain = evaluations["thinks once"]
    tokens = {name: sum(spent(evaluation, "tokens").values()) for name, evaluation in evaluations.items()}
    return {
        name: {
            "loss": -paired_gain(plain.scores, evaluation.scores).mean,
            "loss_high": largest_loss(plain.scores, evaluation.scores),
            "saved": 1 - tokens[name] / tokens["thinks once"],
        }
        for name, evaluation in evaluations.items()
    }


def spent(evaluation: Evaluation, name: str) -> dict[str, float]:
    uses = {task: run.thinking for (task, _), run in evaluation.runs.items()}
    return {task: float("nan") if use is None else float(getattr(use, name) or 0) for task, use in uses.items()}
