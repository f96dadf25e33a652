"""Which alternatives of an answer's tokens are kept: the likely ones, where something reads them.

An engine that is asked for alternatives lists them at every token, 200 of them at 60 tokens for one decision: 659 kB. Only the probable ones
matter, and where one output field is read (`assay.models.scope.alternatives_of`) only its value's own tokens do. The sampled tokens keep their
log-probabilities and ids.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy import lm15

__all__ = ["LEAST", "pruned", "pruned_reply", "value_tokens"]

LEAST = 1e-4  # probability; leaving out what is below it moved no decision of 132 stored ones by more than 1e-4
_LEAST_LOG = math.log(LEAST)
_END = re.compile(r"[\"\n]")


def value_tokens(tokens: Sequence[str], field: str) -> range:
    """Indices of the tokens that write the field's value, with the one that ends it; empty where the field is not found.

    Reads JSON (`"field": "value"`), lines (`field: value`) and DSPy's sections (`[[ ## field ## ]]`); of several the last.
    """
    text, starts = "", []
    for token in tokens:
        starts.append(len(text))
        text += token
    marks = list(re.finditer(rf'\b{re.escape(field)}"?\s*(?:## \]\])?\s*:?\s*"?', text))
    if not marks:
        return range(0)
    at = marks[-1].end()
    end = found.start() if (found := _END.search(text, at)) else len(text)
    inside = [index for index, start in enumerate(starts) if start <= end and at < start + len(tokens[index])]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def pruned_reply(reply: dict[str, Any], *, asked: bool, field: str | None) -> None:
    """Leaves out of a raw chat completion the alternatives that nothing reads, before it is parsed.

    Args:
        asked: whether alternatives were asked for; the engine lists one at each token anyway.
    """
    for choice in reply.get("choices") or ():
        content = ((choice or {}).get("logprobs") or {}).get("content") or []
        kept = _kept([str(token.get("token", "")) for token in content], field) if asked else range(0)
        for index, token in enumerate(content):
            alternatives = token.get("top_logprobs") or [] if index in kept else []
            token["top_logprobs"] = [one for one in alternatives if one["logprob"] >= _LEAST_LOG]


def pruned(response: "lm15.Response", field: str | None) -> "lm15.Response":
    """The same of a parsed response, from any engine."""
    tokens = response.logprobs
    if not tokens or not any(token.top for token in tokens):
        return response
    kept = _kept([token.token for token in tokens], field)
    if all(index in kept and all(one.logprob >= _LEAST_LOG for one in token.top) for index, token in enumerate(tokens) if token.top):
        return response
    lean = (
        dataclasses.replace(token, top=tuple(one for one in token.top if one.logprob >= _LEAST_LOG) if index in kept else ())
        for index, token in enumerate(tokens)
    )
    return dataclasses.replace(response, logprobs=tuple(lean))


def _kept(tokens: Sequence[str], field: str | None) -> range:
    """All tokens, or those of the field's value; all of an answer in which the field is not found."""
    return (value_tokens(tokens, field) if field else None) or range(len(tokens))
