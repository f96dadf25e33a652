"""The five agent parameters. Frozen; out of range is an error that names the range."""

import difflib
from collections.abc import Mapping
from typing import Any

import pydantic

from assay.errors import ParameterError

__all__ = ["RANGES", "AgentParameters"]

RANGES: Mapping[str, tuple[float, float]] = {
    "context_length": (100, 5000),
    "temperature": (0.1, 2.0),
    "max_steps": (1, 50),
    "tool_usage_threshold": (0.0, 1.0),
    "reasoning_depth": (1, 10),
}


class AgentParameters(pydantic.BaseModel):
    """How an agent behaves. `AgentParameters.of(mapping)` is the way in for outside values.

    Attributes:
        context_length: tokens of context, history and observations one LM call may hold, by the model's tokenizer;
            the oldest observations go first, the task never.
        temperature: sampling temperature of every LM call.
        max_steps: turns before the agent must answer; a turn decides and acts, and the answer is a turn.
        tool_usage_threshold: a tool is called only if the agent's own estimate that it needs one is at least this.
        reasoning_depth: tokens of reasoning per step are 2 to this power (none at 1); from `REVIEW_DEPTH` on the
            answer is reviewed once, if `max_steps` leaves a step for it.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)

    context_length: int = pydantic.Field(2000, ge=100, le=5000)
    temperature: float = pydantic.Field(0.7, ge=0.1, le=2.0)
    max_steps: int = pydantic.Field(10, ge=1, le=50)
    tool_usage_threshold: float = pydantic.Field(0.5, ge=0.0, le=1.0)
    reasoning_depth: int = pydantic.Field(3, ge=1, le=10)

    @classmethod
    def of(cls, values: Mapping[str, Any], *, base: "AgentParameters | None" = None) -> "AgentParameters":
        """`base` (the defaults) with `values` over it.

        Raises:
            ParameterError: an unknown name, or a value that is not of its type or out of its range.
        """
        merged = {**(base or cls()).model_dump(), **values}
        if unknown := sorted(set(values) - set(RANGES)):
            near = difflib.get_close_matches(unknown[0], RANGES, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ParameterError(f"unknown agent parameter {unknown}; there are {', '.join(RANGES)}{hint}")
        if flags := sorted(name for name, value in values.items() if isinstance(value, bool)):
            raise ParameterError(f"{flags[0]}={values[flags[0]]!r} must be a number")
        try:
            return cls(**merged)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            name = str(problem["loc"][0])
            low, high = RANGES[name]
            raise ParameterError(f"{name}={problem['input']!r} must be between {low:g} and {high:g} ({problem['msg']})") from None
