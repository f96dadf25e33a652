"""Thresholds of a thinking policy as searched parameters: their space, the default, and the tuned artifact."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.impact import parameter_impact
from assay.commands.tune import tune
from assay.errors import ParameterError
from assay.optimizers.parameters import Space
from assay.optimizers.parameters.space import check_ranges
from assay.programs import RANGES, Classify, MathQA, ThinkingPolicy
from assay.programs.budgets import set_thresholds
from assay.programs.thinking import THRESHOLDS
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm


def test_setting_thresholds_keeps_the_rest_of_the_policy() -> None:
    agent = MathQA(thinking=64, policy={"stable": 3, "piece": 8, "posterior": 0.8})
    set_thresholds(agent, {"stable": 1, "probe_margin": 0.3, "samples": 5})
    assert agent.policy == ThinkingPolicy(piece=8, posterior=0.8, probe_margin=0.3, samples=5)
    plain, own = MathQA(thinking=64), MathQA()
    set_thresholds(plain, {"probe_margin": 1, "samples": 1})
    set_thresholds(own, {"samples": 5})
    assert (plain.policy, own.policy) == (None, None)


def space(**ranges: tuple[float, float]) -> Space:
    return Space(programs=["p"], acting={"p": [*RANGES, *THRESHOLDS]}, ranges=ranges or {**RANGES, **THRESHOLDS})


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ({"probe_margin": (0.25, 0.5)}, "tenths"),
        ({"probe_margin": (0.5, 1.5)}, "between 0 and 1"),
        ({"stable": (0, 3)}, "between 1 and 6"),
        ({"samples": (1, 2.5)}, "whole numbers"),
        ({"confidence": (math.nan, 1)}, "finite"),
        ({"piece": (1, 2)}, "of a program that thinks probe_margin, stable"),
    ],
)
def test_a_range_that_cannot_be_searched_is_refused(ranges: dict[str, tuple[float, float]], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        check_ranges(ranges, {})


def test_thresholds_that_do_not_act_and_misspelt_ones_are_refused_with_the_way_out() -> None:
    with pytest.raises(ParameterError, match=r"no effect of samples in p; they need .* such as thinking=64"):
        Space(programs=["p"], acting={"p": ["temperature"]}, ranges={"samples": (1, 3)})
    with pytest.raises(ParameterError, match=r"no effect of max_steps in p$"):
        Space(programs=["p"], acting={"p": ["temperature"]}, ranges={"max_steps": (1, 3)})
    with pytest.raises(ParameterError, match=r"Did you mean 'samples'\?"):
        check_ranges({"sample": (1, 3)}, {})


def test_a_space_without_thresholds_is_described_as_before() -> None:
    five = Space(programs=["p"], acting={"p": list(RANGES)})
    assert list(five.describe()["ranges"]) == list(RANGES) == five.searched("p")


class Sentiment(Classify):
    """A classifier with a thinking budget."""

    def __init__(self, labels: Sequence[str] = ("sad", "happy"), thinking: Any = 64) -> None:
        super().__init__(labels, thinking=thinking)


def script(request: Any) -> str:
    thought = '"thought": "it is, well, not so clear what this means", ' if "'thought'" in str(request.config) else ""
    return f'{{{thought}"label": "{"happy" if "yay" in str(request.messages[-1]) else "sad"}"}}'


def options(tmp_path: Path) -> dict[str, Any]:
    rows = [{"text": f"{'yay' if at % 2 else 'oh'} {at}", "label": "happy" if at % 2 else "sad"} for at in range(40)]
    rubric = Rubric(name="r", criteria=[Criterion(name="right", check=exact)])
    store = {"store": tmp_path / "s.db", "preflight": False, "lm": scripted_lm(script)}
    return {"rubric": rubric, "data": rows, "sizes": {"val": 4, "gate": 3, "test": 3}, **store}


@pytest.mark.slow
def test_tune_searches_the_thresholds_and_writes_the_best_policy_into_the_artifact(tmp_path: Path) -> None:
    report = tune(
        Sentiment(), **options(tmp_path), trials=8, sampler="grid", ranges={"samples": (1, 4)}, out=tmp_path / "a",
        objectives=("tokens",),
    )  # fmt: skip
    tried = {trial["parameters"]["samples"] for trial in report.to_dict()["history"]}
    assert {1, 4} < tried <= {1, 2, 3, 4}
    assert report.best["samples"] == 1  # fewest tokens, and the program's own: no policy is set
    assert assay.load(tmp_path / "a").policy is None
    voting = tune(
        Sentiment(), **options(tmp_path), trials=2, ranges={"samples": (3, 3)}, out=tmp_path / "b", study="votes"
    )
    assert voting.best["samples"] == 3
    assert assay.load(voting.unproven or voting.artifact).policy == ThinkingPolicy(samples=3)
    assert voting.gate is not None  # the policy alone makes it another program


@pytest.mark.slow
def test_only_thresholds_that_act_are_searched(tmp_path: Path) -> None:
    thinking = tune(Sentiment(), **options(tmp_path), trials=2, out=tmp_path / "a")
    assert {"stable", "samples"} <= thinking.best.keys()
    assert not {"probe_margin", "confidence"} & thinking.best.keys()  # the engine has no probabilities
    plain = tune(Sentiment(thinking=None), **options(tmp_path), trials=2, out=tmp_path / "b")
    assert plain.best.keys() == RANGES.keys()
    budgeted = tune(Sentiment(thinking=None), **options(tmp_path), trials=2, out=tmp_path / "c", thinking=32)
    assert "stable" in budgeted.best
    with pytest.raises(ParameterError, match="nothing is searched"):
        tune(Sentiment(thinking=None), **options(tmp_path), trials=2, ranges={"stable": (1, 3)})
    with pytest.raises(ParameterError, match="nothing is searched"):
        tune(Sentiment(), **options(tmp_path), method="policy", episodes=1, ranges={"stable": (1, 3)})


@pytest.mark.slow
def test_impact_measures_thresholds_one_at_a_time(tmp_path: Path) -> None:
    report = parameter_impact(
        Sentiment(), **options(tmp_path), levels=2, ranges={"samples": (1, 3)}, out=tmp_path / "i"
    )
    effects = {effect.value: effect.metrics["tokens"]["mean"] for effect in report.impact.effects}
    assert effects[3.0] > 2 * effects[1.0]
