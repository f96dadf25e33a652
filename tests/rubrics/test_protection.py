"""Rubrics as metrics of stock DSPy: an unscored task is left out of every average and is never 0."""

import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMServerError
from dspy_internals import optimizer_internals

from assay.errors import Unscored
from assay.rubrics import Criterion, NoGrade, Rubric
from assay.rubrics.dspy_metric import MissingScore
from assay.testing import scripted_lm

INTERNALS = optimizer_internals()

N = 15


def right(task: Any, prediction: Any, rollout: Any) -> float:
    """Grades every task but each third, which its judge cannot decide. Every answer is right."""
    if task.inputs["n"] % 3 == 0:
        raise NoGrade("the judge is away")
    return 1.0


def rubric(check: Callable[..., float] = right) -> Rubric:
    return Rubric("partly_scored", [Criterion(name="right", check=check)])


class Echo(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.say = dspy.Predict("n: int -> answer: str")

    def forward(self, n: int) -> dspy.Prediction:
        return self.say(n=n)


def examples(count: int = N) -> list[dspy.Example]:
    return [dspy.Example(n=n, answer="yes").with_inputs("n") for n in range(count)]


@pytest.fixture(autouse=True)
def _model() -> Any:
    text = "[[ ## answer ## ]]\nyes\n[[ ## proposed_instruction ## ]]\nSay yes.\n[[ ## completed ## ]]"
    with dspy.context(lm=scripted_lm(lambda request: text), adapter=dspy.ChatAdapter()):
        yield


def unavailable(task: Any, prediction: Any, rollout: Any) -> float:
    raise NoGrade("the judge is away")


def evaluated(metric: Any, count: int = N, program: Any = None, **options: Any) -> Any:
    return dspy.Evaluate(devset=examples(count), metric=metric, num_threads=1, **options)(program or Echo())


def test_evaluate_divides_by_the_scored_tasks_alone(tmp_path: Any) -> None:
    metric = rubric().metric()
    for threads in (1, 4):
        result = dspy.Evaluate(devset=examples(), metric=metric, num_threads=threads)(Echo())
        assert (result.score, result.results[0][1].answer) == (100.0, "yes")
        assert [math.isnan(score) for *_, score in result.results] == [n % 3 == 0 for n in range(N)]
    assert evaluated(rubric().metric(feedback=True)).score == 100.0
    assert evaluated(lambda example, prediction: metric(example, prediction) / 2).score == 50.0
    many = evaluated(metric, 40, save_as_json=str(tmp_path / "rows.json"))
    assert many.score == 100.0, "14 unscored tasks are more than the ten errors at which DSPy gives up"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert math.isnan(rows[0]["RubricMetric"])
    assert rows[1]["RubricMetric"] == 1.0


def test_evaluate_without_any_score_is_an_error_that_says_why() -> None:
    with pytest.raises(Unscored, match=r"(?s)none of the 15 examples could be scored.*the judge is away"):
        evaluated(rubric(unavailable).metric())


class Failing(Echo):
    """Its model's server fails for each third task; the program itself raises for task 1."""

    wrap = False

    def forward(self, n: int) -> dspy.Prediction:
        if n % 3 == 0:
            error = LMServerError("503")
            if self.wrap:
                raise RuntimeError("step 1 failed") from error
            raise error
        if n == 1:
            raise KeyError("x")
        return super().forward(n=n)


def always(task: Any, prediction: Any, rollout: Any) -> float:
    return 1.0


@pytest.mark.parametrize("wrap", [False, True])
def test_server_failures_are_excluded_from_evaluate_and_program_failures_are_not(wrap: bool) -> None:
    program, metric = Failing(), rubric(always).metric()
    program.wrap = wrap
    # 15 tasks, 5 of them unscored, 1 of the other 10 failed
    assert evaluated(metric, program=program).score == 90.0
    assert evaluated(lambda example, prediction: metric(example, prediction), program=program).score == 90.0
    mean = evaluated(lambda example, prediction: prediction.get("answer") != "no", program=program)
    assert mean.score == pytest.approx(60.0), "of another metric DSPy's own rule: 9 of 15"


def test_gepa_and_simba_exclude_server_failures() -> None:
    adapter = INTERNALS.gepa_adapter(
        student_module=Failing(), metric_fn=rubric(always).metric(), feedback_map={}, num_threads=1
    )
    tasks = examples(6)
    means = [0.75, 0.0, 1.0, 0.75, 1.0, 1.0]  # of the scored
    for capture in (False, True):
        assert adapter.evaluate(tasks, {"say": "Say yes."}, capture_traces=capture).scores == means
    run = INTERNALS.simba.wrap_program(Failing(), rubric(always).metric())
    assert isinstance(run(tasks[3])["score"], MissingScore)
    assert (run(tasks[1])["score"], run(tasks[2])["score"]) == (0.0, 1.0)


def test_random_search_compares_means_over_scored_tasks() -> None:
    optimizer = dspy.BootstrapFewShotWithRandomSearch(
        metric=rubric().metric(), max_bootstrapped_demos=2, num_candidate_programs=2, num_threads=1
    )
    best = optimizer.compile(Echo(), trainset=examples())
    assert [candidate["score"] for candidate in best.candidate_programs] == [100.0] * len(best.candidate_programs)
    fields = {demo.n for demo in best.candidate_programs[-1]["program"].say.demos if getattr(demo, "augmented", False)}
    assert all(n % 3 for n in fields), "a run that could not be scored is not a demonstration"


def test_bootstrapping_survives_more_unscored_tasks_than_dspy_allows_errors() -> None:
    teleprompter = dspy.BootstrapFewShot(metric=rubric().metric(), max_bootstrapped_demos=30, max_errors=3)
    demos = teleprompter.compile(Echo(), trainset=examples(40)).say.demos
    assert all(demo.n % 3 for demo in demos if getattr(demo, "augmented", False))


def mipro(metric: Any, **options: Any) -> Any:
    search = {"num_candidates": 2, "max_bootstrapped_demos": 0, "max_labeled_demos": 0}
    optimizer = dspy.MIPROv2(metric=metric, auto=None, num_threads=1, verbose=False, **search)
    return optimizer.compile(Echo(), trainset=examples(), valset=examples(), **options)


def test_mipro_compares_means_over_scored_tasks() -> None:
    best = mipro(rubric().metric(), num_trials=3, minibatch=True, minibatch_size=8)
    assert best.score == 100.0
    assert {entry["score"] for entry in best.mb_candidate_programs + best.candidate_programs} == {100.0}
    with pytest.raises(Unscored):  # an evaluation without a score is not 0
        mipro(rubric(unavailable).metric(), num_trials=2, minibatch=False)


def gepa(metric: Any, **options: Any) -> Any:
    proposer = scripted_lm(lambda request: '{"new_instruction": "Say yes at once."}')
    options |= {"max_metric_calls": 60, "num_threads": 1, "track_stats": True, "use_merge": False}
    optimizer = dspy.GEPA(metric=metric, reflection_lm=proposer, **options)
    return optimizer.compile(Echo(), trainset=examples(), valset=examples(6))


@pytest.mark.parametrize("feedback", [True, False])
def test_gepa_selects_by_scored_tasks(feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proposed: list[dict[str, str]] = []
    build = INTERNALS.gepa_adapter.build_program
    monkeypatch.setattr(
        INTERNALS.gepa_adapter,
        "build_program",
        lambda self, candidate: [proposed.append(candidate), build(self, candidate)][1],
    )
    report = gepa(rubric().metric(feedback=feedback), skip_perfect_score=False)
    scores = [score for by_task in report.detailed_results.val_subscores for score in by_task.values()]
    assert any("at once" in candidate["say"] for candidate in proposed), "GEPA reflected on batches with unscored tasks"
    assert set(scores) == {1.0}, "all that is scored is 1, so a task that is not stands nowhere as anything else"


def test_gepa_continues_after_an_unscored_batch_without_a_preference() -> None:
    metric, tasks = rubric().metric(), examples(7)
    adapter = INTERNALS.gepa_adapter(student_module=Echo(), metric_fn=metric, feedback_map={}, num_threads=1)
    candidate = {"say": "Say yes."}
    with pytest.raises(Unscored):
        adapter.evaluate([tasks[0], tasks[3]], candidate)
    assert adapter.evaluate(tasks, candidate).scores == [1.0] * 7
    assert adapter.evaluate([tasks[0], tasks[3], tasks[6]], candidate, capture_traces=True).scores == [1.0] * 3


def test_gepa_ends_if_the_judge_is_unavailable() -> None:
    requests = []

    def dying(task: Any, prediction: Any, rollout: Any) -> float:
        requests.append(task)
        if len(requests) > 12:
            raise NoGrade("the judge is away")
        return 0.5

    with pytest.raises(Unscored, match=r"(?s)in 5 consecutive batches.*the judge is away"):
        gepa(rubric(dying).metric(feedback=True))


def test_simba_gives_an_unscored_run_the_mean_of_the_same_example(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[float] = []

    def rule(bucket: Any, system: Any, **kwargs: Any) -> bool:
        values.extend(run["score"] for run in bucket)
        return True

    monkeypatch.setattr(INTERNALS.simba, "append_a_rule", rule)
    optimizer = dspy.SIMBA(metric=rubric().metric(), bsize=6, num_candidates=2, max_steps=2, max_demos=0, num_threads=1)
    best = optimizer.compile(Echo(), trainset=examples(12), seed=0)
    assert set(values) == {1.0}
    assert {entry["score"] for entry in best.candidate_programs} == {1.0}


def test_user_metrics_are_unchanged() -> None:
    rubric().metric()  # the protection is in place
    observed: list[Any] = []

    class Watcher(dspy.utils.BaseCallback):  # type: ignore[misc]
        def on_evaluate_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            observed.append(inputs.get("metric"))

    def raising(example: Any, prediction: Any) -> float:
        if example.n < 5:
            raise ValueError("mine")
        return 1.0

    with dspy.context(callbacks=[Watcher()]):
        result = dspy.Evaluate(devset=examples(), num_threads=1, failure_score=0.25)(Echo(), metric=raising)
    assert result.score == round(100 * (5 * 0.25 + 10) / N, 2)
    assert result.results[0][2] == 0.25
    assert observed == [raising]
    assert math.isnan(evaluated(lambda example, prediction: math.nan).score), (
        "a NaN of somebody else's metric stays one"
    )
    with pytest.raises(Exception, match="cancelled"):
        evaluated(raising, max_errors=3)


def test_predictor_level_feedback_has_no_score() -> None:
    feedback = rubric().metric()(examples()[0], dspy.Prediction(answer="yes"), [], "say", [])
    assert math.isnan(feedback.score)
    assert "away" in feedback.feedback
    assert rubric().metric()(examples()[0], dspy.Prediction(answer="yes"), []) is False


def test_a_missing_score_is_excluded_from_sums_and_is_not_0() -> None:
    missing = MissingScore()
    assert math.isnan(missing)
    assert not missing
    assert sum([1.0, missing, 0.5, missing]) / 4 == 0.75
    assert 100 * sum([missing, 1, True]) / 3 == 100.0
    assert math.isnan((missing + missing) / 2)
    copied = pickle.loads(pickle.dumps(missing))
    assert math.isnan(copied)
    assert copied.missing == 1
