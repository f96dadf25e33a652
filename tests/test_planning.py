"""`--dry-run`: what each command would take, and nothing is run or left behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.planning import plan
from assay.testing import scripted_lm

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(100)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "flags"),
    [("compile", []), ("tune", ["--trials", "4"]), ("collect", ["-n", "3"]), ("evaluate", ["--samples", "2"]), ("improve", ["--name", "up"])],
)
def test_every_command_prints_its_estimate_and_runs_nothing(place: Path, command: str, flags: list[str]) -> None:
    words = [command, "mine.py:Mine", "--rubric", "r.yaml", "--data", "data.jsonl", "--model", "openai/gpt-4o-mini", "--dry-run", *flags]
    ended = CliRunner().invoke(group, words, standalone_mode=False, catch_exceptions=False)
    assert "calls, about" in ended.output
    assert "minutes unknown: the store has no call of this model yet" in ended.output
    assert "$0." in ended.output
    assert not (place / ".assay" / "assay.db").exists()
    found = CliRunner().invoke(group, [*words, "--json"], standalone_mode=False, catch_exceptions=False)
    assert json.loads(found.stdout.strip().splitlines()[-1])["calls"] > 0


def test_estimates_by_hand_and_minutes_from_the_store(place: Path) -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    options: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "lm": lm, "adapter": "json", "sizes": {"val": 8}}
    assert plan("evaluate", "mine.py:Mine", **options, repeats=2).minutes is None
    assert lm.scripted.calls == 0
    assay.evaluate("mine.py:Mine", **options)
    found = plan("evaluate", "mine.py:Mine", **options, repeats=2)
    assert found.calls == 16  # 2 runs of 8 tasks, a call each
    assert found.minutes is not None
    assert 0 < found.minutes < 1
    assert plan("compile", "mine.py:Mine", **options, max_calls=50).calls == 50
