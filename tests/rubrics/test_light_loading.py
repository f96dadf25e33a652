"""A rubric of checks is loaded and scored without DSPy, a model or a database, as a suite of unit tests needs it."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = "{'dspy', 'sqlalchemy', 'litellm', 'torch', 'optuna'}"


@pytest.mark.parametrize("check", ["exact", "numeric", "c.py:mine", "regex, with: {field: answer, pattern: '[0-9]+'}"])
def test_a_rubric_of_checks_loads_neither_dspy_nor_sqlalchemy(tmp_path: Path, check: str) -> None:
    (tmp_path / "c.py").write_text("def mine(task, prediction, rollout):\n    return prediction['answer'] == '4'\n")
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: right, check: {check}}}\n")
    code = (
        "import sys, assay\n"
        "rubric = assay.load_rubric('r.yaml')\n"
        f"print(sorted({HEAVY} & sys.modules.keys()))\n"
        "print(rubric.score({'question': '2 + 2', 'answer': '4'}, {'answer': '4'}).value)\n"
        f"print(sorted({HEAVY} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["[]", "1.0", "[]"], done.stderr
