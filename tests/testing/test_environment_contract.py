"""The contract of environments: a sound one meets it, and it fails on those that are broken in a known way."""

import dataclasses
from typing import ClassVar

import pytest

from assay.datasets import Task
from assay.programs import Environment, EnvironmentStep, InvalidAction
from assay.testing.contracts import EnvironmentContract


class Counter(Environment):
    """Counts to three; `one` adds one."""

    def reset(self, task: Task) -> EnvironmentStep:
        self.count = 0
        return self.seen()

    def step(self, action: str) -> EnvironmentStep:
        if self.count >= 3:
            raise InvalidAction("it has ended")
        if action != "one":
            raise InvalidAction("write one")
        self.count += 1
        return self.seen()

    def seen(self) -> EnvironmentStep:
        done = self.count >= 3
        return EnvironmentStep(observation=str(self.count), done=done, actions=() if done else ("one",))


class Remembers(Counter):
    """The second episode begins at one."""

    count = 0

    def reset(self, task: Task) -> EnvironmentStep:
        self.count = min(self.count, 1)
        return self.seen()


class SharedCount(Counter):
    counts: ClassVar[list[int]] = [0]

    def reset(self, task: Task) -> EnvironmentStep:
        self.counts[0] = 0
        return super().reset(task)

    def step(self, action: str) -> EnvironmentStep:
        step = super().step(action)
        self.counts[0] += 1
        return dataclasses.replace(step, observation=str(self.counts[0]))


class Endless(Counter):
    def seen(self) -> EnvironmentStep:
        self.count = min(self.count, 1)
        return EnvironmentStep(observation="", actions=("one",))


class Crashes(Counter):
    def step(self, action: str) -> EnvironmentStep:
        return super().step({"one": "one"}[action])


class Slips(Counter):
    def step(self, action: str) -> EnvironmentStep:
        if action != "one":
            self.count += 1
        return super().step(action)


class Pays(Counter):
    def step(self, action: str) -> EnvironmentStep:
        return super().step(action) if self.count < 3 else EnvironmentStep(observation="", reward=1.0, done=True)


class Changes(Counter):
    def reset(self, task: Task) -> EnvironmentStep:
        task.inputs["seed"] = 5  # type: ignore[index]
        return super().reset(task)


class Opaque(Counter):
    def seen(self) -> EnvironmentStep:
        return dataclasses.replace(super().seen(), info={"self": object})


class Unclosable(Counter):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed before")
        self.closed = True


class _Environments(EnvironmentContract):
    kind: type[Environment] = Counter

    def make(self) -> Environment:
        return self.kind()

    def tasks(self) -> list[Task]:
        return [Task(id="1", inputs={"seed": 1})]


class TestCounter(_Environments):
    pass


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Remembers, {"test_a_task_is_the_same_for_every_rollout"}),
        (SharedCount, {"test_objects_share_no_state"}),
        (Endless, {"test_episodes_end"}),
        (Crashes, {"test_hostile_actions_are_refused_or_taken"}),
        (Slips, {"test_hostile_actions_are_refused_or_taken"}),
        (Pays, {"test_nothing_is_gained_after_the_end"}),
        (Changes, {"test_a_task_is_not_changed"}),
        (Opaque, {"test_steps_have_the_right_type"}),
        (Unclosable, {"test_it_can_be_closed_at_any_time"}),
    ],
)
def test_a_broken_environment_fails(kind: type[Environment], fails: set[str]) -> None:
    contract = type("Broken", (_Environments,), {"kind": kind})
    assert fails <= contract.failures().keys()
