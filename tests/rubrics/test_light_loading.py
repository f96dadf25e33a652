"""A rubric of checks is loaded and scored without DSPy, a model or a database, as a suite of unit tests needs it."""

import subprocess
import sys
from pathlib import Path

CHECKS = ("exact", "numeric", "c.py:mine", "regex, with: {field: answer, pattern: '[0-9]+'}")
CODE = """
import sys, assay
heavy = {'dspy', 'sqlalchemy', 'litellm', 'torch', 'optuna'}
rubric = assay.load_rubric('r.yaml')
print(sorted(heavy & sys.modules.keys()))
print(rubric.score({'question': '2 + 2', 'answer': '4'}, {'answer': '4'}).value)
print(sorted(heavy & sys.modules.keys()))
"""


def test_a_rubric_of_checks_loads_neither_dspy_nor_sqlalchemy(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("def mine(task, prediction, rollout):\n    return prediction['answer'] == '4'\n")
    criteria = "".join(f"- {{name: c{at}, check: {check}}}\n" for at, check in enumerate(CHECKS))
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n{criteria}")
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "1.0", "[]"], done.stderr
