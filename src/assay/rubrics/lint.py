"""Static checks for likely mistakes in a rubric. Calls no model."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from assay.rubrics import checks
from assay.rubrics.criteria import Criterion
from assay.rubrics.rubric import Rubric

_ALIKE = 0.8  # SequenceMatcher ratio of two questions' words from which they count as duplicates
_JOINED = re.compile(r"\b(and|or|as well as)\b|;|\?.*\?|\w, \w[\w-]*, \w", re.IGNORECASE)
_JOINED_QUESTIONS = re.compile(
    r"\b(between|both) [\w ]+? and\b|\band/or\b|\bpros and cons\b|\bquestion and answer\b"
    r"|\b(one|two|more|less|whether) or (more|less|not|two|three)\b|\bor (not|no|false|none|wrong|otherwise)\b",
    re.IGNORECASE,
)
_UNSEEN = {
    "tool calls": r"\btools?\b|\b(function|API) calls?\b"
    r"|\b(us(es?|ed|ing)|calls?|called) (the |a )?(calculator|search|interpreter|API)\b",
    "the steps or reasoning before the answer": r"\b(previous|earlier|intermediate) (steps?|turns?|messages?)\b"
    r"|\bchain of thought\b",
    "a reference answer": r"\b(reference|gold|golden|expected|ground[- ]truth|correct) "
    r"(answer|solution|output|response|label)\b|\b(the|a) (reference|gold)\b",
    "sources or a context": r"\b(source|retrieved|provided) (documents?|texts?|passages?|context)\b"
    r"|\bcitations? (is|are) (real|correct)\b",
    "latency or cost": r"\b(latency|response time|cost|tokens used)\b",
    "other outputs": r"\bcompared (to|with) (the )?other\b|\bbetter than (the )?other\b|\bthe best of\b",
}


@dataclass(frozen=True)
class Finding:
    """A likely mistake. `rule` is `compound`, `unseen`, `duplicate`, `weight` or `condition`; `text` has the fix."""

    criterion: str
    rule: str
    text: str


def lint_rubric(rubric: Rubric, *, used: Callable[[str], str] | None = None) -> list[Finding]:
    """Finds likely mistakes in a rubric by word patterns. Findings can be wrong.

    Reports criteria that ask two questions at once, ask about something the judge does not see, occur twice, have a
    negligible weight, or penalize the length of wrong answers.

    Args:
        used: returns the question of a judge referenced by `use`; without it those criteria are skipped.
    """
    judged = [(c, c.judge.text or (used(c.judge.use) if used else "")) for c in rubric.criteria if c.judge is not None]
    return [
        *(f for c, text in judged if text for f in _question_findings(c, text)),
        *_duplicates(rubric),
        *_weights(rubric),
        *_lengths(rubric),
    ]


def _question_findings(c: Criterion, text: str) -> Iterator[Finding]:
    if match := _JOINED.search(_JOINED_QUESTIONS.sub("", text)):
        problem = "asks more than one question" if "?" in match[0] else f"joins two questions with {match[0]!r}"
        yield Finding(
            c.name, "compound", f"{problem}: if only one half is true, no verdict is right; split it into two criteria"
        )
    for problem, pattern in _UNSEEN.items():
        if re.search(pattern, text, re.IGNORECASE):
            message = f"asks about {problem}, but a judge sees only the task's inputs and the output"
            yield Finding(c.name, "unseen", f"{message}; use a check, or add it as a field")
    for name in re.findall(r"\{(\w+)\}", text):
        message = f"{{{name}}} is not replaced: the judge sees the text unchanged"
        yield Finding(c.name, "unseen", f"{message}; name what to judge in words")


def _duplicates(rubric: Rubric) -> Iterator[Finding]:
    for first, second in itertools.combinations(rubric.criteria, 2):
        if first.scope != second.scope:
            continue
        if first.judge and second.judge:
            if first.judge.use and first.judge.use == second.judge.use:
                yield Finding(second.name, "duplicate", f"uses the same judge as {first.name!r}: it counts twice")
            elif first.judge.text and second.judge.text and _alike(first.judge.text, second.judge.text) >= _ALIKE:
                yield Finding(second.name, "duplicate", f"asks nearly the same as {first.name!r}: it counts twice")
        elif first.check is not None and first.check is second.check and first.arguments == second.arguments:
            message = f"is the same check as {first.name!r} with the same arguments: it counts twice"
            yield Finding(second.name, "duplicate", message)


def _alike(a: str, b: str) -> float:
    words: list[Any] = [re.findall(r"\w+", text.casefold()) for text in (a, b)]
    return difflib.SequenceMatcher(None, *words).ratio()


def _weights(rubric: Rubric) -> Iterator[Finding]:
    finals = [c for c in rubric.criteria if c.scope == "final"]
    total = sum(abs(c.weight) for c in finals)
    for c in finals:
        if c.essential is None and abs(c.weight) < 0.01 * total:
            share = abs(c.weight) / total
            yield Finding(
                c.name, "weight", f"has {share:.1%} of the total weight and no cap: it barely changes the score"
            )


def _lengths(rubric: Rubric) -> Iterator[Finding]:
    """Penalties of length, steps or tokens that also apply to wrong answers."""
    correct = (
        next((c.name for c in rubric.finals if c.essential is not None), None)
        or max(rubric.finals, key=lambda c: c.weight).name
    )
    for c in rubric.criteria:
        if c.weight < 0 and not c.when and c.check in (checks.length, checks.steps_used, checks.token_use):
            text = "also counts if the answer is wrong, which trains a model to think less on hard tasks"
            yield Finding(c.name, "condition", f"{text}; add `when: {correct}`")
