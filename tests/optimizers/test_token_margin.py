"""Of candidates with equal scores the one with fewer prompt tokens wins; a significant gain is never given up."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

from assay.errors import ConfigError
from assay.evaluation.evaluation import Evaluation
from assay.optimizers import CompileConfig
from assay.optimizers.prompts.candidates import Candidate, best_with_fewest_tokens
from assay.optimizers.prompts.search import PromptSearch
from assay.rubrics import ScoreResult


def candidate(name: str, scores: list[float], tokens: float) -> Candidate:
    evaluation = Evaluation()
    for at, score in enumerate(scores):
        evaluation.results[str(at)], evaluation.prompt_tokens[str(at)] = ScoreResult(value=score), tokens
    return Candidate(name, None, evaluation)  # type: ignore[arg-type]


SCORES = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def chosen(values: list[float], tokens: list[float], margin: float, scores: list[list[float]] | None = None) -> str:
    score_lists = scores or [SCORES] * len(values)
    made = [candidate(f"c{at}", score_lists[at], tokens[at]) for at in range(len(values))]
    return best_with_fewest_tokens(made, values, margin).name


def test_equal_candidates_are_decided_by_prompt_tokens() -> None:
    assert chosen([0.600, 0.605, 0.602], [900, 1000, 300], 0.01) == "c2"
    assert chosen([0.600, 0.605, 0.602], [900, 1000, 300], 0.001) == "c1"  # significantly different
    assert chosen([0.605, 0.605], [1000, 500], 0.0) == "c1"  # equal


def test_token_difference_below_a_tenth_is_ignored() -> None:
    assert chosen([0.600, 0.605], [950, 1000], 0.01) == "c1"


def test_significantly_better_candidate_is_never_dropped() -> None:
    worse, better = [0.5] * 40, [0.508, 0.510] * 20  # each task is 0.008 or 0.010 better
    assert chosen([0.502, 0.511], [100, 1000], 0.01, [worse, better]) == "c1"
    assert chosen([0.502, 0.511], [100, 1000], 0.01) == "c0"


def test_candidate_with_unknown_tokens_does_not_win_by_tokens() -> None:
    assert chosen([0.600, 0.605], [0, 1000], 0.01) == "c1"
    assert math.isinf(candidate("c", SCORES, 0).prompt_tokens)


def test_a_note_says_why_the_winner_is_not_the_candidate_with_the_highest_score() -> None:
    job: Any = SimpleNamespace(program=dspy.Predict("question -> answer"), val=[], lm=None)
    search = PromptSearch(job, job, job, CompileConfig(token_margin=0.0), Path())
    search.candidates[:] = [
        candidate("baseline", [0.0] * 8, 100),
        candidate("long", [1.0] * 8, 1300),
        candidate("short", [0.99] + [1.0] * 7, 900),
    ]
    assert (search.best().name, search.notes) == ("long", [])
    search.config = CompileConfig(token_margin=0.05)
    assert search.best().name == "short"
    assert search.notes == [
        "short wins on val: no significant difference in score from long, with 900 prompt tokens a task instead of "
        "1,300"
    ]


def test_a_margin_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_margin: must be less than 1, not 1"):
        CompileConfig(token_margin=1)
