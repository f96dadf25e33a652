"""Compiling a judge on human labels: a biased model, disagreeing labels, undefined measures, caps, artifacts."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from click.testing import CliRunner
from leaning_judge import SCALE, WORDS, compiled, labels_file, leaning

import assay
from assay.cli.main import group
from assay.commands.judge_drift import replay_anchors
from assay.commands.judge_score import score_rows
from assay.errors import ArtifactError, ConfigError
from assay.testing import scripted_lm


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A judge compiled once for the tests that only read it, and the folder of its labels and store."""
    folder = tmp_path_factory.mktemp("calibrated")
    return folder, compiled(folder)


@pytest.mark.slow
def test_calibration_corrects_a_biased_judge(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    report = calibrated[1]
    data = report.to_dict()
    assert data["objective"] == "weighted_kappa"
    assert data["test"]["baseline"]["accuracy"] < 0.5
    assert data["test"]["compiled"]["accuracy"] > 0.95
    assert data["test"]["gain"]["low"] > 0
    assert data["replaces"]
    assert 0.4 < data["ceiling"]["weighted_kappa"] <= 1
    assert data["card"]["test_retest"] == 1.0
    assert data["card"]["confusion"]["labels"] == SCALE.split(",")
    assert data["card"]["coverage"] == 1.0
    assert json.loads((report.artifact / "card.json").read_text())["objective"] == "weighted_kappa"
    page = (report.artifact / "report.md").read_text()
    assert "{" not in page
    assert "gain in weighted kappa: " in page.lower()
    output = CliRunner().invoke(group, ["judge", "card", str(report.artifact)])
    assert (output.exit_code, "of what raters reach" in output.output, "weighted kappa" in output.output) == (
        0,
        True,
        True,
    )
    with pytest.raises(ArtifactError, match="has no card"):
        CliRunner().invoke(group, ["judge", "card", str(tmp_path)], catch_exceptions=False, standalone_mode=False)


@pytest.mark.slow
def test_artifact_contains_the_measured_judge(calibrated: tuple[Path, Any]) -> None:
    report = calibrated[1]
    loaded = assay.load_judge(report.artifact)
    with dspy.context(lm=scripted_lm(leaning, logprobs=True)):
        assert [loaded(output=f"{word} thing").verdict for word in WORDS.values()] == SCALE.split(",")
        assert loaded(output="awful thing").probabilities == pytest.approx(
            report.judge(output="awful thing").probabilities
        )


@pytest.mark.slow
def test_recompiling_a_judge_requires_its_salt(calibrated: tuple[Path, Any]) -> None:
    folder, first = calibrated
    with pytest.raises(ConfigError, match="was compiled with the salt 'assay'"):
        assay.compile_judge(
            str(first.artifact), labels=str(folder / "labels.jsonl"), lm=scripted_lm(leaning, logprobs=True),
            salt="other",
            store=folder / ".assay" / "a.db",
        )  # fmt: skip


@pytest.mark.slow
def test_openings_of_the_label_test_split_are_counted(tmp_path: Path) -> None:
    first = compiled(tmp_path, optimizer="calibrate")
    assert first.to_dict()["test_openings"] == {"this_job": 1, "this_store": 1}
    assert "has been opened 1 time in this store" in (first.artifact / "report.md").read_text()
    repeated = compiled(tmp_path, optimizer="calibrate", demos=1)
    assert repeated.to_dict()["test_openings"] == {"this_job": 1, "this_store": 2}


@pytest.mark.slow
def test_a_rubric_uses_a_compiled_judge(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    report = calibrated[1]
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: mood, judge: {{use: {report.artifact}}}}}\n")
    lm = scripted_lm(leaning, logprobs=True)
    rubric = assay.load_rubric(tmp_path / "r.yaml", judge_model=lm)
    good, bad = (rubric.score({"question": "?"}, {"answer": f"{word} thing"}).value for word in ("lovely", "awful"))
    assert good > 0.7 > 0.4 > bad


def turned(request: Any) -> Any:
    """The same model after an update that inverted its answers."""
    odds = leaning(request)
    return dict(zip(odds, reversed(odds.values()), strict=True)) if isinstance(odds, dict) else odds


