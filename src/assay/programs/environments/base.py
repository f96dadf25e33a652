"""The interface of an environment, and what it returns. Does not run environments: `assay.programs.environments.base`
does, under limits."""

import contextvars
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from assay.datasets import Task
from assay.errors import ConfigError, EnvironmentFailed
from assay.models.calls import stop_in
from assay.models.limits import StoppableThread, current_tool_limit, limited
from assay.support.scrubbing import error_text
from assay.support.values import unicode_text
from assay.traces.listening import run_tool

_LONGEST = 100_000  # characters of an observation, or of all actions together: they are part of every prompt


class InvalidAction(ValueError):
    """Raised by `Environment.step` for an action that is not possible. The state must not have changed.

    The agent reads the message and tries again. Any other exception is a failure of the environment: the run ends
    unscored.
    """


@dataclass(frozen=True, kw_only=True)
class EnvironmentStep:
    """What an environment returns after `reset` and after each action.

    Attributes:
        observation: as the agent reads it, at most 100,000 characters. What is not valid Unicode is replaced.
        reward: of the action, any finite number, higher is better.
        done: whether the episode has ended.
        actions: what the agent may do next; it can write nothing else. Empty: any text. At most 100,000 characters
            together.
        info: values for rubrics, such as the true state. JSON values; the agent never sees them.
    Raises:
        ConfigError: a value of another type, a reward that is not finite, or a longer observation.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    actions: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.observation, str):
            raise ConfigError(f"observation={self.observation!r} must be text")
        if len(self.observation) > _LONGEST:
            raise ConfigError(
                f"observation has {len(self.observation):,} characters; it must have at most {_LONGEST:,}: it is part "
                "of every prompt"
            )
        reward, done = _of_numpy(self.reward), _of_numpy(self.done)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ConfigError(f"reward={reward!r} must be a finite number")
        if not isinstance(done, bool):
            raise ConfigError(f"done={self.done!r} must be True or False")
        if not isinstance(self.info, Mapping):
            raise ConfigError(f"info={str(self.info)[:80]!r} must be a mapping of names to values")
        if isinstance(self.actions, str):
            raise ConfigError(f"actions={self.actions!r} is one text; it must be a tuple of texts")
        actions = tuple(self.actions)
        if wrong := [action for action in actions if not isinstance(action, str) or not action.strip()]:
            raise ConfigError(f"actions must be texts that are not empty, got {wrong[0]!r}")
        if (size := sum(map(len, actions))) > _LONGEST:
            raise ConfigError(
                f"actions has {len(actions):,} actions with {size:,} characters; it must have at most {_LONGEST:,}: "
                "they are part of every prompt. Leave actions empty and describe them in the instructions"
            )
        for name, value in (
            ("observation", unicode_text(self.observation)),
            ("reward", reward),
            ("done", done),
            ("actions", actions),
        ):
            object.__setattr__(self, name, value)


def _of_numpy(value: Any) -> Any:
    """The Python number of a scalar of numpy, infinity for an integer beyond any float; other values as they are."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return math.inf if isinstance(value, int) and abs(value) >= 2**1023 else value


@runtime_checkable
class Environment(Protocol):
    """A place to act in, for one agent and one episode at a time.

    Inherit from it, or implement its three methods. One object plays one rollout: agents make a new one for each, call
    it from one thread only, and call `close` at the end. Objects that share state (a class attribute, a file) must
    protect it themselves, because rollouts run at the same time.

    Everything random is drawn from `environment_seed(task)`, so that a task is the same for every rollout of it.
    """

    def reset(self, task: Task) -> EnvironmentStep:
        """Starts the episode of a task and returns the first observation. Its reward is not counted.

        Args:
            task: its inputs. Expected outputs and metadata are not passed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset(task)")

    def step(self, action: str) -> EnvironmentStep:
        """Executes one action.

        Raises:
            InvalidAction: the action is not possible; nothing has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> None:
        """Releases what the environment holds. By default it does nothing."""


def environment_seed(task: Task) -> int:
    """Seed of a task's episode, in [0, 2**32): its input `seed` if it has one, otherwise made from its inputs."""
    seed = task.inputs.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed % 2**32
    return int(task.key[:8], 16)


# -- One episode of an environment under limits: in a thread of its own, with checked results.
#
# Whatever an environment does wrong (raise, hang, return something else) is an `EnvironmentFailed` with what it did.
# Does not choose actions.


_TICK_S = 0.2  # after so long a stopped run notices that it was stopped
_ACTION_CHARS = 80  # characters of an action in messages


