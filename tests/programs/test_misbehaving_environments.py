"""Environments that raise, hang or give wrong values: a run ends with what they did."""

import math
import threading
import time
from typing import Any

import dspy
import pytest
from corridor import DOOR, Corridor, evaluated, playing

from assay.datasets import Task
from assay.errors import AssayError, EnvironmentFailed, FailureKind
from assay.models.limits import OverTime, limited, within_limit
from assay.programs import (
    EnvironmentStep,
)
from assay.testing import scripted_lm
from assay.traces import Store


class Raises(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        raise RuntimeError("out of order")


class Hangs(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        while True:
            time.sleep(0.01)


class NotANumber(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        return EnvironmentStep(observation="", reward=math.nan)


class Bare(Corridor):
    def step(self, action: str) -> Any:
        return "Field 1", 0.0, False


class Leaves(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        raise SystemExit(3)


class Interrupts(Corridor):
    def reset(self, task: Task) -> EnvironmentStep:
        raise KeyboardInterrupt


class Finished(Corridor):
    def reset(self, task: Task) -> EnvironmentStep:
        return EnvironmentStep(observation="Over.", done=True)


class Unbuilt(Corridor):
    def __init__(self) -> None:
        raise OSError("no display")


MISBEHAVING = [
    (Raises, "the environment Raises raised RuntimeError: out of order in step('right')"),
    (Hangs, "the environment Hangs gave no result of step('right') after 0.3 s"),
    (NotANumber, "reward=nan must be a finite number"),
    (Bare, "which is no EnvironmentStep"),
    (Leaves, "raised SystemExit"),
    (Interrupts, "raised KeyboardInterrupt"),
    (Finished, "returned done=True from reset(task)"),
    (Unbuilt, "the environment Unbuilt raised OSError: no display in its constructor"),
    (dict, "the environment dict is a dict: it needs reset(task), step(action) and close()"),
]


@pytest.mark.parametrize(("environment", "message"), MISBEHAVING, ids=lambda value: getattr(value, "__name__", ""))
def test_an_environment_that_misbehaves_ends_the_run_with_what_it_did(environment: Any, message: str) -> None:
    agent, lm, _ = playing(["right"], environment, timeout_s=0.3)
    started = time.monotonic()
    with dspy.context(lm=lm), pytest.raises(EnvironmentFailed) as raised:
        agent(length=2)
    assert message in str(raised.value)
    assert time.monotonic() - started < 5


def test_a_hanging_environment_leaves_no_thread_behind() -> None:
    agent, lm, _ = playing(["right"], Hangs, timeout_s=0.2)
    with dspy.context(lm=lm), pytest.raises(EnvironmentFailed):
        agent(length=2)
    agent, lm, _ = playing(["right", "right"])
    with dspy.context(lm=lm):
        agent(length=2)
    until = time.monotonic() + 5
    while any(thread.name == "assay-environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread of an environment is still alive"
        time.sleep(0.02)


def test_an_environment_is_closed_also_after_a_failure_of_the_agent() -> None:
    closed: list[str] = []

    class Closing(Corridor):
        def close(self) -> None:
            closed.append(threading.current_thread().name)

    agent, _, _ = playing([], Closing)

    def fail(request: Any) -> str:
        raise ValueError("broken")

    with dspy.context(lm=scripted_lm(fail)), pytest.raises(Exception, match="broken"):
        agent(length=2)
    assert closed == ["assay-environment"]


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
        found = {rollout.inputs["length"]: rollout for rollout in store.rollouts()}
    assert [found[length].failure for length in (1, 2, 3)] == [None, FailureKind.ENVIRONMENT, FailureKind.ENVIRONMENT]
    assert [found[length].score for length in (2, 3)] == [None, None]
    assert "gave no result of step('right') after 0.3 s" in str(found[2].error)


def test_an_environment_that_always_fails_is_found_before_a_job(tmp_path: Any) -> None:
    with pytest.raises(AssayError, match="the environment Raises raised RuntimeError: out of order"):
        evaluated(Raises, DOOR, tmp_path, preflight=True)
    evaluation = evaluated(Raises, DOOR, tmp_path).evaluation
    assert evaluation.unscored == 3
    assert "the environment Raises" in str(evaluation.why_unscored)


def test_the_limit_of_tools_bounds_an_environment() -> None:
    agent, lm, _ = playing(["right"], Hangs, timeout_s=600)
    with dspy.context(lm=lm), limited(2.0), pytest.raises(EnvironmentFailed, match=r"after 0\.5 s"):
        agent(length=2)


def test_a_run_that_is_stopped_stops_its_environment() -> None:
    agent, lm, _ = playing(["right"], Hangs, timeout_s=60)
    with dspy.context(lm=lm), limited(1.0, tools_of=400), pytest.raises(OverTime):
        within_limit(lambda: agent(length=2), "the run")
    until = time.monotonic() + 5
    while any(thread.name == "assay-environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "the environment's thread is still alive"
        time.sleep(0.02)
