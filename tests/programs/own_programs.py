"""Programs in the user's files, compiled and loaded in another place."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import assay
from assay.testing import scripted_lm

PROGRAM = """
import dspy
from helper import PREFIX
from parts import deep

class QA(dspy.Module):
    def __init__(self, k: int = 1):
        super().__init__()
        self.k = k
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        import late
        said = self.answer(question=question)
        return dspy.Prediction(answer=f"{PREFIX}{late.mark()}{deep.mark()}{self.k} {said.answer}")
"""


def write_program(folder: Path, prefix: str = "A") -> str:
    """A program with a helper beside it, one in a package, and one that is only imported when it runs."""
    (folder / "parts").mkdir(parents=True)
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "helper.py").write_text(f"PREFIX = '{prefix}'\n")
    (folder / "late.py").write_text("from helper import PREFIX\ndef mark(): return 'late' + PREFIX\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "deep.py").write_text("from . import deeper\ndef mark(): return deeper.MARK\n")
    (folder / "parts" / "deeper.py").write_text("MARK = '-deep-'\n")
    return f"{folder / 'agent.py'}:QA"


def answer(request: Any) -> str:
    if request.config.response_format is None:
        return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"
    return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "4"))


def rows(folder: Path, count: int = 8) -> str:
    path = folder / "rows.jsonl"
    splits = ("train", "val", "gate", "test")
    path.write_text(
        "\n".join(
            json.dumps({"question": f"What is {i} + 0?", "answer": "4", "split": splits[i % 4]}) for i in range(count)
        )
    )
    return str(path)


RUBRIC = "name: r\ncriteria:\n  - name: right\n    check: contains\n"


def compiled(program: Any, folder: Path, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rubric = folder / "r.yaml"
    rubric.write_text(RUBRIC.replace("contains", "check.py:right"))
    (folder / "check.py").write_text(
        "def right(task, prediction, rollout):\n    return 1.0 if prediction['answer'] else 0.0\n"
    )
    options = {"lm": scripted_lm(answer), "optimizer": "labeled", "store": folder / "s" / "a.db", **options}
    report = assay.compile(program, rubric=rubric, data=rows(folder), out=folder / "artifact", **options)
    return report.artifact


def source(artifact: Path) -> list[str]:
    """Files of the program in an artifact."""
    return sorted(json.loads((artifact / "manifest.json").read_text())["source"]["files"])


def in_another_place(artifact: Path, elsewhere: Path, code: str, *, server: str = "") -> str:
    """Output of a new Python process that can import only the artifact's copy."""
    elsewhere.mkdir(parents=True)
    shutil.copytree(artifact, elsewhere / "a")
    script = f"import json, dspy, assay\nloaded = assay.load('a')\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=elsewhere, capture_output=True, text=True, env=_environment(server)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def _environment(server: str) -> dict[str, str]:
    return {**os.environ, "OPENAI_API_KEY": "none", **({"OPENAI_API_BASE": server} if server else {})}
