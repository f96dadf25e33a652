"""`EnvironmentAgent`: an agent that acts in an environment until the episode ends."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.errors import ConfigError, ProgramError
from assay.models import supports
from assay.models.loops import ToolLoopDetector
from assay.programs.agent import WRITTEN_DECISIONS, Agent, AgentSettings, Held
from assay.programs.environments.base import Environment, EnvironmentStep, InvalidAction, Play
from assay.programs.estimate import choice_margin
from assay.programs.thinking import OFF
from assay.traces.places import current_rollout
from assay.traces.store.rows import clean

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
