"""Contract of an agent whose parameters can be tuned."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from assay.programs import RANGES, AgentParameters, BaseAgent
from assay.testing.contracts.base import Contract, require


class AgentContract(Contract):
    """Checks an agent (`assay.programs.BaseAgent`).

    - It has `execute(task)` and `set_parameters(mapping)`.
    - `set_parameters` accepts each parameter alone, at both ends of its range, and an empty mapping.
    - An unknown name, a value out of range, NaN, infinity, a bool or a string raises `ValueError` that names the
      parameter and leaves the agent unchanged.
    - With the same parameters the same task gives the same output (unless `deterministic = False`), also after other
      tasks and in a copy of the agent. A copy has parameters of its own.
    - `execute` does not change the task.
    """

    deterministic = True

    def make(self) -> BaseAgent:
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def tasks(self) -> Sequence[Any]:
        """A few tasks that the agent can execute, at least two."""
        raise NotImplementedError(f"{type(self).__name__} must override tasks()")

    def test_it_has_both_methods(self) -> None:
        agent = self.make()
        for name in ("execute", "set_parameters"):
            method = getattr(type(agent), name, None)
            require(callable(method), f"the agent has no {name}")
            require(method is not getattr(BaseAgent, name), f"the agent does not override {name}")

    def test_every_parameter_is_taken_at_both_ends_of_its_range(self) -> None:
        with self.context():
            agent = self.make()
            agent.set_parameters({})
            for name, ends in RANGES.items():
                for end in ends:
                    agent.set_parameters({name: type(getattr(AgentParameters(), name))(end)})
            agent.set_parameters(AgentParameters().model_dump())
            self._outputs(agent)

    def test_wrong_parameters_are_refused_by_name_and_change_nothing(self) -> None:
        wrong = [("temprature", 0.5), *((name, value) for name, ends in RANGES.items() for value in _outside(ends))]
        with self.context():
            agent = self.make()
            agent.set_parameters(AgentParameters().model_dump())
            before = self._outputs(agent)
            for name, value in wrong:
                try:
                    agent.set_parameters({"temperature": 2.0, name: value})
                except ValueError as error:
                    require(name in str(error), f"the error for {name}={value!r} does not name it: {error}")
                else:
                    raise AssertionError(f"{name}={value!r} raises no ValueError")
            after = self._outputs(agent)
        if self.deterministic:
            require(after == before, f"parameters that were refused changed the outputs: {before!r} became {after!r}")

    def test_the_same_task_gives_the_same_output(self) -> None:
        if not self.deterministic:
            return
        with self.context():
            first, second = self.make(), self.make()
            before = self._outputs(first)
            require(self._outputs(first) == before, "the agent gives other outputs when it is called again")
            reverse = [second.execute(task) for task in reversed(self.tasks())]
            require(list(map(_comparable, reversed(reverse))) == before, "an output depends on the tasks before it")

    def test_a_copy_behaves_alike_and_has_its_own_parameters(self) -> None:
        with self.context():
            agent = self.make()
            agent.set_parameters(AgentParameters().model_dump())
            before = self._outputs(agent)
            other = copy.deepcopy(agent)
            same = self._outputs(other)
            other.set_parameters(
                {name: type(getattr(AgentParameters(), name))(ends[0]) for name, ends in RANGES.items()}
            )
            after = self._outputs(agent)
        if self.deterministic:
            require(same == before, "a copy of the agent gives other outputs")
            require(after == before, "the parameters of a copy change the agent")

    def test_a_task_is_not_changed(self) -> None:
        with self.context():
            agent = self.make()
            for task in self.tasks():
                before = copy.deepcopy(task)
                agent.execute(task)
                require(_comparable(task) == _comparable(before), f"execute changed the task {before!r} to {task!r}")

    def _outputs(self, agent: BaseAgent) -> list[Any]:
        return [_comparable(agent.execute(task)) for task in self.tasks()]


def _outside(ends: tuple[float, float]) -> list[Any]:
    return [ends[0] - 1, ends[1] + 1, math.nan, math.inf, True, "much"]


def _comparable(value: Any) -> Any:
    """A DSPy prediction as its fields; an object that compares by identity as its repr."""
    if hasattr(value, "toDict"):
        return value.toDict()
    if type(value).__dict__.get("__eq__") or isinstance(value, str | bytes | int | float | tuple | list | dict | None):
        return value
    return repr(value)
