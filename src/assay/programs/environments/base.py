"""The interface of an environment, and what it returns. Does not run environments: `assay.programs.environments.play`
does, under limits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from assay.datasets import Task
from assay.errors import ConfigError
from assay.support.values import unicode_text

__all__ = ["Environment", "EnvironmentStep", "InvalidAction", "environment_seed"]


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
