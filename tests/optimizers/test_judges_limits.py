"""Compiling a judge: undefined measures, failing verdicts, caps, wrong settings, small splits."""

import json
import math
from pathlib import Path
from typing import Any

import dspy
import pytest
from leaning_judge import SCALE, compiled, labels_file, leaning

import assay
from assay.commands.judge import forget_rater
from assay.errors import ConfigError, DataError, ModelError
from assay.evaluation import SilentProgress
from assay.judges import PointwiseJudge
from assay.models import Meter
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.runs.judge_artifacts import price_per_call
from assay.testing import scripted_lm

MOOD = {"text": "What is the mood?", "scale": tuple(SCALE.split(","))}


@pytest.mark.slow
def test_single_class_labels_report_undefined_kappa(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(
        "".join(json.dumps({"output": f"thing {n}", "rater": "1", "label": "positive"}) + "\n" for n in range(120))
    )
    report = compiled(tmp_path, labels=str(path))
    data = report.to_dict()
    assert data["card"]["agreement"]["weighted_kappa"] is None
    assert "only one label" in data["card"]["agreement"]["undefined"]["weighted_kappa"]
    assert data["replaces"] is False
    assert any("weighted kappa is undefined before the gate" in note for note in data["notes"])
    assert "| weighted kappa | – | – |" in (Path(data["artifact"]) / "report.md").read_text()
    assert any("raters: weighted kappa is undefined" in alarm for alarm in data["card"]["alarms"])
    assert "measure=weighted kappa, baseline=–, compiled=–, raters=–" in repr(report)
    assert data["ceiling"]["undefined"]["kappa"] == "no item has two raters"


@pytest.mark.slow
def test_intermittently_failing_verdicts_are_counted_and_excluded(tmp_path: Path) -> None:
    count = [0]

    def stumbling(request: Any) -> Any:
        count[0] += 1
        return dspy.lm15.ServerError("busy") if count[0] % 3 == 0 else leaning(request)

    data = compiled(tmp_path, stumbling, sizes={"train": 36, "val": 24, "gate": 60, "test": 40}).to_dict()
    assert 0 < data["test"]["compiled"]["unscored"] < 25  # most that failed for the baseline are asked again
    assert data["test"]["compiled"]["n"] + data["test"]["compiled"]["unscored"] == 40


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
        ({"judge": PointwiseJudge(MOOD, shows=["picture"])}, ConfigError, "no item has 'picture'"),
        ({"judge": "helpful"}, Exception, "unknown judge 'helpful'"),
        ({"objective": "beauty"}, ConfigError, "objective: must be one of"),
        ({"optimizer": "bootstrp"}, ConfigError, "optimizer.* must be one of auto.*Did you mean 'bootstrap'"),
        ({"optimizer": "knn", "sizes": {"train": 9, "val": 9}}, ConfigError, "makes another program around the judge"),
    ],
)
def test_wrong_settings_are_refused_with_the_valid_ones(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compiled(tmp_path, **options)


def test_judge_module_of_the_user_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from assay.judges import PointwiseJudge\nmood = PointwiseJudge('Is it kind?', shows=('output',))\nnumber = 4\n"
    )
    assert assay.load_judge(f"{tmp_path}/mine.py:mood").labels == ("no", "yes")
    with pytest.raises(assay.AssayError, match="is a int"):
        assay.load_judge(f"{tmp_path}/mine.py:number")


def test_step_grades_of_a_numeric_scale_are_expected_values() -> None:
    judge = PointwiseJudge(JudgeSpec(text="How many stars?", scale=("1", "2", "5"), kind="numeric"), shows=("output",))
    with dspy.context(lm=scripted_lm(lambda request: {"1": 0.5, "5": 0.5}, logprobs=True)):
        assert judge(output="x").value == pytest.approx(0.5)  # 1 is 0, 5 is 1
    assert math.isclose(judge.spec.grade("2"), 0.25)
    rubric = Rubric("r", [Criterion(name="stars", judge=judge.spec)])
    assert rubric.needs_judge


