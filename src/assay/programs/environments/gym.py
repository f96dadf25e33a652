"""An adapter for environments with the interface of gymnasium. gymnasium itself is not imported: any object with its
`reset` and `step` will do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.errors import ConfigError
from assay.programs.environments.base import Environment, EnvironmentStep, InvalidAction, environment_seed

_MOST_ACTIONS = 256  # of a discrete space that the agent chooses from
_MOST_NUMBERS = 1000  # of an array: numpy abbreviates the text of a larger one


class GymEnvironment(Environment):
    """A gymnasium environment. `EnvironmentAgent(lambda: GymEnvironment(gymnasium.make(NAME)), RULES)` plays it.

    `reset` passes the task's seed. An episode that gymnasium truncates is done too; `info["truncated"]` says so.
    Observations are text as they are, others by `render`. A discrete action space is a list of actions, of which an
    `action_mask` in gymnasium's `info` leaves out some; a text space takes any text of its characters.

    Args:
        env: an object with `reset(seed=…)`, `step(action)` and `action_space`.
        actions: names of the discrete actions, in order; by default their numbers.
        render: makes text of an observation. By default `str`, and an array of more than 1,000 numbers is refused.
        parse: makes an action of the agent's text, for other action spaces. It raises ValueError for what is none.
        options: of `reset`, made from the task's inputs; by default None.
    Raises:
        ConfigError: no such object, an action space that needs `parse`, or another number of names than actions.
    """

    def __init__(
        self,
        env: Any,
        *,
        actions: Sequence[str] = (),
        render: Callable[[Any], str] | None = None,
        parse: Callable[[str], Any] | None = None,
        options: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        if missing := [name for name in ("reset", "step", "action_space") if not hasattr(env, name)]:
            raise ConfigError(f"{env!r} is not a gymnasium environment: it has no {', '.join(missing)}")
        if parse is not None and actions:
            raise ConfigError("actions and parse were both given: names of actions are read without parse")
        self._env, self._render, self._parse, self._options = env, render or _rendered, parse, options
        self._first, self._done = 0, False
        self._names: tuple[str, ...] = ()
        if parse is None:
            self._read_space(env.action_space, tuple(actions))

    def _read_space(self, space: Any, names: tuple[str, ...]) -> None:
        """Names of the actions of a discrete space; a text space has none."""
        count, first = getattr(space, "n", None), getattr(space, "start", None)
        if count is None or first is None:  # `MultiBinary` has no start
            if hasattr(space, "max_length") and hasattr(space, "contains"):
                if names:
                    raise ConfigError(f"actions={names!r} are given, but the action space {space} is text")
                return
            raise ConfigError(f"the action space {space} is neither discrete nor text: pass parse")
        count, self._first = int(count), int(first)
        if count > _MOST_ACTIONS and not names:
            raise ConfigError(f"the action space {space} has more than {_MOST_ACTIONS} actions: pass parse")
        if names and len(names) != count:
            raise ConfigError(f"{len(names)} names were given for the {count} actions of {space}")
        self._names = names or tuple(str(self._first + at) for at in range(count))

    def reset(self, task: Task) -> EnvironmentStep:
        options = {} if self._options is None else {"options": self._options(task.inputs)}
        result = self._env.reset(seed=environment_seed(task), **options)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ConfigError(f"reset returned {str(result)[:80]!r}; gymnasium's returns (observation, info)")
        return self._step(result[0], 0.0, False, False, result[1])

    def step(self, action: str) -> EnvironmentStep:
        if self._done:
            raise InvalidAction("the episode has ended")
        result = self._env.step(self._value(action))
        if not (isinstance(result, tuple) and len(result) == 5):
            raise ConfigError(
                f"step returned {str(result)[:80]!r}; gymnasium's returns (observation, reward, terminated, truncated, "
                "info). Wrap an environment of the older gym, which returns four values"
            )
        observation, reward, terminated, truncated, info = result
        return self._step(observation, reward, terminated, truncated, info)

    def close(self) -> None:
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _value(self, action: str) -> Any:
        """What gymnasium's `step` takes."""
        if self._parse is not None:
            try:
                return self._parse(action)
            except ValueError as error:
                raise InvalidAction(str(error) or f"{action!r} is not an action") from None
        if self._names:
            if action not in self._names:
                raise InvalidAction(f"{action!r} is none of {', '.join(self._names)}")
            return self._first + self._names.index(action)
        if not self._env.action_space.contains(action):
            raise InvalidAction(f"{action!r} is not in the action space {self._env.action_space}")
        return action

    def _step(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> EnvironmentStep:
        info = info if isinstance(info, Mapping) else {}
        mask = info.get("action_mask")
        names = self._names
        if names and mask is not None and len(mask) == len(names):
            names = tuple(name for name, possible in zip(names, mask, strict=True) if possible) or names
        self._done = done = bool(terminated) or bool(truncated)
        return EnvironmentStep(
            observation=observation if isinstance(observation, str) else str(self._render(observation)),
            reward=float(reward),
            done=done,
            actions=() if done else names,
            info={**_plain(info), **({"truncated": True} if truncated else {})},
        )


def _rendered(observation: Any) -> str:
    """Text of an observation.

    Raises:
        ConfigError: it is a large array, such as an image, of which `str` would leave out most.
    """
    if hasattr(observation, "ndim") and observation.size > _MOST_NUMBERS:
        raise ConfigError(f"the observation is an array of {observation.size:,} numbers: pass render")
    return str(observation)


def _plain(info: Mapping[Any, Any]) -> dict[str, Any]:
    """The JSON values of gymnasium's `info`; arrays as lists, other objects left out."""
    plain = {}
    for name, value in info.items():
        if callable(listed := getattr(value, "tolist", None)):
            value = listed()
        if isinstance(value, str | bool | int | float | list | None):
            plain[str(name)] = value
    return plain
