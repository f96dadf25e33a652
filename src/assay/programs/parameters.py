"""The five agent parameters, immutable and range-checked."""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pydantic

from assay.errors import ParameterError

_REVIEW_DEPTH = 6  # from this reasoning_depth on, the answer is reviewed

RANGES: Mapping[str, tuple[float, float]] = {
    "context_length": (100, 5000),
    "temperature": (0.1, 2.0),
    "max_steps": (1, 50),
    "tool_usage_threshold": (0.0, 1.0),
    "reasoning_depth": (1, 10),
}


class AgentParameters(pydantic.BaseModel):
    """Parameters of an agent's behavior.

    Raises:
        ParameterError: an unknown name, or a value of the wrong type or out of range.

    Attributes:
        context_length: maximum tokens of context, history and observations of one LM call, by the model's tokenizer.
            The oldest observations are dropped first, the task never.
        temperature: sampling temperature of every LM call.
        max_steps: maximum number of steps including the answer; a step decides and acts.
        tool_usage_threshold: a tool is called only if its estimated need (a probability) is at least this.
        reasoning_depth: the thinking budget per step is 2 to this power in tokens (0 at 1). From 6 on, the
            answer is reviewed: once at 6 and 7, up to twice at 8 and 9, up to three times at 10, until it stays the
            same; each review takes one of `max_steps`.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)

    context_length: int = pydantic.Field(2000, ge=100, le=5000)
    temperature: float = pydantic.Field(0.7, ge=0.1, le=2.0)
    max_steps: int = pydantic.Field(10, ge=1, le=50)
    tool_usage_threshold: float = pydantic.Field(0.5, ge=0.0, le=1.0)
    reasoning_depth: int = pydantic.Field(3, ge=1, le=10)

    if not TYPE_CHECKING:  # the typed signature is pydantic's

        def __init__(self, **values: Any) -> None:
            _check_names(values)
            try:
                super().__init__(**values)
            except pydantic.ValidationError as error:
                problem = error.errors()[0]
                name = str(problem["loc"][0])
                low, high = RANGES[name]
                kind = "a whole number " if type(self).model_fields[name].annotation is int else ""
                raise ParameterError(
                    f"{name}: must be {kind}between {low:g} and {high:g}, not {problem['input']!r}"
                ) from None

    @classmethod
    def of(
        cls, values: "Mapping[str, Any] | AgentParameters", *, base: "AgentParameters | None" = None
    ) -> "AgentParameters":
        """Returns `base` (by default the default parameters) updated with `values`.

        Raises:
            ParameterError: no mapping, an unknown name, or a value of the wrong type or out of range.
        """
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ParameterError(
                f"agent parameters are a mapping such as {{'max_steps': 5}}, got a {type(values).__name__}: {values!r}"
            )
        return cls(**{**(base or cls()).model_dump(), **values})


def _check_names(values: Mapping[str, Any]) -> None:
    """Raises `ParameterError` for a name that is not a parameter, and for a switch in place of a number."""
    if unknown := sorted(values.keys() - RANGES.keys()):
        near = difflib.get_close_matches(unknown[0], RANGES, 1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(map(repr, unknown))
        are_not = "is not an agent parameter" if len(unknown) == 1 else "are not agent parameters"
        raise ParameterError(f"{names} {are_not}; the parameters are {', '.join(RANGES)}{hint}")
    if flags := sorted(name for name, value in values.items() if isinstance(value, bool)):
        raise ParameterError(f"{flags[0]}: must be a number, not {values[flags[0]]!r}")


def reasoning_tokens(depth: int) -> int:
    """Thinking budget of a step in tokens: 0 at depth 1, otherwise 2 to the power of the depth (1024 at 10)."""
    return 0 if depth == 1 else 2**depth


def review_rounds(depth: int) -> int:
    """Refinement rounds after the first answer: none below depth 6, one at 6 and 7, two at 8 and 9, three at 10."""
    return max(0, (depth - _REVIEW_DEPTH) // 2 + 1)
