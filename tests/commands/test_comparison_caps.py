"""The caps of a comparison are those of both sides together."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.testing import scripted_lm

PROGRAM = "import dspy\n\np = dspy.Predict('question -> answer')\nq = dspy.ChainOfThought('question -> answer')\n"


def test_a_comparison_stays_below_its_caps_and_resumes_with_higher_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [{"question": f"What is {n} + 1?", "answer": "1", "split": "val"} for n in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lm = scripted_lm(lambda request: '{"reasoning": "so", "answer": "1"}')

    def compared(**more: Any) -> dict[str, Any]:
        return assay.compare(
            "p.py:p", "p.py:q", rubric="r.yaml", data="d.jsonl", lm=lm, preflight=False, threads=1,
            prompt_format="json", split="val", **more,
        ).to_dict()  # fmt: skip

    stopped = compared(max_calls=21)
    assert stopped["stopped"] is not None
    assert stopped["calls"] == lm.scripted.calls == 21
    assert min(stopped["a"]["n"], stopped["b"]["n"]) > 3
    assert stopped["unrecorded"] == 0
    whole = compared(resume=True)
    assert whole["stopped"] is None
    assert whole["calls"] == lm.scripted.calls == 60
