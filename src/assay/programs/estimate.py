"""Computes the probability of each choice from the token log-probabilities of an answer. Calls no model."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.models import supports
from assay.models.codec import value_tokens
from assay.programs.thinking import margin_of
from assay.support.sections import LINES

_FLOOR = 1e-9
_QUOTES = " \t\n\"'`"
_ENDS = "\"'`\n\r\t ,.}]"  # characters that can follow a value


def logprobs_options(lm: Any) -> dict[str, Any]:
    """Options for the alternatives of the action's tokens: 200 from the embedded engine, 20 (the limit) from APIs."""
    return {"logprobs": True, "top_logprobs": 200 if supports(lm, LINES) else 20}


@functools.lru_cache(maxsize=256)
def narrowed_signature(signature: Any, actions: tuple[str, ...]) -> Any:
    """The signature of a decision with fewer actions."""
    return signature.with_updated_fields("action", type_=Literal[actions])


@dataclass
class Odds:
    """Probabilities of the choices; they sum to 1.

    The probability of a choice is the product over the tokens of its name of each token's probability among the tokens
    that continue any choice, as in sampling constrained to the choices. Engines report alternatives only along the
    written text. The probability of a choice that is the only one to diverge at a token is therefore known. If several
    choices diverge at the same token with the same beginning, only their sum is known, an upper bound for each.

    Args:
        together: such groups with their sum. Each choice of a group gets an equal part of it.
    """

    probabilities: dict[str, float]
    together: list[tuple[frozenset[str], float]] = field(default_factory=list)


def has_probabilities(prediction: Any) -> bool:
    """Whether the engine reported alternatives to the answer's tokens. Many servers ignore the request for them."""
    content = (prediction.get("logprobs") or {}).get("content") or []
    return any(token.get("top_logprobs") for token in content)


def choice_margin(prediction: Any, field: str, choices: Sequence[str]) -> float | None:
    """Difference of the probabilities of the best two choices; None without choices, or if the engine gave none."""
    if not choices or not has_probabilities(prediction):
        return None
    return margin_of(choice_probabilities(prediction, field, choices))


def choice_probabilities(prediction: Any, field: str, choices: Sequence[str]) -> dict[str, float]:
    """Returns the probability of each choice for `field`; see `choice_odds`."""
    return choice_odds(prediction, field, choices).probabilities


def choice_odds(prediction: Any, field: str, choices: Sequence[str]) -> Odds:
    """Computes the probability of each choice for `field` from the alternatives reported for the value's tokens.

    Without log-probabilities, the written choice has probability 1.
    """
    content = (prediction.get("logprobs") or {}).get("content") or []
    span = value_tokens([str(token["token"]) for token in content], field)
    groups = _groups([content[index] for index in span], choices)
    if not groups:
        written = str(prediction[field])
        groups = {frozenset({written}) if written in choices else frozenset(choices): 1.0}
    mass = dict.fromkeys(choices, _FLOOR)
    for group, probability in groups.items():
        if len(group) == 1:
            mass[next(iter(group))] += probability
    together = []
    for group, probability in groups.items():
        if len(group) > 1:
            known = math.fsum(mass[choice] for choice in group)
            # the group's sum is divided by what is known of its choices; if that is less than the sum, equally
            unknown = probability > known
            for choice in group:
                mass[choice] += probability / len(group) if unknown else probability * mass[choice] / known
            together += [(group, probability)] if unknown else []
    total = math.fsum(mass.values())
    return Odds(
        {choice: value / total for choice, value in mass.items()},
        [(group, probability / total) for group, probability in together],
    )


def _groups(tokens: Sequence[Any], choices: Sequence[str]) -> dict[frozenset[str], float]:
    """Groups of choices that diverge from the written text at the same token, with their probability.

    The written choice itself is one of the groups.
    """
    groups: dict[frozenset[str], float] = {}
    reach, value, alive = 1.0, "", frozenset(choices)
    for token in tokens:
        sampled, alternatives = str(token["token"]), _alternatives(token)
        weights = [(text, p, _fits(alive, _written(value, text))) for text, p in alternatives.items()]
        total = math.fsum(p for _, p, fits in weights if fits)
        if total <= 0:
            break
        continued = 0.0
        for text, p, fits in weights:
            if fits and text != sampled:
                groups[fits] = groups.get(fits, 0.0) + reach * p / total
            elif fits:
                continued, alive = p / total, fits
        reach *= continued
        value = _written(value, sampled)
        if not continued or len(alive) == 1:
            break
    if tokens and groups | {alive: reach} != {frozenset(choices): 1.0}:
        groups[alive] = groups.get(alive, 0.0) + reach
    return {group: p for group, p in groups.items() if p > 0}


def _written(done: str, token: str) -> str:
    """Appends a token to the value; a token without text ends it."""
    return done + (token or "\n") if done else token.lstrip(_QUOTES)


def _alternatives(token: Any) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for entry in token.get("top_logprobs") or []:
        alternatives[str(entry["token"])] = alternatives.get(str(entry["token"]), 0.0) + math.exp(entry["logprob"])
    if str(token["token"]) not in alternatives:  # engines do not guarantee that the sampled token is included
        alternatives[str(token["token"])] = math.exp(token["logprob"]) if alternatives and "logprob" in token else 1.0
    return alternatives


def _fits(choices: frozenset[str], text: str) -> frozenset[str]:
    """The choices that begin with the text, or that the text contains completely."""
    text = text.casefold()
    if not text:
        return frozenset()
    return frozenset(choice for choice in choices if _begins(choice.casefold(), text))


def _begins(choice: str, text: str) -> bool:
    if choice.startswith(text):
        return True
    rest = text[len(choice) :]
    return text.startswith(choice) and rest[0] in _ENDS
