"""The policy trainer: its rules, its gradient, its state, and agents that fail."""

import errno
import hashlib
import http.client
import json
import math
import random
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import dspy
import httpx
import numpy as np
import pytest

from assay.datasets import Task
from assay.errors import ConfigError, ModelError, ParameterError, ProgramError
from assay.evaluation.metrics import METRICS
from assay.optimizers.parameters import RLTrainer
from assay.optimizers.parameters.policy import Adjuster, state_of
from assay.programs import RANGES, AgentParameters, BaseAgent
from assay.testing import SyntheticAgent


def pushed(**metrics: float) -> dict[str, float]:
    """Output of the untrained network where one metric is low."""
    options = [metrics.get(name, 1.0) for name in METRICS]
    return dict(zip(RANGES, Adjuster().mean(state_of(options, [0.5] * 5)).round(6).tolist(), strict=True))


def test_policy_starts_from_the_rules() -> None:
    assert {name for name, step in pushed(accuracy=0.2).items() if step > 0} == {"context_length", "max_steps"}
    assert {name for name, step in pushed(efficiency=0.2).items() if step < 0} == {"max_steps", "tool_usage_threshold"}
    coherence = pushed(coherence=0.2)
    assert coherence["reasoning_depth"] > 0
    assert coherence["temperature"] != 0
    assert {name for name, step in pushed(adaptability=0.2).items() if step > 0} == {"temperature", "reasoning_depth"}
    assert set(pushed().values()) == {0.0}
    assert set(Adjuster().mean(state_of([None] * 5, [0.1] * 5)).tolist()) == {0.0}  # unmeasured is not a deficit


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_the_gradient_equals_torchs(advantage: float) -> None:
    """The update equals the automatic gradient of advantage * log-probability, in units of the standard deviation."""
    torch = pytest.importorskip("torch")
    policy = Adjuster(seed=3)
    policy.out = np.random.default_rng(2).normal(size=policy.out.shape)
    policy.log_sigma = np.log(np.array([0.1, 0.2, 0.03, 0.3, 0.4]))  # two are at the edges
    rng = np.random.default_rng(1)
    state, action = rng.random(10), rng.normal(size=5) * 0.2
    names = ("rules", "hidden", "bias", "out", "log_sigma")
    leaves = {
        name: torch.tensor(getattr(policy, name).copy(), dtype=torch.float64, requires_grad=True) for name in names
    }
    s, a, sigma = (torch.tensor(values, dtype=torch.float64) for values in (state, action, policy.sigma))
    mean = leaves["rules"] @ s[:5] + leaves["out"] @ torch.tanh(leaves["hidden"] @ s + leaves["bias"])
    spread, z = torch.exp(leaves["log_sigma"]), ((a - mean) / sigma).detach()
    (advantage * (-0.5 * (a - mean) ** 2 - torch.log(spread) / 2 - (z * sigma / spread) ** 2 / 4).sum()).backward()
    policy.update(state, action, advantage)
    for name in names:
        expected = (leaves[name] + 0.02 * leaves[name].grad).detach().numpy()
        expected = np.clip(expected, np.log(0.03), np.log(0.4)) if name == "log_sigma" else expected
        assert getattr(policy, name) == pytest.approx(expected, abs=1e-12), name


@pytest.mark.slow
def test_training_finds_better_parameters_and_records_its_history() -> None:
    agent = SyntheticAgent("ackley", tasks=60)
    trainer = RLTrainer(agent, agent.right, agent)
    assert trainer.get_best_parameters() == AgentParameters().model_dump()
    outcome = trainer.train(episodes=40)
    history = trainer.training_history
    assert agent.success(trainer.get_best_parameters()) > agent.success(AgentParameters().model_dump()) + 0.1
    assert set(history[0]) == {
        "number", "metrics", "parameters", "adjustments", "overall", "improvement", "accepted", "meaning", "unscored",
        "why",
    }  # fmt: skip
    assert history[0]["meaning"] == "where it begins"
    for episode in history[1:]:
        gain = episode["improvement"]
        assert episode["meaning"].startswith("better" if gain > 0.01 else "worse" if gain < -0.01 else "about the same")
        AgentParameters.of(episode["parameters"])
    assert trainer.report is not None
    assert trainer.report.gain.n == 18  # 0.3 of 60: the report's own tasks
    assert trainer.report.gain.low <= trainer.report.after - trainer.report.before <= trainer.report.gain.high
    repeated = RLTrainer(SyntheticAgent("ackley", tasks=60), agent.right, agent).train(episodes=40)
    assert repeated.best == outcome.best  # the same seed


