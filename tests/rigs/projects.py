"""A small project in the working directory: a program of one predictor, a rubric, rows of sums."""

import csv
import json
import textwrap
from pathlib import Path
from typing import Any

from assay.evaluation import SilentProgress

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        found = self.answer(question=question)
"""
EXACT = "name: r\ncriteria:\n- {name: right, check: exact}\n"
JUDGED = "name: judged\ncriteria:\n- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"


def write_program(file: str = "mine.py", body: str = "return found") -> None:
    """Writes the program `Mine`; `body` ends its `forward`, from line 11 on, and has the prediction `found`."""
    Path(file).write_text(PROGRAM + textwrap.indent(body, " " * 8) + "\n")


def write_rows(file: str, rows: list[dict[str, Any]]) -> str:
    """Writes rows as CSV or as JSON lines; returns the name of the file."""
    if file.endswith(".csv"):
        with open(file, "w", newline="") as opened:
            writer = csv.DictWriter(opened, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(count)]


def write_project(rows: int = 60) -> dict[str, Any]:
    """Writes `mine.py`, `r.yaml`, `judged.yaml` and `data.jsonl`. Returns the settings that name rubric and data."""
    write_program()
    Path("r.yaml").write_text(EXACT)
    Path("judged.yaml").write_text(JUDGED)
    return {"rubric": "r.yaml", "data": write_rows("data.jsonl", sums(rows))}


class Said(SilentProgress):
    """What a job said, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
