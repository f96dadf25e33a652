"""What is not imported: DSPy and a database by a rubric of checks, litellm by jobs with a server of the user's own."""

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


EVALUATED = """
import sys, assay
from assay.testing import scripted_server
with scripted_server.running() as api:
    report = assay.evaluate("p.py:program", rubric="exact", data="d.csv", split="all", model="openai/m", api_base=api)
print(report.to_dict()["cost_usd"], sorted({'litellm', 'openai', 'torch'} & sys.modules.keys()))
"""


def test_an_evaluation_on_a_server_of_ones_own_does_not_load_litellm(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text('import dspy\n\nprogram = dspy.Predict("question -> answer")\n')
    (tmp_path / "d.csv").write_text("question,answer\nWhat is 1 + 1?,2\nWhat is 2 + 1?,3\n")
    done = subprocess.run([sys.executable, "-c", EVALUATED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "None []", done.stderr
