"""A trace, its spans and what each of them does, as the readers of all tracers' formats produce them."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["LMCall", "Mark", "Span", "ToolUse", "Trace"]


@dataclass(kw_only=True)
class LMCall:
    """An LM call: body of the request and choices of the answer, in OpenAI's format."""

    body: dict[str, Any]
    choices: list[dict[str, Any]]
    answered_by: str = ""  # model name in the answer
    response_id: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    asked_in: str = ""  # name of the field that has the request

    @property
    def says(self) -> bool:
        """Whether messages or an answer were recorded."""
        return bool(self.body.get("messages")) or any(
            any(c["message"].get(key) for key in ("content", "tool_calls", "refusal")) for c in self.choices
        )


@dataclass(kw_only=True)
class ToolUse:
    """A tool call of a span; `call_id` is empty and `result` None where the span does not have them."""

    name: str
    call_id: str = ""
    arguments: Any = None
    result: Any = None


@dataclass(kw_only=True)
class Span:
    """A span. Times are Unix seconds; `does` is its LM call or tool call, None if it only contains other spans."""

    id: str
    parent: str = ""
    name: str = ""
    where: str = ""
    start: float | None = None
    end: float | None = None
    error: str | None = None
    does: LMCall | ToolUse | None = None
    inputs: Any = None
    outputs: Any = None
    inputs_in: str = "inputs"  # names of their fields
    outputs_in: str = "outputs"
    tools: list[dict[str, Any]] = field(default_factory=list)  # definitions, for the calls inside
    system: list[dict[str, Any]] = field(default_factory=list)  # system messages, for the calls inside
    unknown: list[str] = field(default_factory=list)  # names of fields whose shape is not understood
    own: dict[str, Any] = field(default_factory=dict)  # attributes of assay's own export


@dataclass(kw_only=True)
class Mark:
    """A score. `human`: given by a rater; `step`: for one span, not for the whole run."""

    name: str
    value: Any
    human: bool = False
    step: bool = False
    reason: str = ""
    label: str | None = None
    where: str = ""


@dataclass(kw_only=True)
class Trace:
    """A trace. `inputs` and `outputs` are those of the trace itself, not of its root span.

    `whole`: the trace itself was recorded, so that no root span is needed.
    """

    id: str
    where: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    whole: bool = False
    program: str = ""
    version: str = ""
    inputs: Any = None
    outputs: Any = None
    status: str | None = None
    error: str | None = None
    user: str | None = None
    tenant: str | None = None
    session: str | None = None
    expected: dict[str, Any] = field(default_factory=dict)
