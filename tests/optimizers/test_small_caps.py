"""Named optimizers under small caps: partial results compete, and what is impossible is reported before the start."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.cli.main import group
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.optimizers.budget import minutes_text
from assay.optimizers.prompts.dspy_patches import repaired_dspy
from assay.optimizers.prompts.teleprompters import least_runs
from assay.testing import scripted_lm
from tests.runs.test_finished import PROGRAM, CapturedProgress


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What do you say to number {n}.", "answer": str(n + 2)}) for n in range(300)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


def seldom(request: Any) -> str:
    """Right on every seventh number, and on all if the prompt has a demonstration."""
    text = request.messages[-1].text or ""
    if "number " not in text:
        return json.dumps(
            dict.fromkeys(
                (request.config.response_format or {"schema": {"properties": {"a": 1}}})["schema"]["properties"],
                "Add two.",
            )
        )
    number = int(re.findall(r"number (\d+)", text)[-1])
    return json.dumps({"answer": str(number + 2 if number % 7 == 0 or len(request.messages) > 2 else number)})


def wavering() -> Any:
    """Right on two answers of five without a demonstration, on all with one."""
    turns = itertools.count()

    def script(request: Any) -> str:
        if next(turns) % 5 > 2 and len(request.messages) <= 2:
            text = request.messages[-1].text or ""
            return json.dumps({"answer": str(int((re.findall(r"number (\d+)", text) or ["0"])[-1]) + 2)})
        return seldom(request)

    return scripted_lm(script)


def compiled(**options: Any) -> dict[str, Any]:
    keywords = {
        "rubric": "r.yaml",
        "data": "data.jsonl",
        "lm": scripted_lm(seldom),
        "threads": 1,
        "prompt_format": "json",
        **options,
    }
    report: dict[str, Any] = assay.compile("mine.py:Mine", **keywords).to_dict()
    return report


def test_bootstrap_stopped_by_the_reserve_uses_its_collected_demonstrations(place: Path) -> None:
    data = compiled(optimizer="bootstrap", max_calls=120)
    assert data["winner"].startswith("bootstrap")
    assert data["gate"]["n"] >= 5
    assert data["test"]["compiled"]["n"] >= 5
    assert data["calls"] > 60  # the part that was kept is used


@pytest.mark.slow
def test_simba_stopped_by_a_cap_returns_its_best_candidate(place: Path) -> None:
    data = compiled(
        optimizer="simba", max_search_calls=60, lm=wavering(), optimizer_settings={"max_steps": 8, "bsize": 4}
    )
    assert data["winner"] == "simba, cut short"
    assert any("its best so far competes" in note for note in data["notes"])


def test_too_few_calls_for_a_proposal_are_reported_before_the_search(place: Path) -> None:
    progress = CapturedProgress()
    data = compiled(optimizer="gepa", max_calls=30, progress=progress)
    (note,) = [note for note in data["notes"] if "too few for one proposal of gepa" in note]
    needed = int(re.findall(r"it needs about (\d+)", note)[0])
    assert needed > 15
    assert f"- {note}\n" in (Path(data["artifact"]) / "report.md").read_text()
    assert "too few for one proposal" in progress.text
    assert not any("nothing beat" in note for note in data["notes"])
    more = compiled(optimizer="gepa", max_calls=2 * needed + 4, store=place / "other.db")
    assert not any("too few" in note for note in more["notes"])


def test_gepa_minimum_budget_covers_baseline_parent_child_and_val() -> None:
    assert least_runs("gepa", 10, {}) == 10 + 3 + 3 + 10
    assert least_runs("gepa", 10, {"reflection_minibatch_size": 5}) == 30
    assert least_runs("labeled", 10, {}) == 0


def test_a_reserved_part_is_kept_inside_a_phase() -> None:
    meter = Meter(Caps(search_calls=10), {"search": Usage(calls=6)})
    with meter.during("search"), meter.aside(Usage(calls=4)):
        assert meter.search_calls_left() == 6
        with pytest.raises(
            assay.errors.BudgetExceeded,
            match="6 of 10 search calls are spent; the rest is reserved for the comparison on val",
        ):
            meter.check()
    with meter.during("search"):
        meter.check()


def test_durations_are_formatted_for_reading() -> None:
    assert [minutes_text(m) for m in (0.0, 0.9, 1.2, 7.6)] == [
        "under a minute",
        "under a minute",
        "about 1 minute",
        "about 8 minutes",
    ]


def test_the_estimate_includes_the_reserve_for_gate_and_test(place: Path) -> None:
    progress = CapturedProgress()
    compiled(optimizer="labeled", max_calls=100, progress=progress)
    line = next(line for line in progress.text.splitlines() if line.startswith("estimate"))
    calls, search = (int(n) for n in re.findall(r"estimate: (\d+) calls \((\d+) of them", line)[0])
    assert calls <= 100
    assert search <= 50


def test_an_unknown_price_is_null_and_never_zero(place: Path) -> None:
    from click.testing import CliRunner

    data = compiled(optimizer="labeled", max_calls=100, lm=unpriced())
    assert data["cost_usd"] is None
    assert data["test"]["baseline"]["cost_usd"] is None
    assert "$0.0000" not in (Path(data["artifact"]) / "report.md").read_text()
    stats = json.loads(
        CliRunner().invoke(group, ["traces", "stats", "--json", "--store", str(place / ".assay/assay.db")]).output
    )
    assert stats["cost_usd"] is None


def unpriced() -> Any:
    lm = scripted_lm(seldom)
    complete = lm.recording.backend.complete
    lm.recording.backend.complete = lambda request: (complete(request)[0], None)
    return lm


def test_repairs_of_dspy_are_reverted() -> None:
    from dspy_internals import optimizer_internals

    simba = optimizer_internals().simba

    before = simba.wrap_program
    with repaired_dspy():
        assert simba.wrap_program is not before
    assert simba.wrap_program is before


@pytest.mark.slow
def test_parameter_impact_reports_a_too_small_val_split_first(place: Path) -> None:
    progress = CapturedProgress()
    rows = [{"question": f"What do you say to number {n}.", "answer": str(n + 2), "split": "val"} for n in range(3)]
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "rubric": "r.yaml",
        "data": "data.jsonl",
        "lm": scripted_lm(seldom),
        "threads": 1,
        "prompt_format": "json",
        "levels": 2,
    }
    report = assay.parameter_impact("mine.py:Mine", progress=progress, **options)
    assert "val has 3 tasks" in progress.text
    assert any("val has 3 tasks" in note for note in report.notes)