class _Thread:
    """A daemon thread that makes all calls of one environment.

    It is one thread, because what an environment opens (a connection of `sqlite3`, a browser) belongs to it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.abandoned = False
        self._thread = StoppableThread(self._work, "assay-environment")
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def run(self, work: Callable[[], Any], seconds: float) -> "Future[Any] | None":
        """The finished call; None if it took longer than `seconds`, and the thread is then abandoned."""
        context, future = contextvars.copy_context(), Future[Any]()

        def call() -> None:
            try:
                future.set_result(context.run(work))
            except BaseException as error:  # raised again in the waiting thread
                future.set_exception(error)

        self._calls.put(call)
        until = time.monotonic() + seconds
        try:
            while not wait([future], max(0.0, min(_TICK_S, until - time.monotonic()))).done:
                if time.monotonic() >= until:
                    self.abandon()
                    return None
        except BaseException:  # the whole run was stopped
            self.abandon()
            raise
        return future

    def abandon(self) -> None:
        """Stops the thread at the next line of Python that it executes. It makes no calls afterwards."""
        self.abandoned = True
        self._calls.put(None)
        self._thread.stop()

    def end(self) -> None:
        self._calls.put(None)


class Play:
    """One episode. A context manager, which closes the environment.

    Args:
        make: makes the environment, in the thread that uses it.
        timeout_s: of each call of it, in seconds; a run's time limit for tools is also a limit.
    """

    name = "environment"  # of its tool calls in traces

    def __init__(self, make: Callable[[], Environment], timeout_s: float) -> None:
        tool_limit = current_tool_limit()
        self._make, self._limit_s = make, timeout_s if tool_limit is None else min(timeout_s, tool_limit)
        self._subject = str(getattr(make, "__name__", type(make).__name__))
        self._environment: Any = None
        self._thread = _Thread()
        self._failed = False
        self._rewards = 0.0

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            if self._environment is not None and not self._failed and not self._thread.abandoned:
                self._limited(self._environment.close, "close()")
        except EnvironmentFailed:
            if raised == (None, None, None):  # otherwise the first failure is the one to report
                raise
        finally:
            self._thread.end()

    def reset(self, task: Task) -> EnvironmentStep:
        """Makes the environment and starts its episode.

        Raises:
            EnvironmentFailed: it raised, took too long, or returned something that is not a step or is done.
        """
        self._environment = self._limited(self._make, "its constructor")
        if not isinstance(self._environment, Environment):
            kind = type(self._environment).__name__
            raise self._failure(f"is a {kind}: it needs reset(task), step(action) and close()")
        self._subject = type(self._environment).__name__
        first = self._checked(lambda: self._environment.reset(task), "reset(task)")
        if first.done:
            raise self._failure("returned done=True from reset(task): there is nothing to act on")
        return first

    def step(self, action: str) -> EnvironmentStep:
        """Executes an action. It is recorded as a tool call.

        Raises:
            InvalidAction: the environment refused the action.
            EnvironmentFailed: it raised, took too long, or returned something that is not a step, or the sum of the
                rewards is not finite.
        """
        short = action if len(action) <= _ACTION_CHARS else f"{action[:_ACTION_CHARS]}…"
        steps: list[EnvironmentStep] = []

        def act() -> str:
            steps.append(self._checked(lambda: self._environment.step(action), f"step({short!r})"))
            return steps[0].observation

        with limited(None):  # the limit is that of this class: a tool over time is the agent's failure
            run_tool(self, {"action": action}, act)
        self._rewards += steps[0].reward
        if not math.isfinite(self._rewards):
            raise self._failure(f"gave rewards that add up to {self._rewards}: keep their sum finite")
        return steps[0]

    def _checked(self, call: Callable[[], Any], what: str) -> EnvironmentStep:
        result = self._limited(call, what)
        if not isinstance(result, EnvironmentStep):
            shown = str(result)[:_ACTION_CHARS]
            raise self._failure(f"returned {shown!r} from {what}, which is not an EnvironmentStep")
        return result

    def _limited(self, call: Callable[[], Any], what: str) -> Any:
        if self._thread.abandoned:
            raise self._failure(f"was given up, because it gave no result in time; {what} was not called")
        finished = self._thread.run(call, self._limit_s)
        if finished is None:
            raise self._failure(f"gave no result of {what} after {self._limit_s:g} s")
        error = finished.exception()
        if error is None:
            return finished.result()
        if isinstance(error, InvalidAction) and what.startswith("step("):
            raise error
        if isinstance(error, EnvironmentFailed):  # it says itself what went wrong
            self._failed = True
            raise error
        if (stop := stop_in(error)) is not None:
            raise stop from error
        raise self._failure(f"raised {error_text(error)} in {what}") from error

    def _failure(self, what: str) -> EnvironmentFailed:
        self._failed = True
        return EnvironmentFailed(f"the environment {self._subject} {what}")
