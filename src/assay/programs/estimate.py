"""Reads how likely each choice was from the token log-probabilities of an answer. Calls no model."""

import math
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["choice_probabilities"]

_FLOOR = 1e-9


def choice_probabilities(prediction: Any, field: str, choices: Sequence[str]) -> dict[str, float]:
    """Probability of each choice for `field`, summing to 1.

    Read at the first token of the field's value, from the alternatives the engine lists there; a token that begins
    several choices counts for each in equal parts. Without log-probabilities the written choice has all.
    """
    written = str(prediction[field])
    token = _first_token(prediction, field)
    mass = dict.fromkeys(choices, _FLOOR)
    for alternative in (token or {}).get("top_logprobs") or []:
        text = str(alternative["token"]).strip(" \t\n\"'`").casefold()
        fits = [choice for choice in choices if text and (choice.casefold().startswith(text) or text.startswith(choice.casefold()))]
        for choice in fits:
            mass[choice] += math.exp(alternative["logprob"]) / len(fits)
    if max(mass.values()) <= _FLOOR and written in mass:
        mass[written] = 1.0
    total = math.fsum(mass.values())
    return {choice: value / total for choice, value in mass.items()}


def _first_token(prediction: Any, field: str) -> dict[str, Any] | None:
    """The token in which the field's value begins."""
    content = (prediction.get("logprobs") or {}).get("content") or []
    text, starts = "", []
    for token in content:
        starts.append(len(text))
        text += str(token["token"])
    marks = list(re.finditer(rf'\b{re.escape(field)}"?\s*(?:## \]\])?\s*:?\s*"?', text))
    if not marks:
        return None
    at = marks[-1].end()
    for start, token in zip(starts, content, strict=True):
        if start <= at < start + len(str(token["token"])):
            return dict(token)
    return None