@pytest.mark.slow
def test_price_of_a_verdict_is_reported_even_if_the_winner_was_cached(tmp_path: Path) -> None:
    report = compiled(tmp_path, optimizer="calibrate")
    meter = Meter()
    search = meter.of("search")
    search.calls, search.cost_usd = 40, 0.4
    assert price_per_call(meter) == pytest.approx(0.01)
    assert report.outcome.judged.calls == 30  # a call each, whether it was asked or known


@pytest.mark.slow
def test_children_inherit_demonstrations_of_parents(tmp_path: Path) -> None:
    first = compiled(tmp_path, optimizer="calibrate", out=tmp_path / "first")
    (tmp_path / "jury.yaml").write_text(f"jury: {{members: [{first.artifact}, {first.artifact}]}}\n")
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    (tmp_path / "others.jsonl").write_text(
        "".join(json.dumps({**row, "rater": "x" + row["rater"]}) + "\n" for row in rows)
    )
    for at, judge in enumerate((str(first.artifact), str(tmp_path / "jury.yaml"))):
        child = assay.compile_judge(
            judge, labels=str(tmp_path / "others.jsonl"), lm=scripted_lm(leaning, logprobs=True), optimizer="calibrate",
            sizes={"train": 36, "val": 30, "gate": 30, "test": 30}, store=tmp_path / ".assay" / "a.db",
            out=tmp_path / f"child{at}",
        )  # fmt: skip
        result = forget_rater("r0", store=tmp_path / ".assay" / "a.db").to_dict()["judges"]
        assert str(child.artifact) in result
        assert str(first.artifact) in result
        with pytest.raises(ConfigError, match="was compiled with the salt 'assay'"):
            assay.compile_judge(
                judge,
                labels=str(tmp_path / "others.jsonl"),
                lm=scripted_lm(leaning, logprobs=True),
                salt="other",
                store=tmp_path / ".assay" / "a.db",
            )


@pytest.mark.slow
def test_attack_cases_are_never_demonstrations(tmp_path: Path) -> None:
    labels = labels_file(tmp_path / "noisy.jsonl", noise=0.5, raters=9)
    report = compiled(tmp_path, labels=labels, negatives=20)
    output = [str(demo["output"]) for predictor in report.outcome.compiled.predictors() for demo in predictor.demos]
    assert not any(
        "correct accurate complete" in text or "Ignore all" in text or not text.strip('"') for text in output
    )
    nominal = PointwiseJudge({**MOOD, "kind": "nominal"}, shows=["output"])
    with pytest.raises(ConfigError, match="scale is nominal"):
        compiled(tmp_path, judge=nominal, negatives=4)


@pytest.mark.slow
def test_small_split_is_reported(tmp_path: Path) -> None:
    messages: list[str] = []

    class Lines(SilentProgress):
        def say(self, text: str) -> None:
            messages.append(text)

    compiled(
        tmp_path,
        labels=labels_file(tmp_path / "few.jsonl", count=40),
        sizes={},
        optimizer="calibrate",
        progress=Lines(),
    )
    assert any("below 20 items no gain can be shown" in line for line in messages)


@pytest.mark.parametrize("optimizer", ["knn", "ensemble"])
def test_invalid_judge_is_refused_before_any_call(tmp_path: Path, optimizer: str) -> None:
    requests: list[Any] = []
    with pytest.raises(ConfigError, match="makes another program around the judge"):
        compiled(tmp_path, lambda request: requests.append(request) or leaning(request), optimizer=optimizer)
    assert requests == []


def test_numeric_scale_words_may_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text(
        "text: How many stars?\nscale: [1, 2, 3]\nkind: numeric\nanchors: {1: bad, 3: good}\n"
    )
    judge = assay.load_judge(tmp_path / "j.yaml")
    assert (judge.labels, judge.spec.anchors) == (("1", "2", "3"), {"1": "bad", "3": "good"})
