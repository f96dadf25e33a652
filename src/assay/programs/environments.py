"""Environments that agents act in: the interface, an adapter for gymnasium's, and `EnvironmentAgent`, which acts.

An environment is run under limits. gymnasium itself is not imported: any object with its `reset` and `step` will do.
"""

import contextvars
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Protocol, Unpack, runtime_checkable

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.errors import ConfigError, EnvironmentFailed, ProgramError
from assay.models import supports
from assay.models.calls import stop_in
from assay.models.limits import StoppableThread, current_tool_limit, limited
from assay.models.loops import ToolLoopDetector
from assay.programs.agent import WRITTEN_DECISIONS, Agent, AgentSettings, Held
from assay.programs.estimate import choice_margin
from assay.programs.thinking import OFF
from assay.support.scrubbing import error_text
from assay.support.values import unicode_text
from assay.traces.listening import run_tool
from assay.traces.places import current_rollout
from assay.traces.store.rows import clean

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


_ACTION = 200  # characters of an action without another limit
_REASON = 2000  # characters of the reason for which an action is refused; it is part of the history
_SAME = 3  # times that a refused action is written until the run ends
_UNREAD = "the action could not be read"


class EnvironmentAgent(Agent):
    """Reads the observation, writes an action, and repeats this until the episode ends or after `max_steps` actions.

    The prediction has `outcome` (the last observation), `reward` (the sum), `done` (False: it was stopped), and
    `steps`: for each action `action`, `observation`, `reward`, `done`, `error` (why it was refused, otherwise None),
    `info`, and `call`, the LM call of the rollout that wrote it (None if it is not recorded). The checks of
    `assay.rubrics.environments` grade them; `step_reward` there rewards each call for what its action gained.

    Each rollout has an environment of its own. One that raises, hangs or returns something wrong ends the run with
    `EnvironmentFailed`, which is unscored: it is not the agent's failure. A refused action is reported to the agent and
    counts as a step; the same one three times ends the run.

    The history begins with the first observation. It is shortened to fit `context_length`, the observation is not. An
    action without alternatives is taken without asking the model. The model thinks from `reasoning_depth` 4 on. Actions
    are not reviewed, because they cannot be taken back, and `tool_usage_threshold` has no effect.

    Args:
        environment: makes an environment: its class, or a function.
        instructions: the rules, for the prompt.
        action: field of an action where the environment lists none, such as `dspy.OutputField(pattern="[0-9]+")`.
        inputs: names of a task's inputs, which `reset` reads; by default those of the class, `seed`.
        history: whether the prompt has the earlier actions and observations.
        timeout_s: of each call of the environment, in seconds. A quarter of `--task-timeout` is a limit too.
    Raises:
        ProgramError: `environment` cannot be called, or there are no instructions.
        ConfigError: `timeout_s` is not above 0.
    """

    input_names: ClassVar[tuple[str, ...]] = ("seed",)

    def __init__(
        self,
        environment: Callable[[], Environment],
        instructions: str,
        *,
        inputs: Sequence[str] = (),
        action: Any = None,
        history: bool = True,
        timeout_s: float = 30.0,
        **agent: Unpack[AgentSettings],
    ) -> None:
        super().__init__(**agent)
        if not callable(environment):
            raise ProgramError(
                f"environment={environment!r} must be a class or function that makes an environment: each rollout "
                "needs a new one"
            )
        if not instructions.strip():
            raise ProgramError("instructions are empty: describe the rules and the form of an action")
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s={timeout_s!r} must be a finite number of seconds > 0")
        if inputs:
            self.input_names = tuple(inputs)  # type: ignore[misc]  # other agents fix theirs by class
        self._made = Held(environment)
        self.timeout_s = timeout_s
        self.shows_history = history  # dspy.Module has an attribute `history`
        past = {"history": (str, dspy.InputField(desc="earlier actions, and what happened"))} if history else {}
        written = dspy.OutputField(max_length=_ACTION) if action is None else action
        self.act = dspy.Predict(
            dspy.Signature({**past, "observation": (str, dspy.InputField()), "action": (str, written)}, instructions)
        )

    def solve(self, **inputs: Any) -> dspy.Prediction:
        rollout = current_rollout()
        task = Task(id="" if rollout is None else rollout.task_id, inputs=inputs)
        steps: list[dict[str, Any]] = []
        refused = ToolLoopDetector(_SAME)
        with Play(self._made.value, self.timeout_s) as play:
            step = first = play.reset(task)
            for _ in range(self.agent_parameters.max_steps):
                before, action, error = step, self._action(step, steps, first.observation), None
                call = None if rollout is None or not rollout.transitions else len(rollout.transitions) - 1
                try:
                    if action is None:
                        raise InvalidAction(_UNREAD)
                    step = play.step(action)
                except InvalidAction as invalid:
                    error = clean(str(invalid))[:_REASON] or "the action is not possible"
                steps.append(_entry(action, step, error, call))
                if error is not None:
                    step = before
                    if refused.add("step", {"action": action}, error) is not None:
                        break
                if step.done:
                    break
        reward = float(sum(entry["reward"] for entry in steps))
        return dspy.Prediction(outcome=step.observation, reward=reward, done=step.done, steps=steps)

    def _action(self, step: EnvironmentStep, steps: Sequence[dict[str, Any]], first: str) -> str | None:
        """The action that the model writes; None if it could not be read."""
        if len(step.actions) == 1:
            return step.actions[0]
        choices, dynamic = list(step.actions), self.thinking_policy != OFF
        written = bool(dspy.settings.get(WRITTEN_DECISIONS))
        reads = bool(choices) and dynamic and not written and supports(dspy.settings.lm, "top_logprobs")
        past = _history(steps, first) if self.shows_history else []

        def ask(signature: Any, asked: dict[str, Any], options: dict[str, Any]) -> tuple[Any, str, float | None]:
            filled = self.fit_context(self.act, signature, asked, past, "history")
            if not self.shows_history:
                del filled["history"]
            answer = self.act(signature=signature, config=options, **filled)
            return answer, str(answer.action), choice_margin(answer, "action", choices if reads else ())

        signature, inputs = _choosing(self.act.signature, step.actions), {"observation": step.observation}
        field = "action" if reads else ""
        try:
            last = self.decided(ask, signature, inputs, tokens=self.deep_thought_tokens, field=field, reads=reads)
        except AdapterParseError:
            return None
        return str(last.choice).strip()


