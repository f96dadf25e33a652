"""One compile run on chain sums: task completion, tool adoption, sums of another length, and lines that are written.

The program is `calculator_agent.py`, compiled against `calculator_agent.yaml`. Each seed has tasks of its own; the
reported ones are sealed test tasks. The longer sums are of a kind that the compile run never saw.

Counting rule for prompt effort: lines that are not empty and no comments or docstrings, of at most 120 characters. The
compiled side counts the program, the rubric and the command; the other side only the text of the prompt, although it
needs the program too.
"""

import ast
import copy
from pathlib import Path
from typing import Any

import assay
from assay.evaluation import Evaluation
from claims.calculator_agent import Sums
from claims.storing import Lines, Measured, Setting

HERE = Path(__file__).parent
PROGRAM, RUBRIC, PROMPT = (HERE / f"calculator_{name}" for name in ("agent.py", "agent.yaml", "prompt.txt"))
COMMAND = (
    "assay compile calculator_agent.py --rubric calculator_agent.yaml --data DATA --prompt-format lean "
    "--set temperature=0.1 --demos 6"
)
DATA, LONGER = "arithmetic:terms=2-3&digits=2-3&size=600", "arithmetic:terms=5-6&digits=3-4&size=600"
SEARCH_CALLS, DEMOS, TEST, LONG = 80, 6, 16, 10


def measure(setting: Setting) -> Measured:
    common: dict[str, Any] = {
        "rubric": RUBRIC,
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "sums.db",
        "threads": 1,
        "progress": Lines(),
    }
    seeded = f"&seed={setting.seed}"
    report = assay.compile(
        f"{PROGRAM}:Sums",
        data=DATA + seeded,
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,  # nearest demonstrations differ by task, so each prompt is read anew: few keep a run short
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "compiled",
        **common,
    )
    sides: dict[str, Any] = {"before": Sums(prompt_format="lean"), "after": report.artifact, "by hand": by_hand()}

    def run(side: str, data: str, count: int) -> Evaluation:
        program = copy.deepcopy(sides[side])
        return assay.evaluate(program, data=data + seeded, split="test", sizes={"test": count}, **common).evaluation

    on_test = {side: run(side, DATA, TEST) for side in sides}
    on_longer = {side: run(side, LONGER, LONG) for side in ("before", "after")}
    values = {
        "correct": {side: grades(found, "correct") for side, found in on_test.items()},
        "adoption": {side: grades(found, "tool_adoption") for side, found in on_test.items()},
        "longer": {side: grades(found, "correct") for side, found in on_longer.items()},
        "tokens": {side: dict(found.tokens) for side, found in on_test.items()},
    }
    facts = {
        "winner": report.outcome.winner,
        "search_calls": report.to_dict()["search_calls"],
        "lines": {
            "program": code_lines(PROGRAM),
            "rubric": text_lines(RUBRIC),
            "command": 1,
            "prompt": text_lines(PROMPT),
        },
        "characters": {"compiled": size(PROGRAM) + size(RUBRIC) + len(COMMAND), "prompt": size(PROMPT)},
    }
    return Measured(values=values, facts=facts)


def grades(evaluation: Evaluation, criterion: str) -> dict[str, float]:
    return {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}


def by_hand(examples: int | None = None) -> Sums:
    """The agent with the worked examples of the hand-written prompt, each predictor with its part of them."""
    agent = Sums(prompt_format="lean")
    for text in PROMPT.read_text().strip().split("\n\n")[:examples]:
        lines = [tuple(line.split(": ", 1)) for line in text.splitlines()]
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


def text_lines(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def code_lines(path: Path) -> int:
    """Lines of code without the module's docstring."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    docstring = (first.end_lineno or 0) if isinstance(first, ast.Expr) else 0
    return sum(bool(line.strip()) for line in text.splitlines()[docstring:])


def size(path: Path) -> int:
    return sum(len(line.strip()) for line in path.read_text().splitlines())
