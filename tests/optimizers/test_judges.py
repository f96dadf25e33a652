"""Compiling a judge against people: a model that leans, labels that disagree, undefined measures, caps, artifacts."""

import json
import math
import random
from pathlib import Path
from typing import Any

import dspy
import pytest
from click.testing import CliRunner

import assay
from assay.api.judge.drift import replay_anchors
from assay.api.judge.forget import forget_rater
from assay.api.judge.score import score_rows
from assay.cli.main import group
from assay.errors import ArtifactError, ConfigError, DataError, ModelError
from assay.evaluation import SilentProgress
from assay.judges import PointwiseJudge
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm

SCALE = "negative,neutral,positive"
WORDS = {"negative": "awful", "neutral": "plain", "positive": "lovely"}


def labels_file(path: Path, *, count: int = 300, raters: int = 3, noise: float = 0.1) -> str:
    """Items whose text says its class, rated by people who slip now and then."""
    rng, scale = random.Random(0), SCALE.split(",")
    with path.open("w") as file:
        for number in range(count):
            truth = scale[number % 3]
            for rater in range(raters):
                text = rng.choice(scale) if rng.random() < noise else truth
                row = {
                    "item_id": str(number),
                    "output": f"{WORDS[truth]} thing {number}",
                    "rater": f"r{rater}",
                    "label": text,
                    "rationale": f"it says {WORDS[truth]}",
                }
                file.write(json.dumps(row) + "\n")
    return str(path)


def leaning(request: Any) -> Any:
    """A model that knows, but says positive almost always: only its probabilities tell."""
    text = request.messages[-1].text or ""
    truth = next((label for label, word in WORDS.items() if word in text), "neutral")
    if not request.config.logprobs:
        return json.dumps(
            {
                "verdict": "positive",
                "reasoning": "r",
                "proposed_instruction": "Judge the mood.",
                "proposed_prefix_for_output_field": "Verdict:",
                "natural_language_rules": "rule",
            }
        )
    odds = {"negative": 0.05, "neutral": 0.1, "positive": 0.5}
    odds[truth] += 0.2
    return {
        (
            chr(ord("A") + SCALE.split(",").index(k))
            if "one letter" in (request.system or str(request.messages[0].text))
            else k
        ): v
        for k, v in odds.items()
    }


def compiled(tmp_path: Path, script: Any = leaning, *, logprobs: bool = True, **options: Any) -> Any:
    labels = options.pop("labels", None) or labels_file(tmp_path / "labels.jsonl")
    options = {
        "scale": SCALE.split(","),
        "sizes": {"train": 36, "val": 30, "gate": 30, "test": 30},
        "store": tmp_path / ".assay" / "a.db",
        **options,
    }
    judge = options.pop("judge", "What is the mood of the text?")
    if not isinstance(judge, str):
        options.pop("scale")
    return assay.compile_judge(judge, labels=labels, lm=scripted_lm(script, logprobs=logprobs), **options)


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
    assert (report.artifact / "card.png").read_bytes().startswith(b"\x89PNG")
    page = (report.artifact / "report.md").read_text()
    assert "{" not in page
    assert "Gain in weighted_kappa, paired: " in page
    output = CliRunner().invoke(group, ["judge", "card", str(report.artifact)])
    assert (output.exit_code, "of what raters reach" in output.output, "weighted_kappa" in output.output) == (
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


def test_a_rubric_uses_a_compiled_judge(calibrated: tuple[Path, Any], tmp_path: Path) -> None:
    report = calibrated[1]
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: mood, judge: {{use: {report.artifact}}}}}\n")
    lm = scripted_lm(leaning, logprobs=True)
    rubric = assay.load_rubric(tmp_path / "r.yaml", judge_lm=lm)
    good, bad = (rubric.score({"question": "?"}, {"answer": f"{word} thing"}).value for word in ("lovely", "awful"))
    assert good > 0.7 > 0.4 > bad


