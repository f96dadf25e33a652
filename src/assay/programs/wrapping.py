"""Plain functions and agents of other makes as programs: they are run, recorded and scored like any other, and have no prompts to compile."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.programs.agent import Agent, BaseAgent

__all__ = ["AgentProgram", "FunctionProgram", "as_module", "as_prediction", "takes_inputs", "wrapped"]


class FunctionProgram(dspy.Module):  # type: ignore[misc]
    """A function of a task's inputs. What it returns is the prediction: a mapping its fields, anything else its `answer`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self._assay_origin = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))  # where an artifact takes its source from

    def forward(self, **inputs: Any) -> Any:
        return as_prediction(self.function(**inputs))


class AgentProgram(Agent):
    """An agent with `execute` and `set_parameters`. It is given the task's inputs as a mapping, and all five parameters before each run."""

    def __init__(self, agent: BaseAgent) -> None:
        super().__init__()
        self.agent = agent
        self._assay_origin = (type(agent).__module__, type(agent).__qualname__)

    def forward(self, **inputs: Any) -> Any:
        self.agent.set_parameters(self.agent_parameters.model_dump())
        return as_prediction(self.agent.execute(inputs))


def wrapped(program: Any) -> Any:
    """What a program wraps, or itself."""
    return program.function if isinstance(program, FunctionProgram) else program.agent if isinstance(program, AgentProgram) else program


def as_prediction(result: Any) -> dspy.Prediction:
    """What a program returned: a prediction as it is, a mapping by its fields, anything else as its `answer`."""
    if isinstance(result, dspy.Prediction):
        return result
    return dspy.Prediction(**{str(key): value for key, value in result.items()}) if isinstance(result, Mapping) else dspy.Prediction(answer=result)


def takes_inputs(function: Any) -> list[str] | None:
    """The arguments that a plain function needs; None where it needs none, which is then a function that makes a program."""
    if isinstance(function, type) or not callable(function):
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return needed or None


def as_module(program: Any) -> dspy.Module:
    """A program that was given as an object: a module as it is, a class built, a function or an agent wrapped.

    Raises:
        ProgramError: it is none of these, or a class that cannot be built without arguments.
    """
    if isinstance(program, dspy.Module):
        return program
    if isinstance(program, type):
        try:
            return as_module(program())
        except TypeError as error:
            raise ProgramError(f"{program.__qualname__} cannot be built without arguments ({error}): give an instance") from error
    if isinstance(program, BaseAgent):
        return AgentProgram(program)
    if callable(getattr(program, "execute", None)):
        raise ProgramError(f"{type(program).__name__} has execute and no set_parameters: an agent needs both, see assay.programs.BaseAgent")
    if callable(program):
        return FunctionProgram(program)
    raise ProgramError(f"a program is a name, a path, a dspy.Module, a function or an agent; got a {type(program).__name__}: {program!r}")
