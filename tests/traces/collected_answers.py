"""A program for tests of collecting and rating, and a scripted model that answers it."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [
        {
            "inputs": {"question": f"q{at}"},
            "expected": {"answer": "7"},
            "metadata": {"data_subject": "ann", "difficulty": "easy"},
        }
        for at in range(30)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    return f"{tmp_path}/p.py:P"
