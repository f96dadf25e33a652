"""Repair of mutated functions of the standard library by the stronger model: hidden tests of the shipped `code_repair`.

Nothing is compiled or trained. Functions of at most `LONGEST` characters, because two cores take minutes for longer
ones. The unedited code never passes all hidden tests, so that any share is a gain.
"""

import math

from assay.datasets import load_tasks
from assay.programs import CodeRepair
from claims.storing import Measured, Setting, held_out

LONGEST, DRAWN, TEST, STEPS = 500, 80, 8, 4


def measure(setting: Setting) -> Measured:
    drawn = load_tasks(f"mutants:stdlib?size={DRAWN}&seed={setting.seed}")
    tasks = [task for task in drawn if len(task.inputs["code"]) <= LONGEST][:TEST]
    agent = CodeRepair(prompt_format="lean")
    agent.set_parameters({"temperature": 0.1, "max_steps": STEPS, "reasoning_depth": 1})
    evaluation = held_out(
        setting,
        agent,
        rubric="code_repair",
        data=[
            {"inputs": task.inputs, "expected": task.expected, "metadata": task.metadata, "split": "test"}
            for task in tasks
        ],
        model=f"embedded:{setting.stronger}",
    )
    passed = {task: result.grades["tests_pass"] for task, result in evaluation.results.items()}
    repaired = {task: grade if math.isnan(grade) else float(grade == 1) for task, grade in passed.items()}
    values = {
        "repaired": {"after": repaired},
        "hidden tests": {"after": passed},
        "score": {"after": evaluation.scores},
    }
    return Measured(values=values, facts={"size": TEST, "longest": LONGEST, "steps": STEPS})
