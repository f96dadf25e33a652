"""`--dry-run`: estimates of each command; nothing is run or written."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.commands.improve import Improve
from assay.errors import DataError
from assay.runs.planning import plan_of
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


def test_estimates_match_hand_calculation_and_minutes_come_from_the_store(place: Path) -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    options: dict[str, Any] = {
        "rubric": "r.yaml",
        "data": "data.jsonl",
        "lm": lm,
        "prompt_format": "json",
        "sizes": {"val": 8},
    }
    assert plan_of(Evaluate("mine.py:Mine", **options, samples=2)).minutes is None
    assert lm.scripted.calls == 0
    assay.evaluate("mine.py:Mine", **options)
    estimate = plan_of(Evaluate("mine.py:Mine", **options, samples=2))
    assert estimate.calls == 16  # 2 runs of 8 tasks, a call each
    assert estimate.minutes is not None
    assert 0 < estimate.minutes < 1
    assert plan_of(Compile("mine.py:Mine", **options, max_calls=50)).calls == 50


def test_a_job_with_too_few_tasks_is_refused_as_without_dry_run(place: Path) -> None:
    (place / "data.jsonl").write_text("".join(f'{{"question": "What is {n}?", "answer": "{n}"}}\n' for n in range(3)))
    options: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl"}
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    with pytest.raises(DataError, match=r"3 distinct tasks.*at least 4") as ran:
        assay.compile("mine.py:Mine", lm=lm, **options)
    for command in (Compile("mine.py:Mine", lm=lm, **options), Improve("mine.py:Mine", name="better", **options)):
        with pytest.raises(DataError) as planned:
            plan_of(command)
        assert str(planned.value) == str(ran.value)


def test_repeated_and_contradicting_rows_are_named_with_and_without_dry_run(place: Path) -> None:
    data = place / "data.jsonl"
    rows = [json.dumps({"row": at, **json.loads(line)}) for at, line in enumerate(data.read_text().splitlines())]
    more = [
        json.dumps({"row": 200, "question": "What is 5?", "answer": "5"}),
        json.dumps({"row": 201, "question": "What is 6?", "answer": "7"}),
    ]
    data.write_text("\n".join([*rows, *more]))
    words = [
        "evaluate",
        "mine.py:Mine",
        "--rubric",
        "r.yaml",
        "--data",
        "data.jsonl",
        "--model",
        "openai/gpt-4o-mini",
        "--dry-run",
    ]
    ended = CliRunner().invoke(group, words, standalone_mode=False, catch_exceptions=False)
    assert "data.jsonl:101 " in ended.output
    assert "data.jsonl:102 " in ended.output
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    report = assay.evaluate(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, prompt_format="json", sizes={"val": 8}
    )
    repeated = report.to_dict()["data"]["repeated"]
    assert (repeated["count"], repeated["contradictions"]) == (2, 1)
    assert any("data.jsonl:102 " in note for note in report.notes)


@pytest.mark.parametrize(
    ("check", "others", "contradictions"),
    [
        ("exact", ["OTHER", "Other ", "other"], 0),
        ("fields_match", ["OTHER", "else"], 1),
        ("exact, with: {case: true}", ["OTHER", "other"], 1),
        ("contains, with: {text: other}", ["OTHER", "other"], 1),  # it compares no expected value
        ("exact", [3, "3.0"], 2),
    ],
)
def test_rows_contradict_each_other_only_where_the_check_tells_them_apart(
    place: Path, check: str, others: list[Any], contradictions: int
) -> None:
    (place / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: right, check: {check}}}\n")
    rows = [{"question": f"What is {at}?", "answer": "other"} for at in range(30)]
    rows += [{"question": "What is 5?", "answer": other} for other in others]
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    report = assay.evaluate("mine.py:Mine", rubric="r.yaml", data=rows, lm=lm, prompt_format="json", sizes={"val": 2})
    assert report.to_dict()["data"]["repeated"]["contradictions"] == contradictions


def test_improve_estimate_includes_training_calls(place: Path) -> None:
    words = [
        "improve",
        "mine.py:Mine",
        "--rubric",
        "r.yaml",
        "--data",
        "data.jsonl",
        "--model",
        "openai/gpt-4o-mini",
        "--dry-run",
        "--json",
    ]
    words += ["--grpo", "model=embedded/smollm2-135m"]

    def calls(*flags: str) -> int:
        ended = CliRunner().invoke(
            group, [*words, "--name", "up", *flags], standalone_mode=False, catch_exceptions=False
        )
        return int(json.loads(ended.stdout.strip().splitlines()[-1])["calls"])

    held_out = min(
        16,
        plan_of(Compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", model="openai/gpt-4o-mini")).sizes["val"],
    )
    compiled = plan_of(Compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", model="openai/gpt-4o-mini")).calls
    assert calls("--order", "prompts") == compiled  # one search, one gate, one test
    few, more = calls("--order", "grpo", "--grpo", "steps=2"), calls("--order", "grpo", "--grpo", "steps=7")
    assert more - few == 5 * 4 * 6
    assert calls("--order", "grpo,grpo", "--grpo", "steps=2") - few > 2 * 4 * 6 + 2 * 2 * held_out  # and a gate
    assert calls("--order", "grpo", "--grpo", "steps=7", "--max-calls", "100") == 100


def test_improve_plan_divides_caps_among_steps(place: Path) -> None:
    options: dict[str, Any] = {
        "rubric": "r.yaml",
        "data": "data.jsonl",
        "model": "openai/gpt-4o-mini",
        "sizes": {"gate": 10, "test": 10},
    }
    grpo = {
        "model": "embedded/smollm2-135m",
        "steps": 1,
        "prompts_per_step": 2,
        "num_generations": 10,
        "evaluate_every": 0,
    }
    estimate = plan_of(
        Improve("mine.py:Mine", name="up", **options, order=["prompts", "grpo"], grpo=grpo, max_calls=200)
    )
    assert estimate.to_dict()["steps"] == [
        {"step": "prompts", "calls": 300, "share": 120},
        {"step": "grpo", "calls": 20, "share": 20},
    ]  # 200 less 60
    assert (
        "steps: 1 prompts, 120 of about 300 calls; 2 grpo, about 20 calls. Up to 20 calls for the gate of each, "
        "20 for the sealed test"
    ) in estimate.lines()
    estimate = plan_of(
        Improve(
            "mine.py:Mine", name="up", **options, order=["prompts", "grpo"], grpo={**grpo, "steps": 10}, max_calls=200
        )
    )
    assert estimate.to_dict()["steps"][1] == {"step": "grpo", "calls": 200, "share": None}
    assert any(line.startswith("warning: 1 of the 2 steps fit the caps: step 2, grpo") for line in estimate.lines())
