"""Environments that hang, and runs that are stopped in one."""

import threading
import time

import dspy
import pytest
from corridors import Hangs, playing

from assay.datasets import Task
from assay.errors import EnvironmentFailed
from assay.models.limits import OverTime, limited, within_limit
from assay.programs.environments.base import Play


def assert_no_thread_is_left() -> None:
    until = time.monotonic() + 120
    while any(thread.name == "assay-environment" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread of an environment is still alive"
        time.sleep(0.02)


def test_the_limit_of_tools_bounds_an_environment() -> None:
    agent, lm, _ = playing(["right"], Hangs, timeout_s=600)
    with dspy.context(lm=lm), limited(2.0), pytest.raises(EnvironmentFailed, match=r"after 0\.5 s"):
        agent(length=2)


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
