"""Complete compile jobs on a scripted model: under a small cap, on eight rows, with the defaults on 500 tasks."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.testing import scripted_lm

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


def adding(gain: float) -> Any:
    """A model that is right on half of the tasks, and on `gain` more where demonstrations show how."""

    def answer(request: Any) -> str:
        number = int((request.messages[-1].text or "").split("number ")[1].split(".")[0])
        drawn = int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % 1000 / 1000
        right = drawn < 0.5 + gain * (len(request.messages) > 4)
        return json.dumps({"answer": str(number + 2 if right else number)})

    return scripted_lm(answer)


def write(place: Path, rows: list[dict[str, Any]]) -> None:
    (place / "mine.py").write_text(PROGRAM)
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (place / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def row(number: int, **more: str) -> dict[str, Any]:
    return {"question": f"What do you say to number {number}.", "answer": str(number + 2), **more}


def compiled(lm: Any, **options: Any) -> dict[str, Any]:
    report: dict[str, Any] = assay.compile(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, prompt_format="json", threads=2, **options
    ).to_dict()
    return report


@pytest.mark.slow
def test_cap_of_250_calls_decides_the_gate_and_fills_the_test_table(tmp_path: Path) -> None:
    write(tmp_path, [row(n) for n in range(500)])
    lm = adding(0.5)
    data = compiled(lm, max_calls=250)
    assert lm.scripted.calls == data["calls"] <= 250
    assert data["stopped"] is None
    assert data["replaces"]
    for side in ("baseline", "compiled"):
        assert data["test"][side]["score"] is not None
        # half of the cap, 2 calls a pair, 2 splits: 31 tasks, fewer where the gain is decided before
        assert data["test"][side]["n"] >= 20
    assert data["test"]["gain"]["n"] == data["test"]["compiled"]["n"]


@pytest.mark.slow
def test_cap_of_250_calls_leaves_a_small_gain_undecided_and_the_test_sealed(tmp_path: Path) -> None:
    write(tmp_path, [row(n) for n in range(500)])
    lm = adding(0.15)
    data = compiled(lm, max_calls=250)
    assert lm.scripted.calls == data["calls"] <= 250
    assert data["stopped"] is None
    assert data["gate"]["n"] >= 25  # half of the cap, 2 calls a pair, 2 splits: 31 tasks
    assert not data["replaces"]
    assert data["test"] == {"baseline": None, "compiled": None, "gain": None}


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "pairs"), [(0.5, 42 + 48), (0.0, 84 + 96)])
def test_default_compile_of_500_tasks_spends_most_calls_on_the_search(tmp_path: Path, gain: float, pairs: int) -> None:
    """Gate and test (101 and 119 tasks) are evaluated after each fifth of their tasks.

    A gain of 0.5 is significant by the second evaluation at the latest. Without a gain, the fourth stops for futility
    at the latest: a difference of 0.1 is then unlikely to become significant.
    """
    write(tmp_path, [row(n) for n in range(500)])
    lm = adding(gain)
    data = compiled(lm)
    assert lm.scripted.calls == data["calls"]
    assert data["search_calls"] <= 300
    assert data["calls"] - data["search_calls"] <= 2 * pairs + 5  # and the preflight
