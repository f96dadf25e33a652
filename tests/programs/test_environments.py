"""An agent in an environment: episodes, rewards by call, refused values, and environments that misbehave."""

import json
import math
import threading
import time
from typing import Any

import dspy
import numpy as np
import pytest
from corridors import Corridor, Hangs, playing

import assay
from assay.datasets import Task
from assay.errors import AssayError, ConfigError, EnvironmentFailed, FailureKind, ProgramError
from assay.models.limits import OverTime, limited, within_limit
from assay.programs import EnvironmentAgent, EnvironmentStep, environment_seed
from assay.programs.environments import Play
from assay.rubrics import Criterion, Rubric
from assay.rubrics.environments import episode_ended, episode_reward, step_reward, valid_actions
from assay.testing import scripted_lm
from assay.traces import Store


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


# Environments that misbehave


class Raises(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        raise RuntimeError("out of order")


def corridor(name: str, **methods: Any) -> type[Corridor]:
    """An environment with other methods: what each returns, or the exception that it raises."""

    def doing(result: Any) -> Any:
        def method(self: Any, *arguments: Any) -> Any:
            if isinstance(result, BaseException):
                raise result
            return result

        return method

    return type(name, (Corridor,), {method: doing(result) for method, result in methods.items()})


MISBEHAVING = [
    (Raises, "the environment Raises raised RuntimeError: out of order in step('right')"),
    (Hangs, "the environment Hangs gave no result of step('right') after 0.3 s"),
    (corridor("Enormous", step=EnvironmentStep(observation="", reward=1.7e308)),
     "the environment Enormous gave rewards that add up to inf"),
    (corridor("Bare", step=("Field 1", 0.0, False)), "which is not an EnvironmentStep"),
    (corridor("Leaves", step=SystemExit(3)), "raised SystemExit"),
    (corridor("Interrupts", reset=KeyboardInterrupt()), "raised KeyboardInterrupt"),
    (corridor("Finished", reset=EnvironmentStep(observation="", done=True)), "returned done=True from reset(task)"),
    (corridor("Unbuilt", __init__=OSError("no display")),
     "the environment Unbuilt raised OSError: no display in its constructor"),
    (dict, "the environment dict is a dict: it needs reset(task), step(action) and close()"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "message"), MISBEHAVING, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.timeout(120)
def test_an_environment_that_misbehaves_ends_the_run_with_what_it_did(environment: Any, message: str) -> None:
    agent, lm, _ = playing(["right", "right"], environment, timeout_s=0.3)
    with dspy.context(lm=lm), pytest.raises(EnvironmentFailed) as raised:
        agent(length=2)
    assert message in str(raised.value)


def evaluated(environment: Any, rubric: Rubric, tmp_path: Any, actions: str = "right", **options: Any) -> Any:
    lm = scripted_lm(lambda request: json.dumps({"action": actions}))
    return assay.evaluate(
        EnvironmentAgent(environment, "Walk right to the door.", inputs=["length"], timeout_s=0.3),
        rubric=rubric, data=[{"length": length, "split": "test"} for length in (1, 2, 3)], split="test", lm=lm,
        store=tmp_path / "a.db", threads=2, **{"preflight": False, **options},
    )  # fmt: skip


DOOR = Rubric(
    "door",
    [
        Criterion(name="reward", check=episode_reward, arguments={"high": 1.0}),
        Criterion(name="ended", check=episode_ended),
        Criterion(name="valid", check=valid_actions),
        Criterion(name="by_step", check=step_reward, scope="step", weight=0.4),
    ],
)


class Fragile(Corridor):
    """Works in short corridors; in longer ones it hangs, or raises."""

    def step(self, action: str) -> EnvironmentStep:
        if self.length == 3:
            raise RuntimeError("out of order")
        while self.length == 2:
            time.sleep(0.01)
        return super().step(action)


def test_failures_of_an_environment_are_counted_and_unscored(tmp_path: Any) -> None:
    evaluation = evaluated(Fragile, DOOR, tmp_path, task_timeout=2.0).evaluation
    lengths = {run.task_id: run for run in evaluation.runs.values()}
    assert len(lengths) == 3
    assert evaluation.unscored == 2
    assert [score for score in evaluation.scores.values() if not math.isnan(score)] == [1.0]
    with Store(tmp_path / "a.db") as store:
        rollouts = {rollout.inputs["length"]: rollout for rollout in store.rollouts()}
    assert [rollouts[length].failure for length in (1, 2, 3)] == [None, *[FailureKind.ENVIRONMENT] * 2]
    assert [rollouts[length].score for length in (2, 3)] == [None, None]
    assert "gave no result of step('right') after 0.3 s" in str(rollouts[2].error)


def test_an_environment_that_always_fails_is_found_before_a_job(tmp_path: Any) -> None:
    with pytest.raises(AssayError, match="the environment Raises raised RuntimeError: out of order") as raised:
        evaluated(Raises, DOOR, tmp_path, preflight=True)
    text = str(raised.value)
    assert "test_environments.py" in text
    assert "Correct the environment" in text
    assert "play.py" not in text  # the traceback is that of the environment
    evaluation = evaluated(Raises, DOOR, tmp_path).evaluation
    assert evaluation.unscored == 3
    assert "the environment Raises" in str(evaluation.why_unscored)


def assert_no_thread_is_left() -> None:
    until = time.monotonic() + 120
    while any(thread.name == "assay-environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread of an environment is still alive"
        time.sleep(0.02)


def test_a_run_that_is_stopped_stops_its_environment() -> None:
    agent, lm, _ = playing(["right"], Hangs, timeout_s=60)
    with dspy.context(lm=lm), limited(1.0, tools_of=400), pytest.raises(OverTime):
        within_limit(lambda: agent(length=2), "the run")
    assert_no_thread_is_left()


def test_after_a_timeout_the_next_step_is_refused_at_once() -> None:
    with Play(Hangs, timeout_s=0.5) as play:
        play.reset(Task(id="1", inputs={"length": 2}))
        with pytest.raises(EnvironmentFailed, match=r"no result of step\('right'\) after 0\.5 s"):
            play.step("right")
        with pytest.raises(EnvironmentFailed, match=r"was given up.* step\('right'\) was not called"):
            play.step("right")


def test_seeds_come_from_the_task() -> None:
    one = Task(id="1", inputs={"seed": 5, "a": 1})
    assert environment_seed(one) == 5
    unseeded = [Task(id="x", inputs={"a": value}) for value in (1, 1, 2)]
    seeds = [environment_seed(task) for task in unseeded]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_steps_and_agents_refuse_wrong_values() -> None:
    for wrong in (
        {"observation": 3},
        {"observation": "x" * 100_001},
        {"reward": math.nan},
        {"reward": math.inf},
        {"reward": True},
        {"reward": "1"},
        {"reward": 10**400},
        {"reward": np.float32("nan")},
        {"done": 1},
        {"actions": ("",)},
        {"actions": "left"},
        {"actions": tuple(f"action {at}" for at in range(10_000))},
        {"info": None},
        {"info": ["door"]},
    ):
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
