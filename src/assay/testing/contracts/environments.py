"""Contract of an environment that agents act in."""

import copy
import json
from collections.abc import Sequence

from assay.datasets import Task
from assay.programs import Environment, EnvironmentStep, InvalidAction
from assay.testing.contracts.base import HOSTILE_TEXTS, Contract, require

__all__ = ["EnvironmentContract"]


class EnvironmentContract(Contract):
    """Checks an environment (`assay.programs.Environment`).

    - `reset` returns a step that is not done; every result is an `EnvironmentStep`, with `info` as JSON.
    - A task is the same for every rollout: with the same actions, new objects return the same steps, and so does an
      object after a second `reset`. (An environment that cannot do so sets `repeatable = False`.)
    - Objects share no state: an episode is the same while another one is played.
    - An episode of the actions of `action` ends within `most_steps`.
    - Hostile actions return a step or raise `InvalidAction`, and nothing else. A refused action changes nothing.
    - An action after the end raises `InvalidAction`, or returns a step that is done and has no reward.
    - The task is not changed, and `close` can be called at any time, also twice.
    """

    repeatable = True
    most_steps = 50

    def make(self) -> Environment:
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def tasks(self) -> Sequence[Task]:
        """A few tasks, at least one."""
        raise NotImplementedError(f"{type(self).__name__} must override tasks()")

    def action(self, step: EnvironmentStep, at: int) -> str:
        """A possible action after a step, number `at` of the episode. By default one of those that the step lists."""
        if not step.actions:
            raise NotImplementedError(f"{type(self).__name__} must override action(): the steps list no actions")
        return step.actions[at % len(step.actions)]

    def test_steps_have_the_right_type(self) -> None:
        for task in self.tasks():
            with self.context():
                for step in self._episode(self.make(), task):
                    require(isinstance(step, EnvironmentStep), f"{step!r:.120} is not an EnvironmentStep")
                    try:
                        json.dumps(dict(step.info), allow_nan=False)
                    except (TypeError, ValueError) as error:
                        raise AssertionError(f"info={step.info!r:.120} is not JSON: {error}") from error

    def test_a_task_is_the_same_for_every_rollout(self) -> None:
        if not self.repeatable:
            return
        for task in self.tasks():
            with self.context():
                first = self.make()
                before = self._episode(first, task)
                require(self._episode(self.make(), task) == before, f"a new object plays {task.inputs} differently")
                require(self._episode(first, task) == before, f"a second reset plays {task.inputs} differently")

    def test_objects_share_no_state(self) -> None:
        if not self.repeatable:
            return
        task = self.tasks()[0]
        with self.context():
            alone = self._episode(self.make(), task)
            first, second = self.make(), self.make()
            steps, others = [first.reset(task)], [second.reset(task)]
            while not steps[-1].done and len(steps) < len(alone):
                steps.append(first.step(self.action(steps[-1], len(steps) - 1)))
                if not others[-1].done:
                    others.append(second.step(self.action(others[-1], len(others) - 1)))
        require(steps == alone, "an episode is different while another object plays")

    def test_episodes_end(self) -> None:
        for task in self.tasks():
            with self.context():
                steps = self._episode(self.make(), task)
            require(not steps[0].done, "reset returns a step that is done")
            require(steps[-1].done, f"the episode of {task.inputs} has not ended after {self.most_steps} actions")

    def test_hostile_actions_are_refused_or_taken(self) -> None:
        task = self.tasks()[0]
        for text in HOSTILE_TEXTS:
            with self.context():
                environment = self.make()
                first = environment.reset(task)
                try:
                    require(
                        isinstance(environment.step(text), EnvironmentStep),
                        f"{text[:40]!r} returns no EnvironmentStep",
                    )
                    continue
                except InvalidAction:
                    pass
                except AssertionError:
                    raise
                except Exception as error:
                    raise AssertionError(f"the action {text[:40]!r} raises {type(error).__name__}: {error}") from error
                if self.repeatable:
                    after = [first, *self._continued(environment, first)]
                    require(
                        after == self._episode(self.make(), task),
                        f"the refused action {text[:40]!r} changed the environment",
                    )

    def test_nothing_is_gained_after_the_end(self) -> None:
        task = self.tasks()[0]
        with self.context():
            environment = self.make()
            steps = self._episode(environment, task)
            last = steps[-2] if len(steps) > 1 else steps[-1]
            try:
                after = environment.step(self.action(last, 0))
            except InvalidAction:
                return
            require(after.done and after.reward == 0, f"an action after the end returns {after!r:.120}")

    def test_a_task_is_not_changed(self) -> None:
        for task in self.tasks():
            before = copy.deepcopy(dict(task.inputs))
            with self.context():
                self._episode(self.make(), task)
            require(dict(task.inputs) == before, f"the episode changed the task {before!r} to {dict(task.inputs)!r}")

    def test_it_can_be_closed_at_any_time(self) -> None:
        with self.context():
            self.make().close()
            environment = self.make()
            environment.reset(self.tasks()[0])
            environment.close()
            environment.close()

    def _episode(self, environment: Environment, task: Task) -> list[EnvironmentStep]:
        first = environment.reset(task)
        return [first, *self._continued(environment, first)]

    def _continued(self, environment: Environment, first: EnvironmentStep) -> list[EnvironmentStep]:
        steps = [first]
        while not steps[-1].done and len(steps) <= self.most_steps:
            steps.append(environment.step(self.action(steps[-1], len(steps) - 1)))
        return steps[1:]
