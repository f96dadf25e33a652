"""Variants of a decision's signature: with a thinking budget, with a stated need, with fewer actions."""

import functools
from typing import Any, Literal

import dspy

from assay.programs.thinking import thought_field

__all__ = ["decision_signature", "narrowed_signature"]


@functools.lru_cache(maxsize=256)
def narrowed_signature(signature: Any, actions: tuple[str, ...]) -> Any:
    """The decision signature with fewer actions."""
    return signature.with_updated_fields("action", type_=Literal[actions])


@functools.lru_cache(maxsize=256)
def decision_signature(signature: Any, tokens: int, stated: bool, continued: bool = False) -> Any:
    """The decision signature with a thinking budget, and with the field `need` if the engine gives no probabilities.

    Args:
        continued: whether there are earlier thoughts.
    """
    decision = signature.delete("thought")
    if continued:
        decision = decision.append("thoughts", dspy.InputField(desc="your thoughts so far"), str)
    if tokens:
        decision = decision.prepend("thought", thought_field(tokens), str)
    if stated:
        decision = decision.append(
            "need", dspy.OutputField(desc="how likely a tool is needed, from 0 to 1", ge=0, le=1), float
        )
    return decision
