"""The agents as code inside of artifacts imports them, with the arguments and attributes of earlier versions.

`adapter` is `prompt_format`, and the attributes of `self.parameters` are those of `self.agent_parameters`. Only
`assay.sources.former_names` uses these classes; programs of today subclass `assay.programs.Agent`.
"""

from typing import Any

import dspy

from assay.programs import agent, shipped, tool_agent
from assay.programs.parameters import AgentParameters

__all__ = ["Agent", "Classify", "Extract", "MathQA", "ToolAgent"]


class _Parameters:
    """An agent's parameters by attribute; called, its predictors, because DSPy calls `parameters()`."""

    def __init__(self, owner: agent.Agent) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.agent_parameters, name)

    def __call__(self) -> Any:
        return dspy.Module.parameters(self._owner)


class Agent(agent.Agent):
    def __init__(self, *args: Any, adapter: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options if adapter is None else {**options, "prompt_format": adapter})

    @property
    def adapter(self) -> str:
        return self.prompt_format

    @adapter.setter
    def adapter(self, name: str) -> None:
        self.prompt_format = name

    @property
    def parameters(self) -> _Parameters:
        return _Parameters(self)

    @parameters.setter
    def parameters(self, values: AgentParameters) -> None:
        self.agent_parameters = values


class ToolAgent(Agent, tool_agent.ToolAgent):
    pass


class MathQA(ToolAgent, shipped.MathQA):
    pass


class Classify(Agent, shipped.Classify):
    pass


class Extract(Agent, shipped.Extract):
    pass