def test_training_stops_without_improvement() -> None:
    agent = SyntheticAgent(tasks=10)
    trainer = RLTrainer(agent, lambda task, output: {"accuracy": 0.5}, agent)
    outcome = trainer.train(episodes=100)
    assert outcome.converged
    assert len(outcome.history) < 30
    assert any("converged" in note for note in outcome.notes)
    assert any("no parameters were better" in note for note in outcome.notes)


def test_invalid_settings_and_unscored_episodes_are_refused() -> None:
    agent = SyntheticAgent(tasks=10)
    nothing = RLTrainer(agent, lambda task, output: {"accuracy": math.nan}, agent)
    with pytest.raises(ModelError, match="first 3 episodes could not be scored"):
        nothing.train(episodes=9)
    assert [episode["unscored"] for episode in nothing.training_history] == [7, 7, 7]
    with pytest.raises(ConfigError, match="above 0"):
        RLTrainer(agent, agent.right, agent).train(learning_rate=0)
    with pytest.raises(ConfigError, match="at least two tasks"):
        RLTrainer(agent, agent.right, ["one"])
    with pytest.raises(ConfigError, match="eval_fraction"):
        RLTrainer(agent, agent.right, agent, eval_fraction=1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        RLTrainer(agent, agent.right, agent).train(episodes=0)
    with pytest.raises(ParameterError, match="between"):
        RLTrainer(agent, agent.right, agent, ranges={"temperature": (0, 5)})
    with pytest.raises(ParameterError, match="between"):
        RLTrainer(agent, agent.right, agent, initial={"temperature": 7})
    with pytest.raises(ConfigError, match="must be one of ackley"):
        SyntheticAgent("himmelblau")


def test_ranges_are_respected_and_fixed_parameters_do_not_change() -> None:
    observed: list[dict[str, Any]] = []

    class Watched(SyntheticAgent):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            observed.append(dict(parameters))
            super().set_parameters(parameters)

    agent = Watched(tasks=10)
    RLTrainer(agent, agent.right, agent, ranges={"temperature": (0.3, 0.9)}, initial={"max_steps": 3}).train(episodes=8)
    assert all(0.3 <= parameters["temperature"] <= 0.9 and parameters["max_steps"] == 3 for parameters in observed)
    assert len({parameters["temperature"] for parameters in observed}) > 3


class Unreliable(SyntheticAgent):
    """Raises for one task in four."""

    raises: type[Exception] = ConnectionError

    def execute(self, task: Any) -> bool:
        if int(str(task).split()[-1]) % 4 == 0:
            raise self.raises("down")
        return super().execute(task)


def first_episode(agent: SyntheticAgent, evaluator: Any = SyntheticAgent.right) -> dict[str, Any]:
    trainer = RLTrainer(agent, evaluator, agent, eval_fraction=0)
    trainer.train(episodes=4)
    assert len(trainer.training_history) == 4
    return trainer.training_history[0]


class UnknownHost(socket.gaierror): ...


class NoRoute(OSError):
    def __init__(self, text: str) -> None:
        super().__init__(errno.EHOSTUNREACH, text)


class Wrapped(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.__cause__ = ConnectionError(text)


class Grouped(ExceptionGroup[Exception]):
    def __new__(cls, text: str) -> "Grouped":
        return super().__new__(cls, text, [ConnectionError(text)])


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError, TimeoutError, httpx.ConnectError, dspy.utils.exceptions.LMServerError, ModelError,
        UnknownHost, NoRoute, http.client.IncompleteRead, http.client.BadStatusLine, ssl.SSLError, Wrapped, Grouped,
    ],
)  # fmt: skip
def test_an_unreachable_server_is_unscored_and_not_a_wrong_answer(error: type[Exception]) -> None:
    episode = first_episode(unreliable(error))
    assert episode["metrics"]["accuracy"] == pytest.approx(np.mean(right_answers()))
    assert episode["unscored"] == 10
    assert str(error("down")) in episode["why"]


def test_the_agents_own_exception_scores_zero() -> None:
    episode = first_episode(unreliable(ZeroDivisionError))
    assert episode["metrics"]["accuracy"] == pytest.approx(sum(right_answers()) / 40)
    assert episode["unscored"] == 0


def unreliable(error: type[Exception]) -> SyntheticAgent:
    agent = Unreliable(tasks=40)
    agent.raises = error
    return agent


def right_answers() -> list[bool]:
    """Of the tasks for which `Unreliable` does not raise."""
    sound = SyntheticAgent(tasks=40)
    return [sound.execute(f"task {number}") for number in range(40) if number % 4]