def turned(request: Any) -> Any:
    """The same model after an update that turned it round."""
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
    assert (evaluation["alarms"], evaluation["calls"]) == ([], 30)
    evaluation = score_rows(folder, lm=other, **scored)
    assert evaluation["calls"] == 60  # 30 anchors, 30 rows
    assert "CUSUM" in evaluation["alarms"][0]
    assert " Changed: model" in evaluation["alarms"][0]
    assert replay_anchors(folder, lm=same, store=tmp_path / ".assay" / "b.db")["alarms"] == []
    assert replay_anchors(folder, lm=other, store=tmp_path / ".assay" / "b.db")["alarms"]

    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: mood, judge: {{use: {folder}}}}}\n")
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"q{at}", "answer": "x"}) + "\n" for at in range(30))
    )
    evaluated = assay.evaluate(
        dspy.Predict("question -> answer"), rubric=tmp_path / "r.yaml", data=str(tmp_path / "tasks.jsonl"), lm=other,
        store=tmp_path / ".assay" / "b.db",
    )  # fmt: skip
    assert evaluated.to_dict()["alarms"] == evaluation["alarms"]


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
@pytest.mark.parametrize("optimizer", ["calibrate", "labeled", "bootstrap", "copro", "gepa", "simba"])
def test_other_optimizers_by_name(tmp_path: Path, optimizer: str) -> None:
    sizes = {"train": 18, "val": 20, "gate": 20, "test": 20}
    data = compiled(tmp_path, optimizer=optimizer, sizes=sizes).to_dict()
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


@pytest.mark.slow
def test_single_class_labels_report_undefined_kappa(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(
        "".join(json.dumps({"output": f"thing {n}", "rater": "1", "label": "positive"}) + "\n" for n in range(120))
    )
    data = compiled(tmp_path, labels=str(path)).to_dict()
    assert data["test"]["compiled"]["weighted_kappa"] is None
    assert "only one label" in data["test"]["compiled"]["undefined"]["weighted_kappa"]
    assert data["replaces"] is False
    assert data["ceiling"]["undefined"]["kappa"] == "no item has two raters"


@pytest.mark.slow
def test_intermittently_failing_verdicts_are_counted_and_excluded(tmp_path: Path) -> None:
    count = [0]

    def stumbling(request: Any) -> Any:
        count[0] += 1
        return dspy.lm15.ServerError("busy") if count[0] % 3 == 0 else leaning(request)

    data = compiled(tmp_path, stumbling, sizes={"train": 36, "val": 24, "gate": 24, "test": 40}).to_dict()
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
        ({"shows": ["picture"]}, ConfigError, "no item has 'picture'"),
        ({"judge": "helpful"}, Exception, "unknown judge 'helpful'"),
        ({"objective": "beauty"}, ConfigError, "objective='beauty' must be one of"),
        ({"optimizer": "bootstrp"}, ConfigError, "no optimizer is called"),
        ({"optimizer": "knn", "sizes": {"train": 9, "val": 9}}, ConfigError, "makes another program around the judge"),
    ],
)
def test_wrong_settings_are_refused_with_the_valid_ones(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compiled(tmp_path, **options)


def test_all_errors_of_a_judge_file_are_reported_with_lines(tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text("text: Which mood?\nscale: [negative, neutral, positive]\nshow: [output]\n")
    with pytest.raises(assay.AssayError, match=r"j\.yaml:3: unknown key 'show'.*Did you mean 'shows'"):
        assay.load_judge(tmp_path / "j.yaml")
    (tmp_path / "j.yaml").write_text(
        "text: Which mood?\nscale: [negative, neutral, positive]\nshows: [output]\nanchors: {negative: unkind}\n"
    )
    judge = assay.load_judge(tmp_path / "j.yaml")
    assert judge.labels == ("negative", "neutral", "positive")
    assert "'negative' means: unkind" in judge.decide.signature.instructions


def test_judge_module_of_the_user_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from assay.judges import PointwiseJudge\nmood = PointwiseJudge('Is it kind?', shows=('output',))\nnumber = 4\n"
    )
    assert assay.load_judge(f"{tmp_path}/mine.py:mood").labels == ("no", "yes")
    with pytest.raises(assay.AssayError, match=r"is a int, not a (judge|callable)"):
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
    usage = report.meter.usage
    usage_price = 0.01
    assert usage.cost_usd == 0  # a scripted model has no price
    report.meter.of("search").cost_usd = usage_price * usage.calls
    from assay.api.judge.card import price_per_call
    from assay.evaluation import Session

    session = Session(lm=None, rubric=None, recorder=None, meter=report.meter)  # type: ignore[arg-type]
    assert price_per_call(session) == pytest.approx(usage_price)
    assert report.outcome.answers["compiled"].calls == 30  # a call each, whether it was asked or known


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
        result = forget_rater("r0", store=tmp_path / ".assay" / "a.db")["judges"]
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
    with pytest.raises(ConfigError, match="scale is nominal"):
        compiled(tmp_path, scale_kind="nominal", negatives=4)


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
    assert any("under 20 nothing can be claimed" in line for line in messages)


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
