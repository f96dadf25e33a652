"""Corrections of DSPy's loops while one of its optimizers runs."""

import io

import dspy
import pytest
from dspy_internals import optimizer_internals

from assay.errors import Unscored
from assay.optimizers.prompts.dspy_patches import repaired_dspy
from assay.rubrics.dspy_metric import protect_dspy

INTERNALS = optimizer_internals()


class Echo(dspy.Module):
    def forward(self, n: int) -> dspy.Prediction:
        return dspy.Prediction(n=n)


def scores_of_simba_runs(examples: list[dspy.Example], scores: list[float | None]) -> list[float]:
    """What SIMBA sees when run by run the metric gives these scores."""
    scripted = iter(scores)

    def metric(example: object, prediction: object) -> float:
        score = next(scripted)
        if score is None:
            raise Unscored("the judge is away")
        return score

    with repaired_dspy(io.StringIO(), seed=0):
        runs = dspy.Parallel(access_examples=False, num_threads=1)(
            [(INTERNALS.simba.wrap_program(Echo(), metric), example) for example in examples]
        )
    return [run["score"] for run in runs]


def test_an_unscored_run_moves_no_comparison_of_simba() -> None:
    a, b = (dspy.Example(n=n).with_inputs("n") for n in (1, 2))
    assert scores_of_simba_runs([a, b, a, b, a], [1.0, 0.4, None, None, 0.5]) == [1.0, 0.4, 0.75, 0.4, 0.5]
    assert scores_of_simba_runs([a, b, b], [None, 0.2, 0.6]) == pytest.approx([0.4, 0.2, 0.6])


def test_an_unscored_simba_batch_is_an_error_and_not_zero() -> None:
    example = dspy.Example(n=1).with_inputs("n")
    with pytest.raises(Unscored):
        scores_of_simba_runs([example, example], [None, None])


def test_dspy_is_restored_afterwards() -> None:
    protect_dspy()  # which stays
    before = INTERNALS.simba.wrap_program, dspy.Evaluate.__call__
    with repaired_dspy(io.StringIO(), seed=0):
        assert dspy.Evaluate.__call__ is not before[1]
    assert (INTERNALS.simba.wrap_program, dspy.Evaluate.__call__) == before
