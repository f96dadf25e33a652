"""A DSPy metric, a check, and a shipped check's name are rubrics of one criterion."""

import functools
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest

import assay
from assay.errors import ConfigError, RubricError
from assay.jobs.loading import portable_rubric
from assay.rubrics import Criterion, Rubric, load_rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm

TASK = {"inputs": {"question": "1+1", "hint": "add"}, "expected": {"answer": "2", "unit": "none"}}
RIGHT = {"answer": "2"}
ROWS = [{"question": f"{n}", "answer": f"{n}"} for n in range(20)]
METRICS = """
import dspy

from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact

def plain(example, pred, trace=None):
    return example.answer == pred.answer

def two(wanted, given):
    return wanted.answer == given.answer

def stars(example, pred, trace=None):
    return 5 if example.answer == pred.answer else 1

def polite(prediction):
    return prediction["answer"] == "2"

class Strict:
    def __call__(self, example, pred, trace=None):
        return dspy.Prediction(score=0.25, feedback="Be brief.")

    def least(self, example, pred, trace=None):
        return 0.5

WHOLE = Rubric("whole", [Criterion(name="same", check=exact, weight=3), Criterion(name="brief", check=Strict())])
"""


def metric(example: Any, pred: Any, trace: Any = None) -> bool:
    return bool(example.answer == pred.answer)


def strict(example: Any, pred: Any, trace: Any = None, *, least: float = 0.0) -> float:
    return least


async def awaited(gold: Any, pred: Any, trace: Any = None) -> float:
    return float(gold.answer == pred.answer)


def of_gepa(gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
    assert (trace, pred_name, pred_trace) == (None, None, None)
    return dspy.Prediction(score=0.5, feedback="Name the unit.")


class Counted:
    def __call__(self, row: Any, answer: Any) -> dict[str, Any]:
        return {"score": len(row.labels()) / 4, "feedback": "two of four"}


class Module(dspy.Module):  # type: ignore[misc]
    def forward(self, example: Any, pred: Any, trace: Any = None) -> Any:
        return dspy.Prediction(score=0.75)


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (metric, 1.0),
        (awaited, 1.0),
        (of_gepa, 0.5),
        (functools.partial(strict, least=0.5), 0.5),
        (Counted(), 0.5),
        (Counted, 0.5),
        (Module(), 0.75),
        (Module, 0.75),
        (lambda wanted, given: wanted.answer == given.answer, 1.0),
        (lambda *both: both[0].unit == "none", 1.0),
        (lambda e, p: np.float32(0.5), 0.5),
        (lambda e, p: np.bool_(True), 1.0),
        (lambda e, p: np.array(0.5), 0.5),
        (lambda e, p: Decimal("0.5"), 0.5),
        (
            lambda e, p: [set(e.inputs().keys()), set(e.labels().keys())] == [{"question", "hint"}, {"answer", "unit"}],
            1.0,
        ),
        (exact, 1.0),
        ("exact", 1.0),
        (lambda prediction: prediction["answer"] == "2", 1.0),
        (lambda rollout, task: rollout is None and task.expected["answer"] == "2", 1.0),
        (lambda task, answer: task.expected["answer"] == answer["answer"], 1.0),
        (lambda row, fields, run: run is None, 1.0),
        (lambda *, prediction: prediction["answer"] == "2", 1.0),
        (lambda task, *rest: rest[0]["answer"] == "2" and rest[1] is None, 1.0),
        (lambda task, prediction, rollout=None, tolerance=0.1: tolerance == 0.1, 1.0),
    ],
)
def test_a_metric_or_check_scores_as_a_rubric(given: Any, score: float) -> None:
    assert load_rubric(given).score(TASK, RIGHT).value == score


def test_the_feedback_of_a_metric_is_the_reason() -> None:
    assert load_rubric(of_gepa).score(TASK, RIGHT).verdicts[0].reason == "Name the unit."


@pytest.mark.parametrize("value", [None, "0.5", math.nan, math.inf, {"points": 1}])
def test_a_value_that_is_not_a_number_is_unscored_with_a_reason(value: Any) -> None:
    result = load_rubric(lambda example, pred: value).score(TASK, RIGHT)
    assert math.isnan(result.value)
    assert result.verdicts[0].reason


@pytest.mark.parametrize("value", [5, -0.5, 1.01, np.float64(2), Decimal(7), 10**400, dspy.Prediction(score=3)])
def test_a_value_out_of_the_declared_range_is_an_error(value: Any) -> None:
    with pytest.raises(RubricError, match="range"):
        load_rubric(lambda example, pred: value).score(TASK, RIGHT)


@pytest.mark.parametrize(("value", "grade"), [(np.float32(1.0000005), 1.0), (np.float32(-1e-7), 0.0), (1 + 1e-12, 1.0)])
def test_a_value_that_leaves_the_range_by_rounding_is_its_end(value: Any, grade: float) -> None:
    assert load_rubric(lambda example, pred: value).score(TASK, RIGHT).value == grade


def test_a_declared_range_makes_grades_of_values() -> None:
    def stars(task: Any, prediction: Any) -> int:
        return 2 if prediction["answer"] == "2" else 0

    scored = Rubric("r", [Criterion(name="stars", check=stars, range=(-2, 3))])
    assert scored.score(TASK, RIGHT).value == 0.8
    assert scored.score(TASK, {"answer": "3"}).value == 0.4
    assert scored.version != Rubric("r", [Criterion(name="stars", check=stars)]).version