@pytest.mark.parametrize("value", [1.0000001, -0.1, float("inf"), "1", KeyError("expected")])
def test_an_evaluator_without_a_valid_value_leaves_one_run_unscored_and_training_continues(value: Any) -> None:
    def evaluator(task: Any, output: Any) -> dict[str, float]:
        if task == "task 3" and isinstance(value, Exception):
            raise value
        return {"accuracy": value if task == "task 3" else float(output)}

    episode = first_episode(SyntheticAgent(tasks=10), evaluator)
    assert episode["unscored"] == 1
    why = "the evaluator: KeyError" if isinstance(value, Exception) else "must be numbers between 0 and 1"
    assert why in episode["why"]


def test_an_evaluator_may_give_any_kind_of_number_but_not_only_malformed_ones() -> None:
    plain = first_episode(SyntheticAgent(tasks=10))["metrics"]
    for kind in (np.float32, np.float64, np.int64, np.bool_, bool):
        episode = first_episode(
            SyntheticAgent(tasks=10), lambda task, output, kind=kind: {"accuracy": kind(bool(output))}
        )
        assert episode["metrics"] == plain, kind
    agent = SyntheticAgent(tasks=10)
    for metrics in ({"accuracy": 2.0}, {"accuracy": "1"}, 0.5, None):
        with pytest.raises(ConfigError, match="metrics"):
            RLTrainer(agent, lambda task, output, metrics=metrics: metrics, agent).train(episodes=2)


def test_an_agent_that_cannot_take_parameters_is_refused_by_name() -> None:
    class Half(BaseAgent):
        def execute(self, task: Any) -> bool:
            return True

    class Duck:
        def set_parameters(self, parameters: Mapping[str, Any]) -> None: ...

    with pytest.raises(ProgramError, match="no set_parameters of its own"):
        RLTrainer(Half(), SyntheticAgent.right, ["a", "b"])
    with pytest.raises(ProgramError, match="Duck has no execute"):
        RLTrainer(Duck(), SyntheticAgent.right, ["a", "b"])  # type: ignore[arg-type]


def test_spellings_of_a_held_out_task_are_held_out() -> None:
    agent = SyntheticAgent(tasks=10)
    tasks = [
        Task(id=f"{at}{name}", inputs={"question": text.format(at)})
        for at in range(20)
        for name, text in (("a", "What is task {}?"), ("b", "WHAT is  task {}?"), ("c", "what is task {}? "))
    ]
    trainer = RLTrainer(agent, agent.right, tasks)
    assert {task.key for task in trainer.held_out}.isdisjoint(task.key for task in trainer.tasks)
    assert len(trainer.held_out) + len(trainer.tasks) == 60


DEFAULTS = AgentParameters().model_dump()


class Stepping:
    """An agent that is right with a probability that depends on `max_steps`, or on nothing."""

    def __init__(self, acts: bool, draw: Callable[[Any, Mapping[str, Any]], str]) -> None:
        self.acts, self.draw, self.parameters = acts, draw, dict[str, Any]()

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = dict(parameters)

    def execute(self, task: Any) -> bool:
        low, high = RANGES["max_steps"]
        share = (self.parameters["max_steps"] - low) / (high - low) if self.acts else 0.5
        drawn = random.Random(hashlib.sha256(self.draw(task, self.parameters).encode()).hexdigest()).random()
        return drawn < 0.3 + 0.6 * share


def moves(acts: bool, draw: Callable[[Any, Mapping[str, Any]], str]) -> list[dict[str, float]]:
    """How far each parameter was moved, as a share of its range, for six seeds."""
    found = []
    for seed in range(6):
        agent, tasks = Stepping(acts, draw), [f"task {at}" for at in range(60)]
        trainer = RLTrainer(agent, lambda task, right: {"accuracy": float(right)}, tasks, seed=seed)
        trainer.train(episodes=10)
        best = trainer.get_best_parameters()
        found.append({name: abs(best[name] - DEFAULTS[name]) / (high - low) for name, (low, high) in RANGES.items()})
    return found


def of_the_task(task: Any, parameters: Mapping[str, Any]) -> str:
    return str(task)


def of_each_setting(task: Any, parameters: Mapping[str, Any]) -> str:
    return f"{task}{json.dumps(parameters, sort_keys=True)}"


@pytest.mark.slow
@pytest.mark.parametrize("draw", [of_the_task, of_each_setting])
def test_parameters_without_an_effect_keep_their_initial_value(draw: Any) -> None:
    found = moves(True, draw)
    assert sum(move > 0 for moved in found for name, move in moved.items() if name != "max_steps") <= 2  # of 24
    assert all(moved["max_steps"] > 0.25 for moved in found)
