"""Prunes the token alternatives (top logprobs) of a response to the likely ones that a caller reads.

An engine that is asked for alternatives lists them at every token: 200 alternatives at 60 tokens take 659 kB, for one
decision. Only the probable ones matter. Where a single output field is read (`assay.models.scope.alternatives_of`),
only the tokens of its value matter. The sampled tokens keep their log-probabilities and ids.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.support.sections import sections_in

if TYPE_CHECKING:
    from dspy import lm15

LEAST = 1e-4  # probability; without alternatives below it, none of 132 stored decisions changed by more than 1e-4
_LEAST_LOG = math.log(LEAST)


def value_tokens(tokens: Sequence[str], field: str) -> range:
    """Indices of the tokens that write the value of an output field, including the token that ends it.

    Reads every prompt format. The last occurrence counts, and of its value the first line. Empty if the field is not
    found.
    """
    text, starts = "", []
    for token in tokens:
        starts.append(len(text))
        text += token
    sections = sections_in(text, (field,))
    if not sections:
        return range(0)
    at, written = sections[-1].start, text[sections[-1].start : sections[-1].end]
    quoted = written.startswith('"')
    at += quoted
    end = at + len(re.split(r"[\"\n]" if quoted else r"\n", written[quoted:], maxsplit=1)[0])
    inside = [index for index, start in enumerate(starts) if start <= end and at < start + len(tokens[index])]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def pruned_reply(reply: dict[str, Any], *, requested: bool, field: str | None) -> None:
    """Remove the alternatives that no caller reads from a raw chat completion, in place, before it is parsed.

    Args:
        requested: whether the caller requested alternatives; llama.cpp lists one per token in any case.
        field: output field whose alternatives are read; None keeps those of all tokens.
    """
    for choice in reply.get("choices") or ():
        content = ((choice or {}).get("logprobs") or {}).get("content") or []
        indices = _indices([str(token.get("token", "")) for token in content], field) if requested else range(0)
        for index, token in enumerate(content):
            alternatives = token.get("top_logprobs") or [] if index in indices else []
            token["top_logprobs"] = [top for top in alternatives if top["logprob"] >= _LEAST_LOG]


def pruned(response: "lm15.Response", field: str | None) -> "lm15.Response":
    """`pruned_reply` for a parsed response of any engine; returns the same object if nothing is removed."""
    tokens = response.logprobs
    if not tokens or not any(token.top for token in tokens):
        return response
    indices = _indices([token.token for token in tokens], field)
    if all(
        index in indices and all(top.logprob >= _LEAST_LOG for top in token.top)
        for index, token in enumerate(tokens)
        if token.top
    ):
        return response
    lean = (
        dataclasses.replace(
            token, top=tuple(top for top in token.top if top.logprob >= _LEAST_LOG) if index in indices else ()
        )
        for index, token in enumerate(tokens)
    )
    return dataclasses.replace(response, logprobs=tuple(lean))


def _indices(tokens: Sequence[str], field: str | None) -> range:
    """Indices of the field's value tokens; of all tokens without a field, or if the field is not found."""
    return (value_tokens(tokens, field) if field else None) or range(len(tokens))
