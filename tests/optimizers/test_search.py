"""The search of auto on the scripted in-context learner: results, candidates, proposals, the whole job."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest

import assay
from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.statistics import losing_evidence
from assay.models import Caps, Meter
from assay.optimizers.prompts.candidates import (
    EXISTING,
    Candidate,
    Score,
    SearchSpace,
    best_with_fewest_tokens,
    posterior,
)
from assay.optimizers.prompts.demonstrations import SELECTIONS, Demonstration, select
from assay.optimizers.prompts.proposals import InstructionCheck, propose_instruction
from assay.optimizers.prompts.search import AutoSearch
from assay.programs.compose import Embedding
from assay.rubrics import Criterion, Rubric, ScoreResult, load_rubric
from assay.shipped.programs.classify.program import Classify
from assay.testing import scripted_lm
from assay.traces import Recorder
from rigs.learner import InContextLearner
from rigs.progress import Lines


def demonstration(task: Task) -> Demonstration:
    return Demonstration(task, (("self", dict(task.inputs), dict(task.expected)),), 1.0)


def session_of(script: Any, calls: int, rubric: Rubric | None = None, **options: Any) -> Session:
    recorder, meter = Recorder(), Meter(Caps(search_calls=calls))
    lm = scripted_lm(script, meter=meter, observers=[recorder.observe]).copy(temperature=0.7)
    return Session(lm, rubric or load_rubric("classify"), recorder, meter, **options)


def search_of(
    session: Session, program: Any, tasks: list[Task], shown: Sequence[Task] = (), formats: Any = (None,)
) -> AutoSearch:
    """A search on these tasks, which has not begun; its demonstrations are of the tasks `shown`."""
    recorded = RecordedProgram(program, session)
    space = SearchSpace(recorded, list(map(demonstration, shown)), list(formats), most=16, seed=session.seed)
    return AutoSearch(space, Candidate("baseline", recorded), tasks, session)


def searched(*, calls: int = 150, threads: int = 2) -> AutoSearch:
    learner = InContextLearner("intents")
    tasks = learner.tasks(120, seed=1)
    session = session_of(learner, calls, threads=threads)
    search = search_of(session, learner.program(), tasks[80:], tasks[:80], (None, "json", "lean"))
    with session.context():
        search.run()
    session.meter.phase = "test"
    return search


def rows(search: AutoSearch) -> list[Any]:
    return [(c.name, c.evaluation.scores, c.dropped, c.expected) for c in search.candidates]


def accuracy(program: RecordedProgram, count: int = 200) -> float:
    backend: Any = program.session.lm.recording.backend
    learner = backend.engine.script
    tasks = learner.tasks(count, seed=9)
    program.session.register(tasks)
    with program.session.context():
        return sum(program.run(task).scored.value for task in tasks) / count


@pytest.mark.slow
def test_search_spends_its_budget_and_finds_the_clearly_best_candidate() -> None:
    search = searched()
    calls = search.session.meter.calls_of("search")
    assert 140 <= calls <= 150
    plain, best = accuracy(search.candidates[0].student), accuracy(search.best().student)
    assert best > plain + 0.2, (plain, best, search.best().name)


@pytest.mark.slow
def test_search_result_is_independent_of_threads() -> None:
    assert rows(searched(calls=70, threads=1)) == rows(searched(calls=70, threads=6))


def test_baseline_is_evaluated_and_never_dropped() -> None:
    search = searched(calls=100)
    baseline = search.candidates[0]
    baseline.evaluation.results = {key: baseline.evaluation.results[key] for key in baseline.evaluation.results}
    assert len(baseline.evaluation) >= 2
    best = search.best()
    for task in search.tasks:  # it loses everything against the best, and stays
        for candidate, value in ((baseline, 0.0), (best, 1.0)):
            result = next(iter(candidate.evaluation.results.values()))
            candidate.evaluation.results[task.id] = type(result)(**{**vars(result), "value": value})
    search.drop_losing()
    assert not baseline.dropped


def test_round_interrupted_by_the_cap_is_discarded() -> None:
    search = searched(calls=60)
    before = rows(search)
    search.session.meter.phase = "search"
    pairs = [(search.candidates[0], task) for task in search.tasks[-30:]]
    with search.session.context():
        assert not search.evaluate_round(pairs)
    assert rows(search) == before


# -- the exact test


def test_evidence_matches_hand_calculation() -> None:
    # one task that only the leader gets right: mean of 1 + bet over bets 0.1 ... 0.9 = 1.5
    assert losing_evidence({"a": 1.0}, {"a": 0.0}, order=["a"]) == pytest.approx(1.5)
    assert losing_evidence({"a": 1.0}, {"b": 0.0}, order=["a", "b"]) == 1.0
    assert losing_evidence({"a": 1.0}, {"a": float("nan")}, order=["a"]) == 1.0


def test_equal_candidate_is_dropped_at_most_at_rate_alpha() -> None:
    rng, dropped = random.Random(0), 0
    order = [str(i) for i in range(60)]
    for _ in range(400):
        first, other = ({key: float(rng.random() < 0.6) for key in order} for _ in range(2))
        evidence = (losing_evidence(first, {k: other[k] for k in order[:n]}, order=order) for n in range(2, 61, 2))
        dropped += max(evidence) >= 1 / 0.05
    assert dropped / 400 <= 0.05


# -- what is expected of candidates


def test_posterior_matches_hand_calculation() -> None:
    # one candidate, prior variance 0.01 * scale^2 + 0.09; one score equals the mean of all scores: the mean stays
    estimate = posterior([Score(0, "a", 0.5)], np.array([[0.01]]))
    assert estimate.mean[0] == pytest.approx(0.5)
    assert 0 < estimate.covariance[0, 0] < 0.13


def test_posterior_shares_information_among_similar_candidates() -> None:
    kernel = np.array([[0.04, 0.038, 0.0], [0.038, 0.04, 0.0], [0.0, 0.0, 0.04]])
    scores = [Score(0, str(i), 1.0) for i in range(20)] + [Score(2, str(i), 0.0) for i in range(20)]
    mean = posterior(scores, kernel).mean
    assert mean[0] > mean[1] > 0.7 > mean[2]


# -- demonstrations


def test_stratified_demonstrations_cover_the_labels_that_random_ones_miss() -> None:
    pool = [demonstration(task) for task in InContextLearner("intents").tasks(100, seed=1)]
    present = {d.task.expected["label"] for d in pool}
    for how in ("stratified", "representative"):
        assert {d.task.expected["label"] for d in select(pool, 12, how=how, seed=0)} == present, how
    assert len({d.task.expected["label"] for d in select(pool, 12, how="random", seed=0)}) < len(present)


@pytest.mark.parametrize("how", SELECTIONS)
def test_selections_are_from_the_pool_without_repetition_and_reproducible(how: str) -> None:
    pool = [demonstration(task) for task in InContextLearner("topics").tasks(30, seed=1)]
    chosen = select(pool, 16, how=how, seed=4)
    assert len({d.task.id for d in chosen}) == 16
    assert chosen == select(pool, 16, how=how, seed=4)
    assert len(select(pool, 64, how=how, seed=4)) == 30


def test_nearest_demonstrations_share_rare_words() -> None:
    texts = ["the card is lost", "the card has not arrived", "the rate of the exchange is wrong", "the top up failed"]
    vectors = Embedding(texts).vectors(texts)
    query = Embedding(texts).vectors(["why is the exchange rate so bad"])
    assert int((vectors @ query.T).toarray().argmax()) == 2


# -- candidates


def test_candidates_respect_the_demonstration_limit_and_vary_temperature() -> None:
    space = searched(calls=30).space
    assert max(space.counts) == 16
    mutants = space.mutants(space.first(), 200, random.Random(0))
    assert {name for spec in mutants for name, _ in spec.parameters} == {"temperature"}  # a plain module has no other
    assert {spec.selection for spec in mutants} == {*SELECTIONS, "nearest", EXISTING}
    assert len({spec.prompt_format for spec in mutants}) == 3


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Look for the main topic.", None), ("", "truncated"), ("Look for the", "truncated"),
        ("Use ```this.", "unclosed"),
        ("Look for the topic (or the main one.", "unclosed"), ("x" * 2000 + ".", "long"),
        ("For example: my card has not arrived after two weeks.", "copied"),
    ],
)  # fmt: skip
def test_auto_proposals_are_validated_like_those_of_dspy_optimizers(text: str, rule: str | None) -> None:
    task = Task(id="1", inputs={"text": "my card has not arrived after two weeks"}, expected={"label": "a"})
    lm = scripted_lm(lambda request: f"[[ ## improved_instruction ## ]]\n{text}\n\n[[ ## completed ## ]]")
    session = Session(lm, load_rubric("classify"), Recorder(), Meter())
    program, check = dspy.Predict("text -> label"), InstructionCheck(dspy.Predict("text -> label"), lm)
    proposal = propose_instruction(
        RecordedProgram(program, session), [demonstration(task)], session, number=0, instruction_check=check
    )
    texts = None if proposal is None else proposal.texts
    assert (texts, check.rejected) == (({"self": text}, []) if rule is None else (None, [(0, rule)]))


def test_a_round_of_unscored_runs_is_reported_without_a_number() -> None:
    progress, learner = Lines(), InContextLearner("intents")
    unscored = Rubric("r", [Criterion(name="x", check=lambda *_: math.nan)])
    search = search_of(
        session_of(learner, 60, unscored, progress=progress), learner.program(), learner.tasks(20, seed=1)
    )
    search.begin()
    search.report_round()
    assert "best: baseline, not scored on 2 tasks" in progress.lines[-1]


# -- the job


@pytest.mark.slow
def test_compile_stores_the_best_temperature_in_the_artifact(tmp_path: Path) -> None:
    learner = InContextLearner("intents", seed=3)
    lines = [json.dumps({"inputs": dict(t.inputs), "expected": dict(t.expected)}) for t in learner.tasks(150, seed=1)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    lm = scripted_lm(learner).copy(temperature=0.7)
    job = {"rubric": "classify", "data": str(tmp_path / "d.jsonl"), "lm": lm, "out": tmp_path / "a"}
    report = assay.compile(learner.program(), max_search_calls=100, **job)
    settings = json.loads((tmp_path / "a" / "manifest.json").read_text())["settings"]
    assert settings["parameters"]["temperature"] < 0.7
    data = report.to_dict()
    assert data["test"]["gain"]["mean"] > 0.1
    assert data["unrecorded"] == 0


@pytest.mark.slow
def test_perfect_baseline_wins_and_ends_the_search() -> None:
    tasks = [Task(id=str(n), inputs={"text": f"text {n}"}, expected={"label": "ab"[n % 2]}) for n in range(70)]
    labels = {str(task.inputs["text"]): str(task.expected["label"]) for task in tasks}

    def right(request: Any) -> str:
        prompt = request.messages[-1].text or ""
        asked = (text for text in labels if text in prompt.split("\n") or f"{text}\n" in prompt)
        return json.dumps({"label": labels[next(asked)]})

    session = session_of(right, 300, threads=1)
    search = search_of(session, Classify(["a", "b"]), tasks[40:], tasks[:40], ["json"])
    session.register(tasks)
    with session.context():
        search.run()
    assert search.candidates[0].mean == 1.0, search.candidates[0].evaluation.results
    assert search.best() is search.candidates[0]
    assert session.meter.calls_of("search") < 150


# -- of candidates with equal scores the one with fewer prompt tokens wins


def candidate(name: str, scores: list[float], tokens: float) -> Candidate:
    evaluation = Evaluation()
    for at, score in enumerate(scores):
        evaluation.results[str(at)], evaluation.prompt_tokens[str(at)] = ScoreResult(value=score), tokens
    return Candidate(name, None, evaluation)  # type: ignore[arg-type]


SCORES = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


WORSE, BETTER = [0.5] * 40, [0.508, 0.510] * 20  # each task is 0.008 or 0.010 better


@pytest.mark.parametrize(
    ("values", "tokens", "margin", "scores", "winner"),
    [
        ([0.600, 0.605, 0.602], [900, 1000, 300], 0.01, None, "c2"),
        ([0.600, 0.605, 0.602], [900, 1000, 300], 0.001, None, "c1"),  # significantly different
        ([0.605, 0.605], [1000, 500], 0.0, None, "c1"),  # equal
        ([0.600, 0.605], [950, 1000], 0.01, None, "c1"),  # less than a tenth fewer
        ([0.600, 0.605], [0, 1000], 0.01, None, "c1"),  # unknown
        ([0.502, 0.511], [100, 1000], 0.01, [WORSE, BETTER], "c1"),  # better on every task
        ([0.502, 0.511], [100, 1000], 0.01, None, "c0"),
    ],
)
def test_candidates_without_a_significant_difference_are_decided_by_prompt_tokens(
    values: list[float], tokens: list[float], margin: float, scores: list[list[float]] | None, winner: str
) -> None:
    lists = scores or [SCORES] * len(values)
    candidates = [candidate(f"c{at}", lists[at], tokens[at]) for at in range(len(values))]
    assert best_with_fewest_tokens(candidates, values, margin).name == winner
