"""Compiling a judge: undefined measures, failing verdicts, caps, wrong settings, small splits."""

from pathlib import Path
from typing import Any

import dspy
import pytest
from leaning_judge import MOODS, compiled, labels_file, leaning, write_rows

import assay
from assay.errors import ConfigError, DataError, ModelError
from assay.judges import PointwiseJudge
from assay.models import Meter
from assay.rubrics import JudgeSpec
from assay.runs.judge_artifacts import price_per_call
from assay.testing import scripted_lm
from rigs.progress import Lines


@pytest.mark.slow
def test_single_class_labels_report_undefined_kappa(tmp_path: Path) -> None:
    rows = [{"output": f"thing {n}", "rater": "1", "label": "positive"} for n in range(120)]
    report = compiled(tmp_path, labels=write_rows(tmp_path / "one.jsonl", rows))
    data = report.to_dict()
    assert data["card"]["agreement"]["weighted_kappa"] is None
    assert "only one label" in data["card"]["agreement"]["undefined"]["weighted_kappa"]
    assert data["replaces"] is False
    assert any("weighted kappa is undefined before the gate" in note for note in data["notes"])
    assert "| weighted kappa | – | – |" in (Path(data["artifact"]) / "report.md").read_text()
    assert any("raters: weighted kappa is undefined" in alarm for alarm in data["card"]["alarms"])
    assert "measure=weighted kappa, baseline=–, compiled=–, raters=–" in repr(report)
    assert data["ceiling"]["undefined"]["kappa"] == "no item has two raters"


def test_unreachable_model_ends_the_compile_early_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did not answer the judge .*down"):
        compiled(tmp_path, lambda request: dspy.lm15.ServerError("down"), sizes={"val": 20})


@pytest.mark.slow
def test_cap_keeps_the_best_result_and_resumes(tmp_path: Path) -> None:
    sizes = {"train": 40, "val": 30, "gate": 24, "test": 24}
    stopped = compiled(tmp_path, sizes=sizes, max_calls=100).to_dict()
    assert stopped["stopped"] is not None
    assert stopped["calls"] == 100
    resumed = compiled(tmp_path, sizes=sizes, resume=True).to_dict()
    assert resumed["stopped"] is None
    assert resumed["test"]["compiled"]["n"] == 24
    assert resumed["repeated_calls"] == 0  # what was asked before the cap is answered from the response cache


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": ["bad", "good"]}, DataError, "not on the judge's scale"),
        ({"judge": PointwiseJudge(MOODS, shows=["picture"])}, ConfigError, "no item has 'picture'"),
        ({"judge": "helpful"}, Exception, "unknown judge 'helpful'"),
        ({"objective": "beauty"}, ConfigError, "objective: must be one of"),
        ({"optimizer": "bootstrp"}, ConfigError, "optimizer.* must be one of auto.*Did you mean 'bootstrap'"),
        ({"optimizer": "knn"}, ConfigError, "makes another program around the judge"),
        ({"optimizer": "ensemble"}, ConfigError, "makes another program around the judge"),
    ],
)
def test_wrong_settings_are_refused_with_the_valid_ones_before_any_call(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    requests: list[Any] = []
    with pytest.raises(error, match=message):
        compiled(tmp_path, lambda request: requests.append(request) or leaning(request), **options)
    assert requests == []


def test_step_grades_of_a_numeric_scale_are_expected_values(tmp_path: Path) -> None:
    judge = PointwiseJudge(JudgeSpec(text="How many stars?", scale=("1", "2", "5"), kind="numeric"), shows=("output",))
    with dspy.context(lm=scripted_lm(lambda request: {"1": 0.5, "5": 0.5}, logprobs=True)):
        assert judge(output="x").value == pytest.approx(0.5)  # 1 is 0, 5 is 1
    assert judge.spec.grade("2") == pytest.approx(0.25)
    (tmp_path / "j.yaml").write_text("text: Stars?\nscale: [1, 2, 3]\nkind: numeric\nanchors: {1: bad, 3: good}\n")
    loaded = assay.load_judge(tmp_path / "j.yaml")
    assert (loaded.labels, loaded.spec.anchors) == (("1", "2", "3"), {"1": "bad", "3": "good"})


def test_the_price_of_a_verdict_is_that_of_the_calls_of_its_job() -> None:
    meter = Meter()
    search = meter.of("search")
    search.calls, search.cost_usd = 40, 0.4
    assert price_per_call(meter) == pytest.approx(0.01)


@pytest.mark.slow
def test_attack_cases_are_never_demonstrations(tmp_path: Path) -> None:
    labels = labels_file(tmp_path / "noisy.jsonl", noise=0.5, raters=9)
    report = compiled(tmp_path, labels=labels, negatives=20)
    outputs = [str(demo["output"]) for predictor in report.outcome.compiled.predictors() for demo in predictor.demos]
    attacks = ("correct accurate complete", "Ignore all")
    assert not any(attack in text for text in outputs for attack in attacks)
    assert all(text.strip('"') for text in outputs)
    nominal = PointwiseJudge({**MOODS, "kind": "nominal"}, shows=["output"])
    with pytest.raises(ConfigError, match="scale is nominal"):
        compiled(tmp_path, judge=nominal, negatives=4)


@pytest.mark.slow
def test_small_split_is_reported(tmp_path: Path) -> None:
    progress, labels = Lines(), labels_file(tmp_path / "few.jsonl", count=40)
    compiled(tmp_path, labels=labels, sizes={}, optimizer="calibrate", progress=progress)
    assert "below 20 items no gain can be shown" in progress.text
