"""Thinking tokens of the stronger model on sums that it has to think about: with a fitted policy, and thinking always.

The shipped `classify` with the results as labels, so that a probe can read their probabilities. Half of the tasks have
two terms, which the model adds without a thought; the others have three or four. The demonstrations write the
intermediate sums as the thought. The margin is that of `claims.thinking`. There are 100 sums of two digits, so val is
too small to show the margin, and the policy is fitted by its mean loss there: of 94 tasks it may lose none.
"""

from collections.abc import Iterator

from assay.datasets import Task, load_tasks
from assay.programs import Classify, ThinkingPolicy
from assay.rubrics import load_rubric
from claims.storing import Measured, Setting
from claims.thinking import allocated, thought

EASY, HARD = "arithmetic:terms=2-2&digits=1-1&ops=+", "arithmetic:terms=3-4&digits=1-1&ops=+"
POLICIES = {"thinks once": ThinkingPolicy()} | {
    f"probe {margin}": ThinkingPolicy(probe_margin=margin) for margin in (0.3, 0.45, 0.6, 0.75, 0.9)
}
LABELS = [str(number) for number in range(37)]  # four terms of one digit
BUDGET, DEMONSTRATED, VAL, TEST = 16, 6, 94, 100


def measure(setting: Setting) -> Measured:
    tasks = alternating(setting.seed)
    demonstrated, val, test = ([next(tasks) for _ in range(count)] for count in (DEMONSTRATED, VAL, TEST))
    agent = Classify(LABELS, prompt_format="lean", thinking=BUDGET)
    agent.predict.signature = agent.predict.signature.with_instructions("Calculate the sum.")
    agent.predict.demos = [
        {"text": expression(task), "thought": thought(expression(task)), "label": task.expected["answer"]}
        for task in demonstrated
    ]
    agent.set_parameters({"temperature": 0.1})
    data = [
        [{"text": expression(task), "label": task.expected["answer"], "split": "test"} for task in part]
        for part in (val, test)
    ]
    model = f"embedded:{setting.stronger}"
    rubric = load_rubric("classify")
    return allocated(agent, rubric, data[0], data[1], setting, model=model, fitted_by="loss", policies=POLICIES)


def alternating(seed: int) -> Iterator[Task]:
    size = (DEMONSTRATED + VAL + TEST) // 2  # of each kind; there are 100 sums of two digits
    for pair in zip(*(load_tasks(f"{data}&size={size}&seed={seed}") for data in (EASY, HARD)), strict=True):
        yield from pair


def expression(task: Task) -> str:
    return str(task.metadata["expression"])
