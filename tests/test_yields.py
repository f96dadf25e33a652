"""The explorer of `benchmarks/claims/yields.py` and the plans it learns. Training takes minutes: not tested here."""

import re
from pathlib import Path
from typing import Any

import pytest

from assay.datasets.experiments import Experiment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def call(plan: str, share: float) -> dict[str, Any]:
    return {"completion": [{"role": "assistant", "content": plan}], "yield": share}


def test_the_explorer_draws_different_feasible_plans() -> None:
    from claims.yields import explorer

    answer, experiment = explorer(0), Experiment.of({"material": "iron"}, 0)
    plans = [re.findall(r"\d+", answer(None)) for _ in range(50)]
    assert {experiment.problem(int(heat), int(hours)) for heat, hours in plans} == {""}
    assert len({tuple(plan) for plan in plans}) > 20


def test_plans_are_chosen_by_their_mean_yield_over_enough_trials() -> None:
    from claims.yields import best_of

    lucky = [call("once", 1.0)]
    best = [call("best", share) for share in (0.9, 0.5, 0.7)]  # mean 0.7
    good = [call("good", share) for share in (0.6, 0.6, 0.6)]
    poor = [call("poor", share) for share in (0.95, 0.1, 0.1)]  # mean 0.38
    assert [row["yield"] for row in best_of([*poor, *good, *lucky, *best])] == [0.9, 0.7, 0.6, 0.6, 0.6, 0.5]
