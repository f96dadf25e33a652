"""Compiling a judge on human labels: a biased model, optimizers, artifacts, refused gates."""

import json
import shutil
from pathlib import Path
from typing import Any

import dspy
import pytest
from leaning_judge import FEW, SCALE, WORDS, compiled, labels_file, leaning, truth_of, write_rows

import assay
from assay.commands.judge import forget_rater
from assay.commands.judge_audit import replay_anchors
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError
from assay.testing import scripted_lm
from rigs.command_line import assay_command
from rigs.progress import Lines


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A judge compiled once for the tests that only read it, and the folder of its labels and store."""
    folder = tmp_path_factory.mktemp("calibrated")
    return folder, compiled(folder)


@pytest.fixture
def copied(calibrated: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Any]:
    """A copy of that folder, for tests that write to the store."""
    return shutil.copytree(calibrated[0], tmp_path / "copied"), calibrated[1]


@pytest.mark.slow
def test_calibration_corrects_a_biased_judge(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    report = calibrated[1]
    data = report.to_dict()
    assert data["objective"] == "weighted_kappa"
    assert data["test"]["baseline"]["accuracy"] < 0.5
    assert data["test"]["compiled"]["accuracy"] > 0.95
    assert data["test"]["gain"]["low"] > 0
    assert data["replaces"]
    assert data["test_openings"] == {"this_job": 1, "this_store": 1}
    assert 0.4 < data["ceiling"]["weighted_kappa"] <= 1
    assert data["card"]["test_retest"] == 1.0
    assert data["card"]["confusion"]["labels"] == SCALE
    assert data["card"]["coverage"] == 1.0
    assert report.outcome.judged.calls == 30  # a call each, whether it was asked or known
    assert json.loads((report.artifact / "card.json").read_text())["objective"] == "weighted_kappa"
    page = (report.artifact / "report.md").read_text()
    assert "{" not in page
    assert "gain in weighted kappa: " in page.lower()
    assert "has been opened 1 time in this store" in page
    shown = assay_command("judge", "card", str(report.artifact))
    assert (shown.code, "of what raters reach" in shown.stdout, "weighted kappa" in shown.stdout) == (0, True, True)
    assert "has no card" in assay_command("judge", "card", str(tmp_path)).stderr


@pytest.mark.slow
def test_artifact_contains_the_measured_judge(calibrated: tuple[Path, Any]) -> None:
    report = calibrated[1]
    loaded = assay.load_judge(report.artifact)
    with dspy.context(lm=scripted_lm(leaning, logprobs=True)):
        assert [loaded(output=f"{word} thing").verdict for word in WORDS.values()] == SCALE
        measured = report.judge(output="awful thing").probabilities
        assert loaded(output="awful thing").probabilities == pytest.approx(measured)


@pytest.mark.slow
def test_openings_of_the_label_test_split_are_counted(copied: tuple[Path, Any]) -> None:
    again = compiled(copied[0], optimizer="calibrate")
    assert again.to_dict()["test_openings"] == {"this_job": 1, "this_store": 2}


def turned(request: Any) -> Any:
    """The same model after an update that inverted its answers."""
    odds = leaning(request)
    return dict(zip(odds, reversed(odds.values()), strict=True)) if isinstance(odds, dict) else odds


def test_anchors_are_replayed_if_another_model_judges(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    folder = str(calibrated[1].artifact)
    rows = write_rows(tmp_path / "rows.jsonl", [{"output": f"plain row {at}"} for at in range(30)])
    same, other = scripted_lm(leaning, logprobs=True), scripted_lm(turned, logprobs=True)
    other.model = "scripted/next"
    scored = {"data": rows, "store": "b.db", "cache": False}
    evaluation = score_rows(folder, lm=same, **scored)
    assert (evaluation.alarms, evaluation.calls) == ([], 30)
    evaluation = score_rows(folder, lm=other, **scored)
    assert evaluation.calls == 60  # 30 anchors, 30 rows
    assert "CUSUM" in evaluation.alarms[0]
    assert " Changed: model" in evaluation.alarms[0]
    assert replay_anchors(folder, lm=same, store="b.db").alarms == []
    assert replay_anchors(folder, lm=other, store="b.db").alarms
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: mood, judge: {{use: {folder}}}}}\n")
    tasks = write_rows(tmp_path / "tasks.jsonl", [{"question": f"q{at}", "answer": "x"} for at in range(30)])
    program = dspy.Predict("question -> answer")
    evaluated = assay.evaluate(program, rubric="r.yaml", data=tasks, lm=other, store="b.db")
    assert evaluated.to_dict()["alarms"] == evaluation.alarms


def test_sealed_items_are_judged_only_at_the_end(calibrated: tuple[Path, Any]) -> None:
    folder, report = calibrated
    with assay.Store(folder / ".assay" / "a.db") as store:
        sealed = list(store.rollouts(split="test"))
        assert {rollout.phase for rollout in sealed} == {"test"}
        assert len({rollout.task_id for rollout in sealed}) == report.sizes["test"]
        tested = {rollout.task_id for rollout in sealed}
        assert not tested & {rollout.task_id for rollout in store.rollouts() if rollout.split != "test"}


@pytest.mark.slow
def test_children_inherit_demonstrations_and_salt_of_their_parents(copied: tuple[Path, Any]) -> None:
    folder, parent = copied
    store = folder / ".assay" / "a.db"
    (folder / "jury.yaml").write_text(f"jury: {{members: [{parent.artifact}, {parent.artifact}]}}\n")
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    others = write_rows(folder / "others.jsonl", [{**row, "rater": "x" + row["rater"]} for row in rows])
    for at, judge in enumerate((str(parent.artifact), str(folder / "jury.yaml"))):
        more = {"labels": others, "optimizer": "calibrate"}
        child = compiled(folder, judge=judge, out=folder / f"child{at}", **more)
        result = forget_rater("r0", store=store).to_dict()["judges"]
        assert str(child.artifact) in result
        assert str(parent.artifact) in result
        with pytest.raises(ConfigError, match="was compiled with the salt 'assay'"):
            compiled(folder, judge=judge, salt="other", **more)


# -- optimizers


@pytest.mark.slow
def test_model_without_probabilities_is_compiled_from_written_verdicts(tmp_path: Path) -> None:
    def learns(request: Any) -> str:
        return json.dumps({"verdict": truth_of(request) if len(request.messages) > 3 else "positive"})

    data = compiled(tmp_path, learns, logprobs=False).to_dict()
    assert "demos" in data["winner"]
    assert data["test"]["compiled"]["accuracy"] > 0.9
    assert data["card"]["calibration_error"] is None
    assert any("no probabilities" in note for note in data["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["bootstrap", "gepa", "simba"])
def test_optimizers_of_compile_are_available_for_judges_by_name(tmp_path: Path, optimizer: str) -> None:
    texts: list[str] = []

    def listening(request: Any) -> Any:
        texts.append(" ".join(str(message.text) for message in request.messages))
        return leaning(request)

    labels = labels_file(tmp_path / "labels.jsonl", noise=0.0)
    data = compiled(tmp_path, listening, labels=labels, optimizer=optimizer, sizes=FEW).to_dict()
    assert data["test"]["compiled"]["n"] == 20
    assert data["test"]["compiled"]["weighted_kappa"] > 0.8
    reasons = any("Their reasons:" in text and "it says awful" in text for text in texts)
    assert reasons or optimizer != "gepa", "the raters' reasons reach an optimizer that reflects"


@pytest.mark.slow
@pytest.mark.parametrize(("end", "adopted"), [("", True), (" Then look at the", False)])
def test_broken_judge_instructions_are_never_adopted(tmp_path: Path, end: str, adopted: bool) -> None:
    def proposing(request: Any) -> str:
        verdict = truth_of(request) if "with care" in str(request) else "positive"
        proposed = {"proposed_instruction": f"Judge the mood with care.{end}"}
        return json.dumps({"verdict": verdict, "proposed_prefix_for_output_field": "Verdict:", **proposed})

    report = compiled(tmp_path, proposing, logprobs=False, optimizer="copro", sizes=FEW)
    assert any("with care" in p.signature.instructions for p in report.outcome.compiled.predictors()) is adopted


# -- a gate that proves nothing keeps the judge as it was


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
