"""Rubrics beyond DSPy: a plain callable for any agent, a criteria file of verifiers, points as in HealthBench, one
call for all criteria, and a group compared in pairs. The embedded model judges; no key is needed.

    pip install 'dspy-assay[embedded]'
    python examples/rubric_anywhere.py [--json]
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import assay
from assay.judges import resolver
from assay.rubrics import Criterion, JudgeSpec, Rubric, checks, points_rubric

TASK = {"question": "What is 12 * 12?", "answer": "144"}
VERIFIERS = """
[[criteria]]
name = "answers"
text = "Does the output answer the question?"
weight = 2

[[criteria]]
name = "tone"
text = "How friendly is the output?"
choices = ["rude", "neutral", "friendly"]
"""
POINTS = [
    {"criterion": "The output says 144.", "points": 5},
    {"criterion": "The output refuses to answer.", "points": -3},
]

parser = argparse.ArgumentParser()
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()
lm = assay.get_lm("embedded/smollm2-135m", seed=0)


def my_agent(question: str) -> str:
    """Anything that answers: no DSPy in it."""
    return "It is 144."


answer = my_agent(TASK["question"])
outcome = {}

rambling = Criterion(name="rambling", weight=-1, check=checks.length, arguments={"max_tokens": 40}, when="right")
by_code = Rubric("right", [Criterion(name="right", check=checks.numeric), rambling])
outcome["plain callable"] = by_code(TASK, answer).value

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "criteria.toml"
    file.write_text(VERIFIERS)
    rubric = assay.load_rubric(file, judge_model=lm)
    outcome["verifiers' file"] = rubric.score(TASK, answer).value
    if importlib.util.find_spec("verifiers") is not None:  # its own reader, where it is installed
        from verifiers.v1.judges.rubric import load_criteria

        theirs = [(c.name, c.text, c.weight, tuple(c.choices)) for c in load_criteria(file)]
        assert theirs == [
            (c.name, c.judge.text, c.weight, c.judge.scale) for c in rubric.criteria if c.judge is not None
        ]

outcome["points"] = points_rubric(POINTS, resolver=resolver(lm)).score(TASK, answer).value

criteria = [
    Criterion(name="clear", judge=JudgeSpec(text="Is it clear?")),
    Criterion(name="kind", judge=JudgeSpec(text="Is it kind?")),
]
outcome["all criteria in one call"] = (
    Rubric("both", criteria, judging="together", resolver=resolver(lm)).score(TASK, answer).value
)

better = Rubric("better", [Criterion(name="better", judge=JudgeSpec(use="better_answer"))], resolver=resolver(lm))
outcome["a group, in pairs"] = [result.value for result in better.score_group(TASK, [answer, "I do not know.", "143"])]

if arguments.json:
    print(json.dumps(outcome))
else:
    for name, value in outcome.items():
        print(f"{name:25} {value}")
