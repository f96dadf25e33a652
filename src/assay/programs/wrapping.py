"""Wraps plain functions and custom agents as programs. They can be run, recorded and scored; they have no prompts."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.programs.agent import Agent, BaseAgent
from assay.support.awaited import completed


class FunctionProgram(dspy.Module):  # type: ignore[misc]
    """A function of a task's inputs; async functions are awaited.

    A returned mapping has the prediction's fields; any other value is the field `answer`.

    Raises:
        ProgramError: the function is a generator.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ProgramError(
                f"{function.__qualname__} is a generator (it has yield); a program must return the complete answer"
            )
        self.function = function
        # an artifact copies the source from there
        self._assay_origin = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))

    def forward(self, **inputs: Any) -> Any:
        return as_prediction(self.function(**inputs))


class AgentProgram(Agent):
    """A `BaseAgent` as a program. Before each run all parameters are set; `execute` gets the inputs as a mapping."""

    def __init__(self, agent: BaseAgent) -> None:
        super().__init__()
        self.agent = agent
        self._assay_origin = (type(agent).__module__, type(agent).__qualname__)

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        super().set_parameters(parameters)
        with suppress(Exception):  # each run sets them on its copy of the agent, and reports the error
            self.agent.set_parameters(self.agent_parameters.model_dump())

    def forward(self, **inputs: Any) -> Any:
        self.agent.set_parameters(self.agent_parameters.model_dump())
        return as_prediction(self.agent.execute(inputs))


def is_wrapped(program: Any) -> bool:
    """Whether a program is a wrapped function or agent, which may call models in ways that are not known before."""
    return isinstance(program, FunctionProgram | AgentProgram)


def wrapped(program: Any) -> Any:
    """Returns the wrapped function or agent of a program, or the program itself."""
    if isinstance(program, FunctionProgram):
        return program.function
    return program.agent if isinstance(program, AgentProgram) else program


def as_prediction(result: Any) -> dspy.Prediction:
    """Converts a program's result to a prediction.

    A mapping becomes its fields; any other value becomes the field `answer`. Awaitables are awaited first.

    Raises:
        ProgramError: the result is a generator.
    """
    result = completed(result)
    if isinstance(result, dspy.Prediction):
        return result
    if isinstance(result, Iterator | AsyncIterator):
        raise ProgramError(f"the program returned a {type(result).__name__}; a program must return the complete answer")
    if isinstance(result, Mapping):
        return dspy.Prediction(**{str(key): value for key, value in result.items()})
    return dspy.Prediction(answer=result)


def with_forward(kind: type) -> type:
    """Adds a `forward` to a module class that has only `aforward`, because DSPy's optimizers call `forward`.

    Raises:
        ProgramError: the class has neither.
    """
    if hasattr(kind, "forward") or not issubclass(kind, dspy.Module):
        return kind
    aforward = getattr(kind, "aforward", None)
    if aforward is None:
        raise ProgramError(f"{kind.__qualname__} has no forward: define `def forward(self, …)`")

    @functools.wraps(aforward)
    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        return completed(aforward(self, *arguments, **inputs))

    kind.forward = forward  # type: ignore[attr-defined]
    return kind


def takes_inputs(function: Any) -> list[str] | None:
    """Returns the required arguments of a plain function.

    None if it has none: it is then treated as a factory of a program.
    """
    if isinstance(function, type) or not callable(function):
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return needed or None


def _made_by(function: Any) -> Any:
    """The program that a factory returns, which is called with its defaults; None if it is a function of inputs."""
    if takes_inputs(function) is not None or inspect.iscoroutinefunction(function):
        return None
    try:
        may_have_inputs = bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        may_have_inputs = True
    try:
        made = function()
    except Exception:
        if may_have_inputs:
            return None  # an input that is None
        raise
    if isinstance(made, dspy.Module | BaseAgent):
        return made
    if may_have_inputs:
        return None
    raise ProgramError(
        f"{getattr(function, '__qualname__', repr(function))} takes no inputs and returns a {type(made).__name__}: "
        "a function without arguments must return a dspy.Module"
    )


def as_module(program: Any) -> dspy.Module:
    """Converts an object to a module: classes are instantiated, factories called, functions and agents wrapped.

    Raises:
        ProgramError: an unsupported object, or a class that cannot be instantiated without arguments.
    """
    if isinstance(program, dspy.Module):
        with_forward(type(program))
        return program
    if isinstance(program, type):
        try:
            return as_module(program())
        except TypeError as error:
            raise ProgramError(
                f"{program.__qualname__} cannot be built without arguments ({error}): pass an instance"
            ) from error
    if isinstance(program, BaseAgent):
        return AgentProgram(program)
    if callable(getattr(program, "execute", None)):
        raise ProgramError(
            f"{type(program).__name__} has execute but no set_parameters; an agent needs both "
            "(see assay.programs.BaseAgent)"
        )
    if callable(program):
        made = _made_by(program)
        if made is None:
            return FunctionProgram(program)
        module = as_module(made)
        if inspect.isfunction(program) or isinstance(getattr(program, "__self__", None), type):
            module._assay_origin = (program.__module__, program.__qualname__)  # otherwise that of its class
        return module
    raise ProgramError(
        "a program is a name, a path, a dspy.Module, a function or an agent; "
        f"got a {type(program).__name__}: {program!r}"
    )