@pytest.mark.parametrize("wrong", [(1, 0), (0, math.inf), (0,), "01", (0, True), None])
def test_a_range_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(RubricError, match="range"):
        Criterion(name="a", check=exact, range=wrong)


@pytest.mark.parametrize("given", [lambda: 1, lambda example: 1, 5, object()])
def test_what_can_be_no_metric_is_refused_before_it_scores(given: Any) -> None:
    with pytest.raises(RubricError):
        load_rubric(given)


def test_a_method_without_its_object_is_refused(folder: Path) -> None:
    with pytest.raises(RubricError, match="self"):
        load_rubric("metrics.py:Strict.least")


def test_a_rubric_is_no_criterion_of_another(folder: Path) -> None:
    for key in ("check", "metric"):
        (folder / "r.yaml").write_text(
            f"name: r\ncriteria:\n- {{name: a, check: exact}}\n- {{name: b, {key}: 'metrics.py:WHOLE'}}\n"
        )
        with pytest.raises(RubricError, match=r"r\.yaml:4.*Rubric"):
            load_rubric("r.yaml")


def verdict(example: Any, pred: Any, trace: Any = None) -> float:
    return float(dspy.Predict("answer -> grade: float")(answer=pred.answer).grade)


async def awaited_verdict(example: Any, pred: Any, trace: Any = None) -> float:
    return float((await dspy.Predict("answer -> grade: float").acall(answer=pred.answer)).grade)


@pytest.mark.parametrize("judging", [verdict, awaited_verdict])
def test_a_model_that_is_named_for_judges_is_the_one_that_a_metric_calls(judging: Any) -> None:
    judge = scripted_lm(lambda _: '{"grade": 0.25}')
    rubric = assay.load_rubric(judging, judge_model=judge)
    with dspy.context(lm=scripted_lm(lambda _: '{"grade": 0.75}')):  # of the program
        assert rubric.score(TASK, RIGHT).value == 0.25
        assert assay.load_rubric(judging).score(TASK, RIGHT).value == 0.75


def test_a_model_for_judges_is_refused_only_where_nothing_can_call_it(folder: Path) -> None:
    settings: dict[str, Any] = {"data": ROWS, "lm": scripted_lm(lambda _: ""), "preflight": False}
    report = assay.evaluate(Echo(), rubric=metric, judge_model="openai/of-no-project-file", **settings)
    assert report.to_dict()["result"]["score"] == 1.0
    with pytest.raises(ConfigError, match="judge_model"):
        assay.evaluate(Echo(), rubric="exact", judge_model="openai/of-no-project-file", **settings)


@pytest.mark.parametrize("name", ["regex", "refusal", "length", "tool_executed", "exakt", "nothing.py:metric", "m.py"])
def test_a_name_that_is_no_rubric_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RubricError):
        load_rubric(name)


def test_arguments_reach_a_check_of_two_and_a_metric() -> None:
    def near(task: Any, prediction: Any, tolerance: float) -> float:
        return tolerance

    for check, name in ((near, "tolerance"), (strict, "least")):
        rubric = Rubric("r", [Criterion(name="a", check=check, arguments={name: 0.5})])
        assert rubric.score(TASK, RIGHT).value == 0.5
        with pytest.raises(RubricError, match=name):
            Criterion(name="a", check=check, arguments={name + "x": 0.5})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.py").write_text(METRICS)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "score"), [("plain", 1.0), ("two", 1.0), ("polite", 1.0), ("Strict", 0.25), ("WHOLE", 0.8125)]
)
def test_a_metric_by_its_name_scores_the_same_from_a_copy(
    folder: Path, name: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_rubric(f"metrics.py:{name}").score(TASK, RIGHT).value == score
    files = portable_rubric(f"metrics.py:{name}")
    (other := folder / "elsewhere").mkdir()
    for place, content in files.items():
        (other / place).parent.mkdir(parents=True, exist_ok=True)
        (other / place).write_bytes(content)
    (folder / "metrics.py").unlink()
    monkeypatch.chdir(other)
    assert load_rubric(next(iter(files))).score(TASK, RIGHT).value == score


def test_a_rubric_file_combines_metrics_with_their_ranges(folder: Path) -> None:
    (folder / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: stars, metric: 'metrics.py:stars', range: [1, 5], weight: 3}\n"
        "- {name: same, check: 'metrics.py:plain'}\n"
    )
    rubric = load_rubric("r.yaml")
    assert rubric.score(TASK, RIGHT).grades == {"stars": 1.0, "same": 1.0}
    assert rubric.score(TASK, {"answer": "3"}).grades == {"stars": 0.0, "same": 0.0}


class Echo(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> Any:
        return dspy.Prediction(answer=question)


@pytest.mark.parametrize(
    ("command", "rubric", "options"),
    [
        (assay.evaluate, metric, {}),
        (assay.collect, "metrics.py:plain", {"n": 2}),
        (functools.partial(assay.compare, Echo()), "exact", {}),
    ],
    ids=["evaluate", "collect", "compare"],
)
def test_commands_take_a_metric(folder: Path, command: Any, rubric: Any, options: dict[str, Any]) -> None:
    report = command(Echo(), rubric=rubric, data=ROWS, lm=scripted_lm(lambda _: ""), preflight=False, **options)
    assert report.to_dict()


def test_a_job_ends_where_its_metric_leaves_the_range(folder: Path) -> None:
    with pytest.raises(RubricError, match="range"):
        assay.evaluate(Echo(), rubric="metrics.py:stars", data=ROWS, lm=scripted_lm(lambda _: ""), preflight=False)
