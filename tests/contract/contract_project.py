"""A project in a folder of its own, whose model is the scripted server of `prompt_server`, and commands run in it."""

import contextlib
import json
from pathlib import Path
from typing import Any

from rigs.command_line import Done, assay_command

PROGRAMS = '''
import dspy


class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)


def successor(question):
    """Always right, without a model."""
    return {"answer": str(int(question.split()[2]) + 1)}


def mistaken(question):
    """Right for every second number."""
    number = int(question.split()[2])
    return {"answer": str(number + 1 + number % 2)}
'''
RUBRIC = """
name: sums
criteria:
- {name: right, weight: 1, check: exact}
- {name: rambling, weight: -0.2, check: length, with: {max_tokens: 20}}
"""
STEP_RUBRIC = """
name: steps
criteria:
- {name: right, check: exact}
- {name: parsed, scope: step, weight: 0.15, check: parsed}
"""


class Project:
    """Commands in a folder. `reports` has how each command ended, by its words."""

    def __init__(self, folder: Path, model_url: str, *, rows: int = 100) -> None:
        self.folder, self.model_url = folder, model_url
        self.reports: dict[str, Done] = {}
        self.write("sums.py", PROGRAMS)
        self.write("r.yaml", RUBRIC)
        self.write("steps.yaml", STEP_RUBRIC)
        self.write_rows(
            "d.jsonl", [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20, 20 + rows)]
        )
        self.write(
            "assay.toml",
            f'[defaults]\nrubric = "r.yaml"\ndata = "d.jsonl"\n\n'
            f'[program]\nmodel = "openai/m"\napi_base = "{model_url}"\n',
        )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def run(self, *arguments: str, stdin: str = "") -> Done:
        with contextlib.chdir(self.folder):
            return assay_command(*arguments, stdin=stdin)

    def report(self, command: str, *arguments: str, stdin: str = "", code: int = 0) -> Any:
        """The JSON object of a command, which is also stored in `reports`."""
        done = self.reports[command] = self.run(*command.split(), *arguments, "--json", stdin=stdin)
        assert done.code == code, f"assay {command} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.report
