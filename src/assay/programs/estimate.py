"""Reads how likely each choice was from the token log-probabilities of an answer. Calls no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.models.alternatives import value_tokens

__all__ = ["Odds", "choice_odds", "choice_probabilities"]

_FLOOR = 1e-9
_QUOTES = " \t\n\"'`"
_ENDS = "\"'`\n\r\t ,.}]"  # what follows the last character of a value


@dataclass
class Odds:
    """Probability of each choice, summing to 1.

    A choice is scored over all tokens of its name: the product, along the name, of each token's probability among the tokens that a choice
    could go on with there (as an engine samples that is constrained to the choices). Engines list alternatives only along what they wrote.
    So a choice that leaves the written text alone is exact, to within `LEAST` a token; of choices that leave it together only the sum is
    known, which bounds each of them from above. They are in `together` with that sum, and each has an equal part of it.
    """

    probabilities: dict[str, float]
    together: list[tuple[frozenset[str], float]] = field(default_factory=list)  # choices and the probability of their group


def choice_probabilities(prediction: Any, field: str, choices: Sequence[str]) -> dict[str, float]:
    """Probability of each choice for `field`, summing to 1; see `choice_odds`."""
    return choice_odds(prediction, field, choices).probabilities


def choice_odds(prediction: Any, field: str, choices: Sequence[str]) -> Odds:
    """Probability of each choice for `field`, read along the tokens of the field's value from the alternatives that the engine lists there.

    Without log-probabilities the written choice has all.
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
            # what is known of them divides the rest; a group of which nothing else is known is divided equally, and said to be
            alike = probability > known
            for choice in group:
                mass[choice] += probability / len(group) if alike else probability * mass[choice] / known
            together += [(group, probability)] if alike else []
    total = math.fsum(mass.values())
    return Odds({choice: value / total for choice, value in mass.items()}, [(group, probability / total) for group, probability in together])


def _groups(tokens: Sequence[Any], choices: Sequence[str]) -> dict[frozenset[str], float]:
    """Choices that leave the written text at the same token, and the probability that they do; those it ends in are among them."""
    groups: dict[frozenset[str], float] = {}
    reach, done, alive = 1.0, "", frozenset(choices)
    for token in tokens:
        taken, found = str(token["token"]), _alternatives(token)
        weights = [(text, p, _fits(alive, _written(done, text))) for text, p in found.items()]
        total = math.fsum(p for _, p, fits in weights if fits)
        if total <= 0:
            break
        onwards = 0.0
        for text, p, fits in weights:
            if fits and text != taken:
                groups[fits] = groups.get(fits, 0.0) + reach * p / total
            elif fits:
                onwards, alive = p / total, fits
        reach *= onwards
        done = _written(done, taken)
        if not onwards or len(alive) == 1:
            break
    if tokens and groups | {alive: reach} != {frozenset(choices): 1.0}:
        groups[alive] = groups.get(alive, 0.0) + reach
    return {group: p for group, p in groups.items() if p > 0}


def _written(done: str, token: str) -> str:
    """The value with a further token; one without text ends it."""
    return done + (token or "\n") if done else token.lstrip(_QUOTES)


def _alternatives(token: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in token.get("top_logprobs") or []:
        found[str(one["token"])] = found.get(str(one["token"]), 0.0) + math.exp(one["logprob"])
    if str(token["token"]) not in found:  # no engine promises that the sampled token is among them
        found[str(token["token"])] = math.exp(token["logprob"]) if found and "logprob" in token else 1.0
    return found


def _fits(choices: frozenset[str], text: str) -> frozenset[str]:
    """Of the choices those that the text begins, or that it ends after."""
    text = text.casefold()
    if not text:
        return frozenset()
    return frozenset(choice for choice in choices if _begins(choice.casefold(), text))


def _begins(choice: str, text: str) -> bool:
    if choice.startswith(text):
        return True
    rest = text[len(choice) :]
    return text.startswith(choice) and rest[0] in _ENDS
