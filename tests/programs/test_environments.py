"""An agent in an environment: episodes, rewards by call, refused actions, and environments that misbehave."""

import math
from typing import Any

import dspy
import pytest
from corridor import DOOR, Corridor, evaluated, playing

from assay.datasets import Task
from assay.errors import ConfigError, ProgramError
from assay.programs import (
    Environment,
    EnvironmentAgent,
    EnvironmentStep,
    environment_seed,
)
from assay.rubrics import NoGrade
from assay.rubrics.environments import episode_ended, step_reward
from assay.testing import scripted_lm
from assay.testing.contracts import EnvironmentContract
from assay.traces import Rollout, Store, Transition


class Listed(Corridor):
    def _seen(self, reward: float) -> EnvironmentStep:
        step = super()._seen(reward)
        return EnvironmentStep(**{**vars(step), "actions": () if step.done else ("right", "left")})


class TestCorridor(EnvironmentContract):
    def make(self) -> Environment:
        return Listed()

    def tasks(self) -> list[Task]:
        return [Task(id=str(length), inputs={"length": length}) for length in (1, 3)]

    def action(self, step: EnvironmentStep, at: int) -> str:
        return "right"


def test_an_episode_is_played_to_its_end() -> None:
    agent, lm, prompts = playing(["right", "right", "never asked"])
    with dspy.context(lm=lm):
        result = agent(length=2)
    assert (result.outcome, result.reward, result.done) == ("The door.", 1.25, True)
    assert [step["action"] for step in result.steps] == ["right", "right"]
    assert [step["info"] for step in result.steps] == [{"at": 1}, {"at": 2}]
    assert "Field 0 of 2." in prompts[0]
    assert "Field 1 of 2." in prompts[1]
    assert prompts[1].count("Field 1 of 2.") == 1


def test_the_info_is_not_in_the_prompt() -> None:
    class Secret(Corridor):
        def _seen(self, reward: float) -> EnvironmentStep:
            return EnvironmentStep(**{**vars(super()._seen(reward)), "info": {"answer": "xyzzy"}})

    agent, lm, prompts = playing(["right", "right"], Secret)
    with dspy.context(lm=lm):
        assert agent(length=2).steps[0]["info"] == {"answer": "xyzzy"}
    assert "xyzzy" not in "".join(prompts)


def test_the_history_has_earlier_steps_and_can_be_left_out() -> None:
    agent, lm, prompts = playing(["left", "right", "right"])
    with dspy.context(lm=lm):
        agent(length=2)
    assert "left: Field 0 of 2." in prompts[2]
    agent, lm, prompts = playing(["left", "right", "right"], history=False)
    with dspy.context(lm=lm):
        agent(length=2)
    assert "left" not in prompts[2]
    assert "history" not in prompts[2]


def test_a_refused_action_is_told_to_the_agent_and_costs_a_step() -> None:
    agent, lm, prompts = playing(["fly", "right", "right"])
    with dspy.context(lm=lm):
        result = agent(length=2)
    assert result.steps[0]["error"] == "'fly' is no direction"
    assert result.steps[0]["reward"] == 0
    assert "'fly' is no direction" in prompts[1]
    assert result.done
    agent.set_parameters({"max_steps": 2})
    agent, lm, _ = playing(["fly", "right", "right"])
    agent.set_parameters({"max_steps": 2})
    with dspy.context(lm=lm):
        assert not agent(length=2).done


def test_an_answer_that_cannot_be_parsed_costs_a_step() -> None:
    turns = iter(["nonsense", '{"action": "right"}'])
    agent = EnvironmentAgent(Corridor, "Walk.")
    with dspy.context(lm=scripted_lm(lambda request: next(turns, "nonsense"))):
        result = agent(length=1)
    assert result.steps[0]["action"] is None
    assert result.steps[0]["error"] == "the action could not be read"
    assert result.done


