"""A job whose demonstrations show tasks of several persons, for tests of the data subjects of prompts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from assay.datasets.tasks import task_key
from assay.testing import scripted_lm


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.work = dspy.Predict('question -> working')\n"
        "        self.ask = dspy.Predict('working -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(working=self.work(question=question).working)\n\n"
        "class One(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [
        {
            "inputs": {"question": f"Where does customer {at} of the shop live?"},
            "expected": {"answer": "7"},
            "split": "train" if at < 12 else "val" if at < 16 else "gate" if at < 18 else "test",
            "metadata": {
                "tenant": ("north", "south")[at % 2],
                "data_subject": f"Person {at}",
                "consent": "yes" if at % 3 else "no",
            },
        }
        for at in range(20)
    ]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")

    def answer(request: Any) -> str:
        asked = re.search(r"(?:customer|house number) (\d+)", str(request.messages[-1]))
        number = asked[1] if asked else ""
        right = len(request.messages) > 1 or number in ("1", "2", "4", "5", "7")  # with demonstrations always
        return json.dumps({"working": f"notes on house number {number} of it", "answer": "7" if right else "8"})

    return {"rubric": "r.yaml", "data": "d.jsonl", "lm": scripted_lm(answer), "store": ".assay/s.db"}


def question(at: int) -> str:
    return f"Where does customer {at} of the shop live?"


def task(at: int) -> str:
    return task_key({"question": question(at)})
