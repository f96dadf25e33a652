"""The search of `auto` on the scripted in-context learner: results, invariants, replay."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from searched_tasks import demonstration, searched

from assay.datasets import Task
from assay.evaluation import RecordedProgram
from assay.evaluation.statistics import losing_evidence
from assay.optimizers.prompts.candidates import Score, posterior
from assay.optimizers.prompts.demonstrations import SELECTIONS, select, strata
from assay.optimizers.prompts.search import AutoSearch
from assay.programs.compose import Embedding
from rigs.learner import InContextLearner


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


@pytest.mark.slow
def test_another_seed_gives_another_search() -> None:
    assert [c.name for c in searched(calls=60, seed=1).candidates] != [
        c.name for c in searched(calls=60, seed=2).candidates
    ]


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


def test_search_without_calls_keeps_the_baseline() -> None:
    search = searched(calls=2)
    assert search.best() is search.candidates[0]


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


def test_a_candidate_that_loses_half_of_the_tasks_is_dropped_within_forty() -> None:
    order = [str(i) for i in range(40)]
    assert (
        losing_evidence(dict.fromkeys(order, 1.0), {key: float(int(key) % 2) for key in order}, order=order) > 30 / 0.05
    )


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


def test_task_difficulty_is_adjusted_for() -> None:
    kernel = np.eye(3) * 0.02
    common = [Score(2, str(i), float(i < 10)) for i in range(20)]
    scores = common + [Score(0, str(i), 1.0) for i in range(10)] + [Score(1, str(i), 0.5) for i in range(10, 20)]
    mean = posterior(scores, kernel).mean
    raw_gap = 1.0 - 0.5
    assert mean[0] - mean[1] < raw_gap / 2


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


def test_outputs_without_repetition_are_not_labels() -> None:
    pool = [
        demonstration(Task(id=str(i), task_type="sum", inputs={"text": str(i)}, expected={"label": str(i)}))
        for i in range(20)
    ]
    assert Counter(strata(pool)) == {"sum": 20}


def test_nearest_demonstrations_share_rare_words() -> None:
    texts = ["the card is lost", "the card has not arrived", "the rate of the exchange is wrong", "the top up failed"]
    vectors = Embedding(texts).vectors(texts)
    query = Embedding(texts).vectors(["why is the exchange rate so bad"])
    assert int((vectors @ query.T).toarray().argmax()) == 2
