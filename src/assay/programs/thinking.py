"""Thinking budgets of programs: limits the output field in which a program lets a model think.

For models that think by themselves, `assay.models.thinking` sets the engine's own budget.
"""

import functools
from dataclasses import dataclass
from typing import Any

import dspy

from assay.models import supports
from assay.models.line_grammar import LINES
from assay.models.thinking import CHARACTERS, THOUGHT_FIELDS, Thinking, ThinkingError, native_thinking

LIMIT = 16_384  # tokens; a larger budget is no limit for the models that fit into one process


def thought_field(tokens: int) -> Any:
    """An output field for a thought of at most so many tokens."""
    tokens = min(tokens, LIMIT)
    return dspy.OutputField(desc=f"at most {tokens} tokens", max_length=CHARACTERS * tokens)


@functools.lru_cache(maxsize=256)
def with_thought(signature: Any, tokens: int, continued: bool = False) -> Any:
    """A signature with a thought of at most so many tokens before its outputs, none for 0.

    Args:
        continued: whether there are earlier thoughts, which become an input.
    """
    if continued:
        signature = signature.append("thoughts", dspy.InputField(desc="your thoughts so far"), str)
    return signature.prepend("thought", thought_field(tokens), str) if tokens else signature


def thinking_limit(lm: Any, default: int) -> int:
    """Tokens that a model may think per call: its budget, at most `LIMIT`; `default` without one."""
    thinking = getattr(lm, "thinking", None)
    limit = None if thinking is None else thinking.limit
    return default if limit is None else min(int(limit), LIMIT)


@dataclass(frozen=True)
class _Plan:
    """A call with its budget applied: `removed` is the thought field that it has no longer.

    `thinking` is what is left of the budget for the engine; None without one.
    """

    thinking: Thinking | None
    signature: Any
    removed: str = ""

    def options(self, lm: Any, lm_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model and the options of the call. A budget is set on the model: it is no option of DSPy's requests."""
        if self.thinking is None or not hasattr(lm, "thinking"):
            return lm, lm_kwargs
        lm_kwargs = {name: value for name, value in lm_kwargs.items() if name != "thinking"}
        return (lm if lm.thinking == self.thinking else lm.copy(thinking=self.thinking)), lm_kwargs


class LimitsThoughts:
    """Mixin of adapters.

    If the model does not think by itself, the budget becomes the limit of the output field `thought` or `reasoning`;
    without a budget (`off`) the field is left out of the prompt and is "" in the prediction. A program without such a
    field does not think, which every budget allows.
    """

    without_limits = ""  # name of the format if it sends no schema that limits the length of a field

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        plan = self._plan(lm, lm_kwargs, signature)
        lm, lm_kwargs = plan.options(lm, lm_kwargs)
        outputs = super().__call__(lm, lm_kwargs, plan.signature, demos, inputs)  # type: ignore[misc]
        return _restored(outputs, plan.removed)

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        plan = self._plan(lm, lm_kwargs, signature)
        lm, lm_kwargs = plan.options(lm, lm_kwargs)
        outputs = await super().acall(lm, lm_kwargs, plan.signature, demos, inputs)  # type: ignore[misc]
        return _restored(outputs, plan.removed)

    def left_of(self, lm: Any, thinking: Thinking, signature: Any) -> Thinking:
        """What is left of a call's budget for the engine; `auto` if the thought field keeps it.

        Raises:
            ThinkingError: the field cannot keep it.
        """
        left = self._plan(lm, {"thinking": thinking}, signature).thinking
        return Thinking.auto() if left is None else left

    def _plan(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any) -> _Plan:
        thinking = Thinking.of(lm_kwargs.get("thinking", getattr(lm, "thinking", None)))
        if thinking is None or thinking.is_auto or native_thinking(lm):
            return _Plan(thinking, signature)
        name = next((name for name in THOUGHT_FIELDS if name in signature.output_fields), "")
        if not name or (thinking.is_off and len(signature.output_fields) > 1):
            return _Plan(Thinking.auto(), signature.delete(name) if name else signature, name)
        limits = supports(lm, LINES) or getattr(lm, "supports_response_schema", False)
        if thinking.is_off or self.without_limits or not limits:
            reason, advice = "it is the only output field", ""
            if not thinking.is_off and self.without_limits:
                reason, advice = (
                    f"the prompt format {self.without_limits} sends no schema that limits it",
                    "Use json or lean",
                )
            elif not thinking.is_off:
                reason = f"{lm.model} is not known to take a schema that limits it"
                advice = "Name a server that does (api_base=…), or a model that thinks by itself"
            raise ThinkingError(thinking.value, f" cannot be kept in the field {name!r}: {reason}", advice)
        field, tokens = signature.output_fields[name], thinking.limit or 0
        if field.annotation is not str:
            raise ThinkingError(
                thinking.value, f" cannot limit the field {name!r} of type {field.annotation}: make it a str"
            )
        return _Plan(Thinking.auto(), _limited(signature, name, tokens))


def _limited(signature: Any, name: str, tokens: int) -> Any:
    at = list(signature.output_fields).index(name)
    return signature.delete(name).insert(at, name, thought_field(tokens), str)


def _restored(outputs: list[dict[str, Any]], removed: str) -> list[dict[str, Any]]:
    return [{removed: "", **output} for output in outputs] if removed else outputs