def test_the_actions_that_a_step_lists_are_the_only_ones() -> None:
    agent, lm, _prompts = playing(["fly", "right"], Listed)
    with dspy.context(lm=lm):
        result = agent(length=1)
    assert result.steps[0]["error"] is not None or result.steps[0]["action"] in ("right", "left")


def test_an_action_without_alternative_needs_no_call() -> None:
    class OneWay(Corridor):
        def _seen(self, reward: float) -> EnvironmentStep:
            step = super()._seen(reward)
            return EnvironmentStep(**{**vars(step), "actions": () if step.done else ("right",)})

    agent, lm, prompts = playing([], OneWay)
    with dspy.context(lm=lm):
        assert agent(length=3).done
    assert prompts == []


def test_an_episode_that_never_ends_is_stopped_by_max_steps() -> None:
    agent, lm, prompts = playing(["left"] * 100)
    agent.set_parameters({"max_steps": 4})
    with dspy.context(lm=lm):
        result = agent(length=2)
    assert not result.done
    assert len(result.steps) == len(prompts) == 4
    grade = episode_ended(Task(id="1", inputs={}), dict(result.items()), None)
    assert grade.value == 0
    assert "4 actions" in grade.reason


def test_a_refused_action_that_is_repeated_ends_the_run() -> None:
    agent, lm, _prompts = playing(["fly"] * 100)
    agent.set_parameters({"max_steps": 50})
    with dspy.context(lm=lm):
        result = agent(length=2)
    assert len(result.steps) == 3
    assert not result.done


def test_rewards_are_recorded_by_call_and_exported(tmp_path: Any) -> None:
    evaluated(Corridor, DOOR, tmp_path)
    with Store(tmp_path / "a.db") as store:
        three = store.rollout(next(found.id for found in store.rollouts() if found.inputs["length"] == 3))
    rewards = [transition.step_rewards for transition in three.transitions]
    # 0.25, 0.25 and 1 times the weight 0.4 are 0.1 + 0.1 + 0.4 = 0.6, scaled to the cap 0.5
    assert [entry["by_step"] for entry in rewards] == pytest.approx([0.1 / 1.2, 0.1 / 1.2, 0.4 / 1.2])
    assert [tool.arguments for transition in three.transitions for tool in transition.tools] == [
        {"action": "right"}
    ] * 3
    assert three.transitions[0].tools[0].result == "Field 1 of 3."


def test_steps_of_other_calls_are_not_rewarded() -> None:
    rollout = Rollout(prediction={"steps": [{"reward": -2.0, "call": 1}, {"reward": 0.5, "call": 3}]})
    task = Task(id="1", inputs={})

    def grade(t: int, **options: Any) -> Any:
        transition = Transition(t=t, model="m", request={})
        return step_reward(task, {"transition": transition}, rollout, **options).value

    assert grade(3) == 0.5
    assert grade(3, scale=2.0) == 0.25
    assert grade(1) == 0
    assert grade(1, losses=True, scale=4.0) == 0.5
    with pytest.raises(NoGrade):
        grade(0)


def test_seeds_come_from_the_task() -> None:
    one = Task(id="1", inputs={"seed": 5, "a": 1})
    assert environment_seed(one) == 5
    unseeded = [Task(id="x", inputs={"a": value}) for value in (1, 1, 2)]
    seeds = [environment_seed(task) for task in unseeded]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_steps_and_agents_refuse_wrong_values() -> None:
    for wrong in ({"observation": 3}, {"reward": math.inf}, {"reward": True}, {"done": 1}, {"actions": ("",)}):
        with pytest.raises(ConfigError):
            EnvironmentStep(**{"observation": "", **wrong})
    with pytest.raises(ProgramError, match="makes an environment"):
        EnvironmentAgent(Corridor(), "Walk.")
    with pytest.raises(ProgramError, match="instructions"):
        EnvironmentAgent(Corridor, " ")
    with pytest.raises(ConfigError, match="timeout_s"):
        EnvironmentAgent(Corridor, "Walk.", timeout_s=0)
    with pytest.raises(AttributeError):
        EnvironmentStep(observation="").reward = 1.0  # type: ignore[misc]
