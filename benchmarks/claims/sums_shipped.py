"""Lines a person writes for sums with a calculator: the hand-written prompt, and the shipped `math_qa` compiled.

The prompt, its worked examples and the counting rule are those of `claims.hand_written`. Both sides are `math_qa`.
Program and rubric are shipped with the package, so that a person writes the command. Data are not counted.
"""

from typing import Any

import assay
from assay.programs import MathQA
from claims.hand_written import PROMPT, by_hand, code_lines
from claims.storing import Lines, Measured, Setting
from claims.sums import DATA, DEMOS, SEARCH_CALLS, TEST

COMMAND = "assay compile math_qa --rubric math_qa --data DATA --prompt-format lean --set temperature=0.1 --demos 6"


def measure(setting: Setting) -> Measured:
    common: dict[str, Any] = {
        "rubric": "math_qa",
        "data": f"{DATA}&seed={setting.seed}",
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "shipped.db",
        "threads": 1,
        "progress": Lines(),
    }
    report = assay.compile(
        "math_qa",
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "compiled",
        **common,
    )
    sides: dict[str, Any] = {"right": report.artifact, "right by hand": by_hand(MathQA(prompt_format="lean"))}
    values = {name: {"after": _right(program, common)} for name, program in sides.items()}
    lines = {"program": 0, "rubric": 0, "command": 1, "prompt": code_lines(PROMPT)}
    return Measured(values=values, facts={"lines": lines, "winner": report.outcome.winner})


def _right(program: Any, common: dict[str, Any]) -> dict[str, float]:
    evaluation = assay.evaluate(program, split="test", sizes={"test": TEST}, **common).evaluation
    return {task: result.grades.get("correct", float("nan")) for task, result in evaluation.results.items()}
