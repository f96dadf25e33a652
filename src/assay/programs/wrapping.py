"""Plain functions and agents of other makes as programs: they are run, recorded and scored like any other, and have no prompts to compile."""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.programs.agent import Agent, BaseAgent

__all__ = ["AgentProgram", "FunctionProgram", "as_module", "as_prediction", "completed", "takes_inputs", "with_forward", "wrapped"]


class FunctionProgram(dspy.Module):  # type: ignore[misc]
    """A function of a task's inputs; one with `async` is awaited. What it returns is the prediction: a mapping its fields, anything else its
    `answer`.

    Raises:
        ProgramError: it is a generator.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ProgramError(f"{function.__qualname__} is a generator (it has yield); a program returns its answer: return the whole of it")
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
    """What a program returned: a prediction as it is, a mapping by its fields, anything else as its `answer`; an awaitable is run to its end.

    Raises:
        ProgramError: it returned a generator.
    """
    result = completed(result)
    if isinstance(result, dspy.Prediction):
        return result
    if isinstance(result, Iterator | AsyncIterator):
        raise ProgramError(f"the program returned a {type(result).__name__}; a program returns its answer: return the whole of it")
    return dspy.Prediction(**{str(key): value for key, value in result.items()}) if isinstance(result, Mapping) else dspy.Prediction(answer=result)


def completed(result: Any) -> Any:
    """What an awaitable gives, in an event loop of its own; in a thread of its own where this one's loop runs already (a notebook).
    Anything else as it is."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, wait()).result()


def with_forward(kind: type) -> type:
    """A class of modules with `aforward` alone is given a `forward` that awaits it: DSPy's optimizers call `forward`.

    Raises:
        ProgramError: it has neither.
    """
    if hasattr(kind, "forward") or not issubclass(kind, dspy.Module):
        return kind
    aforward = getattr(kind, "aforward", None)
    if aforward is None:
        raise ProgramError(f"{kind.__qualname__} has no forward: a dspy.Module that is run needs `def forward(self, …)`")

    @functools.wraps(aforward)
    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        return completed(aforward(self, *arguments, **inputs))

    kind.forward = forward  # type: ignore[attr-defined]
    return kind


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
        with_forward(type(program))
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
