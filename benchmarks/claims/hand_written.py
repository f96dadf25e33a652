"""The calculator agent with a hand-written prompt, on the test tasks of `sums`, and the lines of both.

`calculator_prompt.txt` is the shortest prompt that was as good as the compiled one in a trial on val tasks of another
seed: of two, four and eight worked examples, two had 5 of 12 tasks right, four and eight all of them.

Counting rule: lines that are not empty, without the module's docstring, of at most 120 characters. The compiled side
counts the program, the rubric and the command; the other side only the prompt. Data are not counted.
"""

import ast
from pathlib import Path

from assay.programs import ToolAgent
from claims.calculator_agent import Sums
from claims.storing import Measured, Setting
from claims.sums import COMMAND, DATA, PROGRAM, RUBRIC, TEST, evaluated, grades

PROMPT = Path(__file__).parent / "calculator_prompt.txt"


def measure(setting: Setting) -> Measured:
    evaluation = evaluated(setting, by_hand(Sums(prompt_format="lean")), DATA, TEST)
    values = {
        "correct by hand": {"after": grades(evaluation, "correct")},
        "tokens by hand": {"after": dict(evaluation.tokens)},
    }
    facts = {
        "lines": {name: code_lines(path) for name, path in (("program", PROGRAM), ("rubric", RUBRIC))}
        | {"command": 1, "prompt": code_lines(PROMPT)},
        "characters": {"compiled": size(PROGRAM) + size(RUBRIC) + len(COMMAND), "prompt": size(PROMPT)},
    }
    return Measured(values=values, facts=facts)


def by_hand(agent: ToolAgent) -> ToolAgent:
    """An agent with a calculator and the worked examples of the prompt, each predictor with its part of them."""
    for text in PROMPT.read_text().strip().split("\n\n"):
        lines = [line.split(": ", 1) for line in text.splitlines()]
        at = [name for name, _ in lines].index("results")
        first, last = dict(lines[:at]), dict(lines[at:])
        asked = {"question": first["question"], "results": ""}
        done = {**asked, "results": last["results"]}
        agent.decide.demos += [
            {**asked, "thought": first["thought"], "action": first["action"]},
            {**done, "thought": last["thought"], "action": last["action"]},
        ]
        agent.use["calculator"].demos.append({**asked, "expression": first["expression"]})
        agent.respond.demos.append({**done, "answer": last["answer"]})
    return agent


def written(path: Path) -> list[str]:
    """The lines that count."""
    text = path.read_text()
    skipped = 0
    if path.suffix == ".py" and isinstance(first := ast.parse(text).body[0], ast.Expr):
        skipped = first.end_lineno or 0
    return [line.strip() for line in text.splitlines()[skipped:] if line.strip()]


def code_lines(path: Path) -> int:
    return len(written(path))


def size(path: Path) -> int:
    return sum(map(len, written(path)))
