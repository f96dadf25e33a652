"""Thinking budgets and policies of whole programs: sets them, and refuses a budget before the first call.

How a call keeps its budget is in `assay.programs.thinking`, when a step thinks in `assay.programs.thinking`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.models.lm import LanguageModel, check_thinking
from assay.models.thinking import Thinking, ThinkingError
from assay.programs.adapters import make_adapter
from assay.programs.agent import Agent
from assay.programs.compose import EnsembleProgram, NearestDemos, without_nearest
from assay.programs.isolation import copied
from assay.programs.refinement import Refine
from assay.programs.thinking import THRESHOLDS, LimitsThoughts, ThinkingPolicy


def set_thinking(program: Any, thinking: Thinking) -> None:
    """Gives a program's agents a budget: itself, that of nearest demonstrations, or those of an ensemble.

    A plain module has none: the budget of its model applies.
    """
    for agent in _agents_of(program):
        agent.thinking = thinking


def _agents_of(program: Any) -> list[Agent]:
    if isinstance(program, NearestDemos):
        return _agents_of(program.program)
    if isinstance(program, EnsembleProgram):
        return [agent for member in program.members for agent in _agents_of(member)]
    return [program] if isinstance(program, Agent) else []


def check_budget(program: dspy.Module, lm: LanguageModel, thinking: Thinking, *, prompt_format: str | None) -> None:
    """Refuses a budget that a call of the program could not keep. Calls no model.

    Args:
        lm: the model of predictors that have none of their own.
        prompt_format: of predictors outside of agents; None is DSPy's adapter.
    Raises:
        ThinkingError: the reason.
    """
    adapter = dspy.settings.adapter if prompt_format is None else make_adapter(prompt_format)
    adapters = {
        id(predictor): make_adapter(agent.prompt_format)
        for _, agent in program.named_sub_modules(Agent)
        if not getattr(agent, "plain", False)
        for predictor in agent.predictors()
    }
    for predictor in program.predictors():
        if "thinking" not in predictor.config:  # a call's own budget comes first
            _check_call(predictor, predictor.lm or lm, adapters.get(id(predictor), adapter), thinking)


def _check_call(predictor: Any, lm: Any, adapter: Any, thinking: Thinking) -> None:
    limits = isinstance(adapter, LimitsThoughts)
    left = adapter.left_of(lm, thinking, predictor.signature) if limits else thinking
    if not isinstance(lm, LanguageModel):
        return
    try:
        check_thinking(lm, left)
    except ThinkingError as error:
        if not limits:
            error.hint = "Or use `prompt_format='json'`, in which the field of the thoughts is limited"
        raise


def allocates(program: Any) -> bool:
    """Whether a program may be given a policy: an `Agent` whose author gave it a thinking budget or a policy.

    Other agents keep what they do today. `Refine` makes no choices of its own.
    """
    agent = _deciding(program)
    if agent is None:
        return False
    thinking: Thinking | None = agent.thinking
    return agent.policy is not None or (thinking is not None and not thinking.is_off)


def _deciding(program: Any) -> Agent | None:
    """The agent itself, or the one that gets the nearest demonstrations."""
    inner = without_nearest(program)
    return inner if isinstance(inner, Agent) and not isinstance(inner, Refine) else None


def thresholds_of(program: Any) -> dict[str, float]:
    """The thresholds of the policy that a program thinks by, 1 where one is off; empty if it does not allocate."""
    agent = _deciding(program)
    if agent is None or not allocates(program):
        return {}
    values = {name: getattr(agent.thinking_policy, name) for name in THRESHOLDS}
    return {name: 1 if value is None else value for name, value in values.items()}


def set_thresholds(program: Any, values: Mapping[str, float]) -> None:
    """Sets some or all of the thresholds; the rest of the policy stays.

    Changes nothing if they are the program's already, or if it does not allocate.
    """
    agent, own = _deciding(program), thresholds_of(program)
    if agent is None or not own or all(own[name] == value for name, value in values.items()):
        return
    off: dict[str, Any] = {"samples": 1}
    fields: dict[str, Any] = {name: off.get(name) if value == 1 else value for name, value in values.items()}
    agent.policy = replace(agent.thinking_policy, **fields)


def with_policy(program: Any, policy: ThinkingPolicy) -> Any:
    """A copy of a program with a policy."""
    other = copied(program)
    agent = _deciding(other)
    if agent is None:
        raise ProgramError(f"{type(program).__name__} is not an Agent, so it takes no thinking policy")
    agent.policy = policy
    return other
