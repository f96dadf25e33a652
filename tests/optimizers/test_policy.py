"""The policy trainer: its rules, its gradient, what it keeps, and agents that break."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from assay.errors import ConfigError, ModelError, ParameterError
from assay.optimizers.metrics import METRICS
from assay.optimizers.parameters import RLTrainer, SearchConfig, Space, open_study, search
from assay.optimizers.parameters.arena import AgentArena
from assay.optimizers.parameters.network import NumpyPolicy, TorchPolicy, state_of
from assay.programs import RANGES, AgentParameters
from assay.testing import SyntheticAgent


def pushed(**metrics: float) -> dict[str, float]:
    """What the untrained network says where one metric is low."""
    given = [metrics.get(name, 1.0) for name in METRICS]
    return dict(zip(RANGES, NumpyPolicy().mean(state_of(given, [0.5] * 5)).round(6).tolist(), strict=True))


def test_it_begins_with_the_rules() -> None:
    assert {name for name, step in pushed(accuracy=0.2).items() if step > 0} == {"context_length", "max_steps"}
    assert {name for name, step in pushed(efficiency=0.2).items() if step < 0} == {"max_steps", "tool_usage_threshold"}
    coherence = pushed(coherence=0.2)
    assert coherence["reasoning_depth"] > 0
    assert coherence["temperature"] != 0
    assert {name for name, step in pushed(adaptability=0.2).items() if step > 0} == {"temperature", "reasoning_depth"}
    assert set(pushed().values()) == {0.0}
    assert set(NumpyPolicy().mean(state_of([None] * 5, [0.1] * 5)).tolist()) == {0.0}  # unmeasured is no deficit


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_the_gradient_is_torchs(advantage: float) -> None:
    rng = np.random.default_rng(1)
    ours, theirs = NumpyPolicy(seed=3), TorchPolicy(seed=3)
    for policy in (ours, theirs):
        policy.out = np.random.default_rng(2).normal(size=policy.out.shape)
        policy.log_sigma = np.log(np.array([0.1, 0.2, 0.03, 0.3, 0.4]))  # two are at the edges
    for _ in range(3):
        state, action = rng.random(10), rng.normal(size=5) * 0.2
        ours.update(state, action, advantage, 0.1)
        theirs.update(state, action, advantage, 0.1)
    for name in ("rules", "hidden", "bias", "out", "log_sigma"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-12), name


def test_an_update_makes_what_was_good_likelier() -> None:
    policy, state, action = NumpyPolicy(), state_of([0.5] * 5, [0.5] * 5), np.full(5, 0.2)
    before = policy.mean(state)
    policy.update(state, action, 1.0, 0.05)
    assert (abs(policy.mean(state) - action) < abs(before - action)).all()


def test_training_finds_better_parameters_and_tells_its_story() -> None:
    agent = SyntheticAgent("ackley", tasks=60)
    trainer = RLTrainer(agent, agent.right, agent)
    assert trainer.get_best_parameters() == AgentParameters().model_dump()
    outcome = trainer.train(episodes=40)
    history = trainer.training_history
    assert agent.success(trainer.get_best_parameters()) > agent.success(AgentParameters().model_dump()) + 0.1
    assert set(history[0]) == {"number", "metrics", "parameters", "adjustments", "overall", "improvement", "kept", "meaning"}
    assert history[0]["meaning"] == "where it begins"
    for episode in history[1:]:
        words = "better" if episode["improvement"] > 0.01 else "about the same" if episode["improvement"] >= -0.01 else "worse"
        assert episode["meaning"].startswith(words)
        AgentParameters.of(episode["parameters"])
    assert len(outcome.confirmed) == 4
    assert outcome.confirmed[0]["parameters"] == AgentParameters().model_dump()
    again = RLTrainer(SyntheticAgent("ackley", tasks=60), agent.right, agent).train(episodes=40)
    assert again.best == outcome.best  # the same seed


def test_a_policy_that_is_not_updated_stays_as_it_is() -> None:
    agent = SyntheticAgent()
    trainer = RLTrainer(agent, agent.right, agent.tasks)
    before = trainer.policy.rules.copy()
    trainer.train(episodes=5, tasks_per_episode=10, update_policy=False)
    assert (trainer.policy.rules == before).all()
    assert agent.executed == 5 * 10 + 4 * 15


def test_it_stops_when_nothing_gets_better() -> None:
    agent = SyntheticAgent(tasks=10)
    trainer = RLTrainer(agent, lambda task, output: {"accuracy": 0.5}, agent)
    outcome = trainer.train(episodes=100)
    assert outcome.converged
    assert len(outcome.history) < 30
    assert any("converged" in note for note in outcome.notes)
    assert any("nothing was better on held-out tasks" in note for note in outcome.notes)


def test_what_can_go_wrong() -> None:
    agent = SyntheticAgent(tasks=10)
    with pytest.raises(ModelError, match="accuracy was measured on none"):
        RLTrainer(agent, lambda task, output: {"accuracy": math.nan}, agent).train(episodes=2)
    with pytest.raises(ConfigError, match="at least two tasks"):
        RLTrainer(agent, agent.right, ["one"])
    with pytest.raises(ConfigError, match="held_out"):
        RLTrainer(agent, agent.right, agent, held_out=1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        RLTrainer(agent, agent.right, agent).train(episodes=0)
    with pytest.raises(ParameterError, match="between"):
        RLTrainer(agent, agent.right, agent, ranges={"temperature": (0, 5)})
    with pytest.raises(ParameterError, match="between"):
        RLTrainer(agent, agent.right, agent, initial={"temperature": 7})
    with pytest.raises(ConfigError, match="must be one of ackley"):
        SyntheticAgent("himmelblau")


def test_ranges_hold_and_what_is_not_searched_stays() -> None:
    seen: list[dict[str, Any]] = []

    class Watched(SyntheticAgent):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            seen.append(dict(parameters))
            super().set_parameters(parameters)

    agent = Watched(tasks=10)
    RLTrainer(agent, agent.right, agent, ranges={"temperature": (0.3, 0.9)}, initial={"max_steps": 3}).train(episodes=8)
    assert all(0.3 <= parameters["temperature"] <= 0.9 and parameters["max_steps"] == 3 for parameters in seen)
    assert len({parameters["temperature"] for parameters in seen}) > 3


@pytest.mark.parametrize("function", ["ackley", "rosenbrock", "hartmann"])
def test_synthetic_agents_have_the_optimum_they_claim(function: str) -> None:
    agent = SyntheticAgent(function)
    rng = np.random.default_rng(0)
    space = Space(programs=["a"], acting={"a": list(RANGES)})
    drawn = [agent.success({name: space.at(name, place) for name, place in zip(RANGES, row, strict=True)}) for row in rng.random((3000, 5))]
    assert 0.15 < np.median(drawn) < 0.4
    assert max(drawn) <= agent.best
    assert 0.0005 < np.mean(np.array(drawn) >= 0.95 * agent.best) < 0.03
    settings = SearchConfig(trials=20)
    found = search(AgentArena(agent, agent.right), agent.tasks, space, settings, open_study("s", None, space, settings))
    assert agent.success(found.best.point.parameters) > np.median(drawn)


def test_an_episode_that_could_not_be_scored_counts_for_nothing() -> None:
    agent, calls = SyntheticAgent(tasks=10), iter(range(100_000))

    def sometimes(task: Any, output: Any) -> dict[str, float]:
        return {} if next(calls) // 7 % 3 == 1 else {"accuracy": float(output)}

    trainer = RLTrainer(agent, sometimes, agent)
    trainer.train(episodes=9)
    lost = [episode for episode in trainer.training_history if episode["overall"] is None]
    assert len(lost) == 3
    assert all(episode["improvement"] is None and not episode["kept"] for episode in lost)


def test_it_begins_within_the_range_it_was_given() -> None:
    agent = SyntheticAgent(tasks=10)
    trainer = RLTrainer(agent, agent.right, agent, ranges={"max_steps": (1, 5)})
    trainer.train(episodes=4)
    assert all(episode["parameters"]["max_steps"] <= 5 for episode in trainer.training_history)


def test_a_deviation_comes_back_from_its_bounds() -> None:
    policy, state = NumpyPolicy(), state_of([0.5] * 5, [0.5] * 5)
    policy.log_sigma = np.log(np.full(5, 0.4))
    for _ in range(50):
        policy.update(state, policy.mean(state), 1.0, 0.1)  # what lies at the mean is good: stray less
    assert (policy.sigma < 0.3).all()
