"""Step rewards and credit on the field's worked example, a calculator agent's four steps.

    python examples/step_rewards.py [--json]

The agent (scripted, so that the steps are those of the example) computes (3/5)^(-2), sqrt(7) and 12/(3*4) with a real
calculator and answers 4.4228. Each tool step earns 0.05 for being parsed, for having eligible arguments and for
running; the right answer earns 1.0. Credit then gives each call its return to go.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import dspy

from assay.datasets import Task
from assay.programs.calculator import calculator
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store
from assay.traces.credit import returns, rewards_of

RUBRIC = """
name: steps
criteria:
- {name: correct, check: "assay.rubrics.checks:numeric", with: {tolerance: 0.001}}
- name: parsed
  scope: step
  weight: 0.05
  check: "assay.rubrics.steps:parsed"
  with: {fields: [expression], tools_only: true}
- {name: eligible, scope: step, weight: 0.05, check: "assay.rubrics.steps:eligible"}
- {name: executed, scope: step, weight: 0.05, check: "assay.rubrics.steps:tool_executed"}
"""
STEPS = ["(3/5)^(-2)", "sqrt(7)", "12/(3*4)"]
TASK = Task(
    id="example", inputs={"question": "How much is (3/5)^(-2) + sqrt(7) - 12/(3*4)?"}, expected={"answer": "4.4228"}
)


class Calculating(dspy.Module):
    """Three expressions, one after the other, then the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = dspy.Predict("question, results: list[str] -> expression")
        self.finish = dspy.Predict("question, results: list[str] -> answer")
        self.tool = dspy.Tool(calculator, name="calculator")

    def forward(self, question: str) -> dspy.Prediction:
        results: list[str] = []
        for _ in STEPS:
            results.append(self.tool(expression=self.choose(question=question, results=results).expression))
        return self.finish(question=question, results=results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    answers = iter([*(json.dumps({"expression": step}) for step in STEPS), json.dumps({"answer": "4.4228"})])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rubric.yaml"
        path.write_text(RUBRIC)
        rubric = load_rubric(path)
        with Store(Path(folder) / "assay.db") as store:
            recorder = Recorder(store)
            lm = scripted_lm(lambda request: next(answers), observers=[recorder.observe])
            rollout = Rollout(task_id=TASK.id, inputs=dict(TASK.inputs))
            with dspy.context(lm=lm, adapter=dspy.JSONAdapter()), recorder.active(), recorder.rollout(rollout):
                prediction = Calculating()(**TASK.inputs)
                rollout.prediction = dict(prediction.items())
            rollout.score = rubric.score(TASK, prediction, rollout).value
            recorder.scored(rollout, rubric.step_rewards(TASK, rollout))
            store.flush()
            rollout = store.rollout(rollout.id)  # what any later stage would read
    rewards = rewards_of(rollout)
    if arguments.json:
        print(
            json.dumps({"rewards": [round(reward, 10) for reward in rewards], "return": round(math.fsum(rewards), 10)})
        )
        return
    print(TASK.inputs["question"])
    for transition, reward, credited in zip(rollout.transitions, rewards, returns(rewards), strict=True):
        did = ", ".join(f"{tool.name}({tool.arguments['expression']}) = {tool.result}" for tool in transition.tools)
        earned = (
            " + ".join(f"{value:g} {name}" for name, value in transition.step_rewards.items()) or "the answer's score"
        )
        print(
            f"  {transition.t}: {did or transition.output:40} reward {reward:.2f} ({earned}), "
            f"return to go {credited:.2f}"
        )
    print(f"return of the rollout: {math.fsum(rewards):.2f}")


if __name__ == "__main__":
    main()
