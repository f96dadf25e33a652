"""Thresholds of a thinking policy as searched parameters: their space, the default, and the tuned artifact."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

import assay
from assay.api.tune import parameter_impact, tune
from assay.errors import ParameterError
from assay.optimizers.parameters import Point, Space
from assay.optimizers.parameters.space import check_ranges
from assay.programs import RANGES, Classify, MathQA, Refine, ThinkingPolicy
from assay.programs.budgets import set_thresholds, thresholds_of
from assay.programs.compose import NearestDemos
from assay.programs.thinking import THRESHOLDS
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm


def test_thresholds_are_those_of_the_policy_and_one_is_off() -> None:
    assert thresholds_of(MathQA()) == {}
    assert thresholds_of(MathQA(thinking=64)) == {"probe_margin": 1, "stable": 1, "confidence": 1, "samples": 1}
    auto = {"probe_margin": 0.6, "stable": 2, "confidence": 1, "samples": 1}
    assert thresholds_of(MathQA(thinking="auto")) == auto
    assert thresholds_of(NearestDemos(MathQA(thinking="auto"), [{"key": "2", "demos": {}}], k=1)) == auto
    refine = Refine(MathQA(thinking=64), lambda *_: 1.0, signature="question -> answer")
    refine.thinking = assay.models.Thinking(tokens=64)
    assert thresholds_of(refine) == {}  # it makes no choices of its own


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


def test_the_search_draws_values_in_tenths_and_the_ones_that_are_off() -> None:
    study, drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), list[Point]()
    for _ in range(200):
        drawn.append(space().suggest(study.ask()))
    assert {point.parameters["probe_margin"] for point in drawn} == {n / 10 for n in range(11)}
    assert {point.parameters["stable"] for point in drawn} == {1, 2, 3, 4, 5, 6}
    assert all(isinstance(point.parameters["samples"], int) for point in drawn)
    for point in drawn[:5]:
        assert space().point(space().trial_parameters(point)) == point
    assert space().trial_parameters(Point("p", {"probe_margin": 0.65, "samples": 30}))["samples"] == 9
    assert set(space().grid()["confidence"]) == {0.0, 0.3, 0.7, 1.0}
    assert space(confidence=(0.2, 0.4)).at("confidence", 0.6) == 0.3


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