def test_anchors_are_replayed_if_another_model_judges(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    report = calibrated[1]
    rows, folder = tmp_path / "rows.jsonl", str(report.artifact)
    rows.write_text("".join(json.dumps({"output": f"plain row {at}"}) + "\n" for at in range(30)))
    same, other = scripted_lm(leaning, logprobs=True), scripted_lm(turned, logprobs=True)
    other.model = "scripted/next"
    scored = {"data": str(rows), "store": tmp_path / ".assay" / "b.db", "cache": False}
    evaluation = score_rows(folder, lm=same, **scored)
    assert (evaluation.alarms, evaluation.calls) == ([], 30)
    evaluation = score_rows(folder, lm=other, **scored)
    assert evaluation.calls == 60  # 30 anchors, 30 rows
    assert "CUSUM" in evaluation.alarms[0]
    assert " Changed: model" in evaluation.alarms[0]
    assert replay_anchors(folder, lm=same, store=tmp_path / ".assay" / "b.db").alarms == []
    assert replay_anchors(folder, lm=other, store=tmp_path / ".assay" / "b.db").alarms

    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: mood, judge: {{use: {folder}}}}}\n")
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"q{at}", "answer": "x"}) + "\n" for at in range(30))
    )
    evaluated = assay.evaluate(
        dspy.Predict("question -> answer"), rubric=tmp_path / "r.yaml", data=str(tmp_path / "tasks.jsonl"), lm=other,
        store=tmp_path / ".assay" / "b.db",
    )  # fmt: skip
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
def test_model_without_probabilities_is_compiled_from_written_verdicts(tmp_path: Path) -> None:
    def learns(request: Any) -> str:
        text = request.messages[-1].text or ""
        truth = next((label for label, word in WORDS.items() if word in text), "neutral")
        return json.dumps({"verdict": truth if len(request.messages) > 3 else "positive"})

    data = compiled(tmp_path, learns, logprobs=False).to_dict()
    assert "demos" in data["winner"]
    assert data["test"]["compiled"]["accuracy"] > 0.9
    assert data["card"]["calibration_error"] is None
    assert any("no probabilities" in note for note in data["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["bootstrap", "copro", "gepa", "simba"])
def test_optimizers_of_compile_are_available_for_judges_by_name(tmp_path: Path, optimizer: str) -> None:
    sizes = {"train": 18, "val": 20, "gate": 20, "test": 20}
    labels = labels_file(tmp_path / "labels.jsonl", noise=0.0)
    data = compiled(tmp_path, labels=labels, optimizer=optimizer, sizes=sizes).to_dict()
    assert data["test"]["compiled"]["n"] == 20
    assert data["test"]["compiled"]["weighted_kappa"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("end", "adopted"), [("", True), (" Then look at the", False), (" ```", False)])
def test_broken_judge_instructions_are_never_adopted(tmp_path: Path, end: str, adopted: bool) -> None:
    def proposing(request: Any) -> str:
        text = request.messages[-1].text or ""
        truth = next((label for label, word in WORDS.items() if word in text), "neutral")
        labels = {
            "verdict": truth if "with care" in str(request) else "positive",
            "reasoning": "r",
            "proposed_prefix_for_output_field": "Verdict:",
        }
        return json.dumps({**labels, "proposed_instruction": f"Judge the mood with care.{end}"})

    sizes = {"train": 18, "val": 20, "gate": 10, "test": 10}
    report = compiled(tmp_path, proposing, logprobs=False, optimizer="copro", sizes=sizes)
    assert any("with care" in p.signature.instructions for p in report.outcome.compiled.predictors()) is adopted


@pytest.mark.slow
def test_rater_reasons_reach_a_reflecting_optimizer(tmp_path: Path) -> None:
    requests: list[str] = []

    def listening(request: Any) -> Any:
        requests.append(" ".join(str(message.text) for message in request.messages))
        return leaning(request)

    compiled(tmp_path, listening, optimizer="gepa", sizes={"train": 18, "val": 20, "gate": 20, "test": 20})
    assert any("Their reasons:" in text and "it says awful" in text for text in requests)