class ShippedEnvironmentAgent(EnvironmentAgent):
    """An agent whose class says the environment and its rules; it is made with the arguments of any agent.

    Attributes:
        action_limits: arguments of the field of an action, such as `pattern`, where the environment lists none.
        shows_past: whether the prompt has the earlier actions and observations.
    """

    environment: ClassVar[Callable[[], Environment]]
    instructions: ClassVar[str]
    action_limits: ClassVar[Mapping[str, Any]] = {}
    shows_past: ClassVar[bool] = True

    def __init__(self, **agent: Unpack[AgentSettings]) -> None:
        action = dspy.OutputField(**self.action_limits) if self.action_limits else None
        make = type(self).environment
        super().__init__(make, self.instructions, action=action, history=self.shows_past, **agent)


def _entry(action: str | None, step: EnvironmentStep, error: str | None, call: int | None) -> dict[str, Any]:
    """One step as JSON. A refused action has no reward."""
    if error is not None:
        result: dict[str, Any] = {"observation": "", "reward": 0.0, "done": False, "info": {}}
    else:
        result = {
            "observation": step.observation,
            "reward": float(step.reward),
            "done": step.done,
            "info": dict(step.info),
        }
    return {"action": action, **result, "error": error, "call": call}


def _history(steps: Sequence[dict[str, Any]], first: str) -> list[str]:
    """The first observation, which often says what the task is, and the steps as lines.

    The latest observation is left out: the prompt has it as the current one.
    """
    lines = [first] if first and any(entry["error"] is None for entry in steps) else []
    for at, entry in enumerate(steps, 1):
        action = "?" if entry["action"] is None else entry["action"]
        if entry["error"] is not None:
            lines.append(f"{action}: error: {entry['error']}")
        elif all(later["error"] is not None for later in steps[at:]):
            lines.append(action)
        else:
            lines.append(f"{action}: {entry['observation']}")
    return lines


@functools.lru_cache(maxsize=256)
def _choosing(signature: Any, actions: tuple[str, ...]) -> Any:
    """The signature with the actions to choose from. They are a field of their own: the limits of a written action do
    not apply to a choice."""
    if not actions:
        return signature
    return signature.delete("action").append("action", dspy.OutputField(), Literal[actions])
