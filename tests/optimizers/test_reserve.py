"""Caps reserve a part for gate and test; both end once decided; too small splits are reported before the start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.compile import Compile
from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation import SilentProgress
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.optimizers.budget import ReportPlan
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


def scripted_answer(request: Any) -> str:
    """Adds 2 where demonstrations show that this is wanted; else it says the number itself."""
    prompt = request.messages[-1].text or ""
    if "number " not in prompt:  # a teleprompter asks for instructions
        return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "Add two."))
    number = int(prompt.split("number ")[1].split(".")[0])
    return json.dumps({"answer": str(number + 2) if len(request.messages) > 4 else str(number)})


def write(place: Path, rows: int, **more: Any) -> None:
    (place / "mine.py").write_text(PROGRAM)
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    lines = [
        json.dumps({"question": f"What do you say to number {n}.", "answer": str(n + 2), **more}) for n in range(rows)
    ]
    (place / "data.jsonl").write_text("\n".join(lines))


class CapturedProgress(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def compiled(**options: Any) -> Any:
    options = {
        "optimizer": "labeled",
        "lm": scripted_lm(scripted_answer),
        "prompt_format": "json",
        "threads": 1,
        **options,
    }
    return assay.compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", **options)


@pytest.mark.slow
def test_a_cap_on_calls_reserves_gate_and_test(tmp_path: Path) -> None:
    write(tmp_path, 400)
    data = compiled(optimizer="auto", max_calls=150, early_stop=False).to_dict()
    assert data["calls"] <= 150
    assert data["gate"]["n"] >= 15  # half of 150 calls, 2 a pair, for two splits: 18
    assert data["test"]["gain"]["n"] >= 15
    assert data["stopped"] is None
    assert data["replaces"]


def test_the_estimate_assigns_calls_above_the_search_cap_to_gate_and_test(tmp_path: Path) -> None:
    write(tmp_path, 400)
    progress = CapturedProgress()
    data = compiled(optimizer="auto", max_calls=150, max_search_calls=30, early_stop=False, progress=progress).to_dict()
    text = "\n".join(progress.lines)
    estimate, gate = (
        int(match[1])
        for match in (re.search(r"estimate: (\d+) calls", text), re.search(r"gate: up to (\d+) tasks", text))
        if match
    )
    assert data["stopped"] is None
    assert 0.9 * data["calls"] <= estimate <= 150
    assert data["gate"]["n"] - 2 <= gate
    assert data["search_calls"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ends"), [("bootstrap", False), ("bootstrap-search", True)])
def test_an_optimizer_with_its_own_loop_stops_before_the_reserve(tmp_path: Path, optimizer: str, ends: bool) -> None:
    write(tmp_path, 400)
    data = compiled(optimizer=optimizer, max_calls=200).to_dict()
    assert data["search_calls"] <= 100  # half of the cap is reserved
    assert (data["winner"], data["stopped"] is None) == ((optimizer, True) if ends else ("baseline", False))
    if ends:
        assert data["gate"]["n"] >= 10
        assert data["test"]["compiled"]["n"] >= 10


@pytest.mark.slow
def test_a_cap_on_tokens_reserves_gate_and_test(tmp_path: Path) -> None:
    write(tmp_path, 400)
    data = compiled(optimizer="auto", max_tokens=3000).to_dict()  # 15 a call
    assert data["tokens"] <= 3000 + 15
    assert data["test"]["gain"]["n"] >= 10


def test_reserve_matches_hand_calculation() -> None:
    meter = Meter(Caps(calls=10))
    meter.hold(gate=Usage(calls=2), test=Usage(calls=3))

    def take(phase: str) -> int:
        count = 0
        with meter.during(phase):
            try:
                while True:
                    sent = meter.reserve()
                    meter.settle(sent, prompt_tokens=1, completion_tokens=1, cost_usd=0.0, failed=False)
                    count += 1
            except BudgetExceeded:
                return count

    assert [take(phase) for phase in ("search", "gate", "test")] == [5, 2, 3]


@pytest.mark.slow
def test_gate_and_test_end_at_their_decision(tmp_path: Path) -> None:
    write(tmp_path, 500)
    early, full = compiled(), compiled(early_stop=False)
    first, second = early.to_dict(), full.to_dict()
    assert first["replaces"]
    assert second["replaces"]
    assert first["gate"]["n"] < 50 < second["gate"]["n"]
    assert first["test"]["gain"]["n"] < 50 < second["test"]["gain"]["n"]
    assert first["calls"] < second["calls"] / 1.4
    assert any(note.startswith("gate ended after") for note in first["notes"])
    assert first["test"]["gain"]["low"] <= second["test"]["gain"]["mean"] <= first["test"]["gain"]["high"]


@pytest.mark.slow
def test_a_set_split_size_is_used_and_the_difference_determines_the_others(tmp_path: Path) -> None:
    write(tmp_path, 1500)
    wide = compiled(difference=0.4, early_stop=False).to_dict()
    fixed = compiled(difference=0.4, early_stop=False, sizes={"gate": 60}).to_dict()
    assert wide["gate"]["n"] == 20  # ((1.96 + 0.84) * 0.5 / 0.4)^2 = 12.3 is below the least of 20
    assert (fixed["gate"]["n"], fixed["test"]["gain"]["n"]) == (60, 20)
    with pytest.raises(ConfigError, match="difference: must be greater than 0, not 0"):
        compiled(difference=0)


def test_splits_too_small_for_a_decision_are_reported_before_the_first_call(tmp_path: Path) -> None:
    write(tmp_path, 40)
    progress, lm = CapturedProgress(), scripted_lm(scripted_answer)
    messages_before: list[str] = []

    def script(request: Any) -> str:
        if not messages_before:
            messages_before.extend(progress.lines)
        return scripted_answer(request)

    lm = scripted_lm(script)
    data = compiled(lm=lm, progress=progress, sizes={"gate": 1, "test": 1, "val": 1}).to_dict()
    assert any(
        "too few tasks for a decision: val has 1 task, gate has 1 task, test has 1 task" in line
        for line in messages_before
    )
    assert any("too few tasks for a decision" in note for note in data["notes"])


@pytest.mark.slow
def test_a_cap_too_small_for_a_decision_is_reported_and_the_job_resumes(tmp_path: Path) -> None:
    write(tmp_path, 400)
    progress = CapturedProgress()
    data = compiled(optimizer="auto", max_calls=12, progress=progress, store=tmp_path / "a.db").to_dict()
    assert data["calls"] <= 12
    assert "leave" in data["stopped"]
    assert any("the caps leave" in line for line in progress.lines)
    resumed = compiled(optimizer="auto", max_calls=400, resume=True, store=tmp_path / "a.db").to_dict()
    assert resumed["stopped"] is None
    assert resumed["replaces"]


@pytest.mark.slow
def test_tune_reports_splits_that_are_too_small(tmp_path: Path) -> None:
    write(tmp_path, 40)
    progress, messages_before = CapturedProgress(), list[str]()

    def script(request: Any) -> str:
        if not messages_before:
            messages_before.extend(progress.lines)
        return scripted_answer(request)

    data = assay.tune(
        "mine.py:Mine",
        rubric="r.yaml",
        data="data.jsonl",
        trials=1,
        lm=scripted_lm(script),
        prompt_format="json",
        progress=progress,
        sizes={"gate": 2},
    ).to_dict()
    assert any("too few tasks for a decision: gate has 2 tasks" in line for line in messages_before)
    assert any("too few tasks for a decision" in note for note in data["notes"])


def test_a_dry_run_reports_the_detectable_gain_of_the_gate(tmp_path: Path) -> None:
    write(tmp_path, 400)
    planned = plan_of(Compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=scripted_lm(scripted_answer)))
    assert any("show a gain of" in line for line in planned.lines())


def test_a_gate_that_hardly_shows_any_gain_is_a_warning() -> None:
    lines = {gate: ReportPlan(gate=gate, test=30, pair=Usage()).detectable_gain for gate in (5, 6, 7, 8)}
    assert {gate: line.startswith("warning: ") for gate, line in lines.items()} == {5: True, 6: True, 7: True, 8: False}
    assert "Add tasks" in lines[7]
    assert "caps" in ReportPlan(gate=7, test=30, pair=Usage(), capped=True).detectable_gain


def test_a_size_that_the_data_does_not_fill_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path, 400)
    options: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "lm": scripted_lm(scripted_answer)}
    lines = list(plan_of(Compile("mine.py:Mine", **options, sizes={"val": 8}, gate_size=300)).lines())
    assert [line for line in lines if "its size" in line] == [
        "warning: gate has 83 tasks, fewer than its size of 300: the data has no more for it"
    ]


@pytest.mark.slow
def test_tune_refuses_caps_below_two_trials(tmp_path: Path) -> None:
    write(tmp_path, 400)
    lm = scripted_lm(scripted_answer)
    with pytest.raises(
        ConfigError, match=r"two trials of \d+ val tasks take about \d+\. Raise max_calls to (\d+)"
    ) as refused:
        assay.tune("mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, trials=3, max_calls=60, threads=1)
    assert lm.scripted.calls <= 2  # the preflight's
    enough = int(str(refused.value).split("Raise max_calls to ")[1].split()[0])
    report = assay.tune(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, trials=3, max_calls=enough, threads=1
    )
    assert report.trials >= 2
