"""What is likely to be wrong with a rubric, before anything is spent on it. Asks no model."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from assay.rubrics import checks
from assay.rubrics.criteria import Criterion
from assay.rubrics.rubric import Rubric

__all__ = ["Finding", "lint_rubric"]

_ALIKE = 0.8  # of two questions' words, above which they are called the same
_JOINED = re.compile(r"\b(and|or|as well as)\b|;|\?.*\?|\w, \w[\w-]*, \w", re.IGNORECASE)
_ONE_THING = re.compile(
    r"\b(between|both) [\w ]+? and\b|\band/or\b|\bpros and cons\b|\bquestion and answer\b"
    r"|\b(one|two|more|less|whether) or (more|less|not|two|three)\b|\bor (not|no|false|none|wrong|otherwise)\b",
    re.IGNORECASE,
)
_UNSEEN = {
    "the calls of tools": r"\btools?\b|\b(function|API) calls?\b|\b(us(es?|ed|ing)|calls?|called) (the |a )?(calculator|search|interpreter|API)\b",
    "the steps or the reasoning before the answer": r"\b(previous|earlier|intermediate) (steps?|turns?|messages?)\b|\bchain of thought\b",
    "a reference answer": r"\b(reference|gold|golden|expected|ground[- ]truth|correct) (answer|solution|output|response|label)\b"
    r"|\b(the|a) (reference|gold)\b",
    "sources or a context": r"\b(source|retrieved|provided) (documents?|texts?|passages?|context)\b|\bcitations? (is|are) (real|correct)\b",
    "how long it took or what it cost": r"\b(latency|response time|cost|tokens used)\b",
    "other outputs": r"\bcompared (to|with) (the )?other\b|\bbetter than (the )?other\b|\bthe best of\b",
}


@dataclass(frozen=True)
class Finding:
    """`rule` is `compound`, `unseen`, `duplicate`, `weight` or `condition`; `text` says what to do."""

    criterion: str
    rule: str
    text: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def lint_rubric(rubric: Rubric, *, used: Callable[[str], str] | None = None) -> list[Finding]:
    """Criteria that ask two things at once, that ask about what a judge is not shown, that are there twice, that count
    for nothing, or penalise length where the answer is wrong. Findings are likely, not certain: they are patterns of words.

    Args:
        used: gives the question of a judge that a criterion uses from elsewhere; without it those are not looked at.
    """
    judged = [(c, c.judge.text or (used(c.judge.use) if used else "")) for c in rubric.criteria if c.judge is not None]
    return [*(f for c, text in judged if text for f in _of_question(c, text)), *_duplicates(rubric), *_weights(rubric), *_lengths(rubric)]


def _of_question(c: Criterion, text: str) -> Iterator[Finding]:
    if found := _JOINED.search(_ONE_THING.sub("", text)):
        what = "asks more than one question" if "?" in found[0] else f"joins two things by {found[0]!r}"
        yield Finding(c.name, "compound", f"{what}: a judge that agrees with one half has no verdict to give; make two criteria of it")
    for what, pattern in _UNSEEN.items():
        if re.search(pattern, text, re.IGNORECASE):
            yield Finding(
                c.name, "unseen", f"asks about {what}, and a judge sees the task's inputs and the output; use a check, or show it as a field"
            )
    for name in re.findall(r"\{(\w+)\}", text):
        yield Finding(c.name, "unseen", f"{{{name}}} is not filled in: a judge's text is shown as it is; say in words what to look at")


def _duplicates(rubric: Rubric) -> Iterator[Finding]:
    for first, second in itertools.combinations(rubric.criteria, 2):
        if first.scope != second.scope:
            continue
        if first.judge and second.judge:
            if first.judge.use and first.judge.use == second.judge.use:
                yield Finding(second.name, "duplicate", f"uses the same judge as {first.name!r}: it counts twice")
            elif first.judge.text and second.judge.text and _alike(first.judge.text, second.judge.text) >= _ALIKE:
                yield Finding(second.name, "duplicate", f"asks nearly what {first.name!r} asks: it counts twice")
        elif first.check is not None and first.check is second.check and dict(first.arguments) == dict(second.arguments):
            yield Finding(second.name, "duplicate", f"is the same check as {first.name!r} with the same arguments: it counts twice")


def _alike(a: str, b: str) -> float:
    words: list[Any] = [re.findall(r"\w+", text.casefold()) for text in (a, b)]
    return difflib.SequenceMatcher(None, *words).ratio()


def _weights(rubric: Rubric) -> Iterator[Finding]:
    finals = [c for c in rubric.criteria if c.scope == "final"]
    total = sum(abs(c.weight) for c in finals)
    for c in finals:
        if c.essential is None and abs(c.weight) < 0.01 * total:
            yield Finding(c.name, "weight", f"weighs {abs(c.weight) / total:.1%} of the rubric and caps nothing: its verdict changes no score")


def _lengths(rubric: Rubric) -> Iterator[Finding]:
    """Penalties of length, steps or tokens that also count on wrong answers."""
    right = next((c.name for c in rubric.finals if c.essential is not None), None) or max(rubric.finals, key=lambda c: c.weight).name
    for c in rubric.criteria:
        if c.weight < 0 and not c.when and c.check in (checks.length, checks.steps_used, checks.token_use):
            text = f"also counts where the answer is wrong, which teaches a model to think less on hard tasks; add `when: {right}`"
            yield Finding(c.name, "condition", text)
