"""A program of the user's own whose model adds two only where its prompt says or shows that, and compilations of it."""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.testing import scripted_lm

ADD = "Add two to the number that is asked for."


class Mine(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(question=question)


PROGRAM = f"import dspy\n\n\n{inspect.getsource(Mine)}"


def row(number: int, **more: str) -> dict[str, str]:
    return {"question": f"What do you say to number {number}.", "answer": str(number + 2), **more}


ROWS = [row(number) for number in range(80)]


def adds(request: Any, proposed: str = ADD) -> str:
    """Adds 2 where instructions or demonstrations say so; proposes an instruction to whoever asks for one."""
    fields = request.config.response_format["schema"]["properties"] if request.config.response_format else {}
    if set(fields) != {"answer"}:
        return json.dumps(dict.fromkeys(fields, proposed)) if fields else f"```\n{proposed}\n```"
    number = int((request.messages[-1].text or "").split("number ")[1].split(".")[0])
    taught = len(request.messages) > 4 or ADD in str(request)
    return json.dumps({"answer": str(number + 2 if taught else number)})


def write(rows: Iterable[dict[str, str]] = ROWS) -> None:
    """Program, rubric and data, in the working directory."""
    Path("mine.py").write_text(PROGRAM)
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))


def compiled(optimizer: Any = "labeled", *, program: Any = "mine.py:Mine", **options: Any) -> Any:
    """The report of a compile of what `write` wrote."""
    defaults = {"rubric": "r.yaml", "data": "data.jsonl", "prompt_format": "json", "threads": 1}
    options = {"lm": scripted_lm(adds), **defaults, **options}
    return assay.compile(program, optimizer=optimizer, **options)
