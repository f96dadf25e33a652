"""`assay loop start` refuses a loop whose file, or whose plan, names a file that is not there."""

from pathlib import Path

import pytest

from assay.commands.loop import start_loop
from assay.errors import AssayError, DeploymentError
from assay.traces import Store

PLAN = "steps:\n- {weight: 50, decides: true}\nmetrics:\n- {name: score, success_gain: 0.1}\n"
WATCH = PLAN + "watch:\n- {name: judge_drift, above: 0.1, judge: judge.yaml, anchors: anchors.jsonl}\n"


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("rubric: r.yaml", {"r.yaml": "name: r"}),
        ("rubric: math_qa\nmethod: 'own.py:improve'", {"own.py": ""}),
        ("rubric: math_qa\ndeploy: {plan: plan.yaml}", {"plan.yaml": PLAN}),
        (
            "rubric: math_qa\ndeploy: {plan: plan.yaml}",
            {"plan.yaml": WATCH, "judge.yaml": "", "anchors.jsonl": ""},
        ),
        (
            "rubric: math_qa\ndeploy: {suite_data: d.jsonl, suite_rubric: s.yaml}",
            {"d.jsonl": "", "s.yaml": ""},
        ),
        ("rubric: math_qa\ndeploy: {replay: 3, replay_rubric: r.yaml}", {"r.yaml": ""}),
        ("rubric: math_qa\npool: {against: d.jsonl}", {"d.jsonl": ""}),
        ("rubric: math_qa\noptions: {monitor: r.yaml}", {"r.yaml": ""}),
    ],
)
def test_each_file_that_a_loop_names_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.yaml").write_text(lines)
    for name, text in files.items():
        Path(name).write_text(text)
    Store(tmp_path / "s.db").close()
    with pytest.raises(DeploymentError):  # all files are there, and no agent is registered
        start_loop("nobody", file="loop.yaml", store=tmp_path / "s.db")
    for name, text in files.items():
        Path(name).unlink()
        with pytest.raises(AssayError) as refused:
            start_loop("nobody", file="loop.yaml", store=tmp_path / "s.db")
        assert not isinstance(refused.value, DeploymentError)
        assert name in str(refused.value)
        Path(name).write_text(text)
