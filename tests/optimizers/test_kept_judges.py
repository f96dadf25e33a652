"""A compile of a judge whose gate proves nothing keeps the judge as it was, and the sealed items stay sealed."""

import json
from pathlib import Path
from typing import Any

import pytest
from leaning_judge import SCALE, compiled, leaning, truth_of, write_rows

import assay
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError
from assay.testing import scripted_lm
from rigs.command_line import assay_command
from rigs.progress import Lines

SIZES = {"train": 36, "val": 30, "gate": 12, "test": 30}  # too few gate items for a proof


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("kept")
    return folder, compiled(folder, optimizer="calibrate", sizes=SIZES, out=folder / "mood")


@pytest.mark.slow
def test_after_a_refused_gate_the_judge_and_the_artifact_are_the_baseline(kept: tuple[Path, Any]) -> None:
    report = kept[1]
    data = report.to_dict()
    assert (data["winner"] != "as it is", data["replaces"]) == (True, False)
    assert data["gate"]["n"] == 12
    assert report.judge is report.outcome.baseline
    assert report.judge.calibration is None
    assert assay.load_judge(report.artifact).calibration is None
    manifest = json.loads((report.artifact / "manifest.json").read_text())
    assert "unproven" not in manifest


@pytest.mark.slow
def test_the_unproven_judge_is_beside_it_and_has_no_card(kept: tuple[Path, Any]) -> None:
    folder, report = kept
    unproven = Path(report.to_dict()["unproven"])
    assert (unproven.parent, unproven.name) == (folder, "mood-unproven")
    assert assay.load_judge(unproven).calibration is not None
    manifest = json.loads((unproven / "manifest.json").read_text())
    assert (manifest["unproven"], manifest["result"]["card"]) == (True, {})
    assert not (unproven / "card.json").exists()
    assert not (unproven / "anchors.json").exists()
    with pytest.raises(ConfigError, match="no card"):
        assay.load_verifier(unproven)


@pytest.mark.slow
def test_the_sealed_items_are_not_judged_and_the_card_is_of_gate(kept: tuple[Path, Any]) -> None:
    folder, report = kept
    data = report.to_dict()
    assert data["test"] == {"baseline": None, "compiled": None, "gain": None, "accuracy_gain": None}
    assert data["test_openings"] is None
    assert (data["card"]["split"], data["card"]["agreement"]["n"]) == ("gate", 12)
    assert data["ceiling"] == data["card"]["ceiling"]
    assert data["coverage"] == 1.0
    assert json.loads((report.artifact / "card.json").read_text()) == json.loads(json.dumps(data["card"]))
    with assay.Store(folder / ".assay" / "a.db") as store:
        assert list(store.rollouts(split="test")) == []
    page = (report.artifact / "report.md").read_text()
    assert "not opened" in page
    assert "weighted kappa" in page


@pytest.mark.slow
def test_a_finished_compile_gives_the_same_judge_again(kept: tuple[Path, Any]) -> None:
    folder, report = kept
    again = compiled(folder, optimizer="calibrate", sizes=SIZES, out=folder / "mood", resume=True)
    assert again.to_dict() == json.loads(json.dumps(report.to_dict()))
    assert again.judge.calibration is None
    assert again.outcome.compiled.calibration is not None


@pytest.mark.slow
def test_a_judge_that_is_best_as_it_is_leaves_the_test_sealed(tmp_path: Path) -> None:
    def right(request: Any) -> dict[str, float]:
        return {label: 0.9 if label == truth_of(request) else 0.05 for label in SCALE}

    report = compiled(tmp_path, right, optimizer="calibrate", sizes={**SIZES, "gate": 30})
    data = report.to_dict()
    assert (data["winner"], data["gate"], data["unproven"]) == ("as it is", None, None)
    assert (data["test"]["compiled"], data["test_openings"]) == (None, None)
    assert data["card"]["agreement"]["accuracy"] > 0.8
    assay.load_verifier(report.artifact)  # its card shows the agreement


@pytest.mark.slow
def test_commands_say_that_a_judge_is_unproven_and_why_the_test_is_sealed(
    kept: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = kept
    shown = "\n".join(map(str, report.lines()))
    assert "not opened" in shown
    assert "mood-unproven" in shown.replace("\n", "")
    write_rows(folder / "rows.jsonl", [{"output": "awful thing"}])
    lm = scripted_lm(leaning, logprobs=True)
    named: dict[str, Any] = {"data": str(folder / "rows.jsonl"), "lm": lm, "store": folder / "b.db"}
    for name in ("mood-unproven", "mood"):
        progress = Lines()
        score_rows(str(folder / name), progress=progress, **named)
        assert ("unproven" in progress.text) == (name == "mood-unproven")
    monkeypatch.chdir(folder)
    assert "no card" in assay_command("judge", "card", "mood-unproven").stderr
