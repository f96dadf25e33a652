"""Checks of conversations: completion at the end, and what the user does after each turn.

`completed`, `filled` and `turns_used` are of scope `final`. The others are of scope `step` and need no judge: they
grade the last LM call of a turn by the user's next message, and raise `NoGrade` for other calls. They are pitfalls: the
grade is 1 if the user repeats, corrects, escalates or gives up. The messages are the prediction's field `messages` with
`turn_calls` (as `converse` has them), otherwise those in the recorded requests: conversations of any agent can be
graded.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.datasets import Task
from assay.rubrics.checks import same
from assay.rubrics.criteria import Grade, NoGrade, not_expected
from assay.rubrics.steps import plain_text, step_of
from assay.traces.messages.chaining import requests_of
from assay.traces.messages.dialects import chat_messages, part_texts
from assay.traces.records import Rollout, Transition

__all__ = [
    "completed",
    "filled",
    "judged_turn",
    "told_unasked",
    "turns_used",
    "user_corrected",
    "user_escalated",
    "user_gave_up",
    "user_repeated",
]

_ALIKE = 0.6  # Jaccard similarity of the words of two messages of a user, from which one rephrases the other
_FEW = 3  # words that a message needs to be compared: "yes, please" repeats nothing
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an the i we you it is are was be to of in on at for and or my me us your please would like will can do does "
        "have has this that there with",
    )
)
_REPEATS = re.compile(
    r"\b(i (have )?(already|just) (said|told|gave|mentioned)|(as|like) i (just |already )?(said|told)|i repeat)\b",
    re.I,
)
_CORRECTS = re.compile(
    r"^\s*no\b[,.!]|\b(that('s| is) (wrong|incorrect|not (right|what|correct)))\b|\bis wrong\b|\bi meant\b"
    r"|\bi said\b.*\bnot\b"
    r"|\bshould be\b.*\bnot\b|\bi did ?n[o']t (say|mean|ask)\b",
    re.I,
)
_ESCALATES = re.compile(
    r"\b(speak|talk|connect me|put me through)\b.{0,20}\b(person|human|manager|supervisor|someone|somebody)\b"
    r"|\breal person\b|\bcomplain(t)?\b",
    re.I,
)
_GIVES_UP = re.compile(
    r"\b(never ?mind|forget it|i give up|this is (useless|hopeless)|waste of (my )?time"
    r"|i('ll| will) (try|go|call|ask|look) (somewhere|elsewhere|someone|somebody))\b",
    re.I,
)


@dataclass(frozen=True)
class _Turn:
    """A reply of the agent with the user's messages before it and the one after it."""

    before: tuple[str, ...]
    reply: str
    after: str


def completed(task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str = "outcome") -> Grade:
    """Grade 1 if the outcome has every expected value, and the user did not give up and was not cut off.

    Values are compared by `assay.rubrics.checks.same`, texts without a final period. A prediction without `ended`
    is graded by its outcome.

    Args:
        field: output field with the outcome, and the expected field with its values.
    """
    wrong = _differences(task, prediction, field)
    if (ended := prediction.get("ended")) in ("gave_up", "limit"):
        return Grade.of(False, "The user gave up." if ended == "gave_up" else "The conversation did not end by itself.")
    return Grade.of(not wrong, "; ".join(wrong)[:300])


def filled(task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str = "outcome") -> Grade:
    """Share of the expected values that the outcome has.

    Args:
        field: output field with the outcome, and the expected field with its values.
    """
    wrong = _differences(task, prediction, field)
    return Grade(value=1 - len(wrong) / len(task.expected[field]), reason="; ".join(wrong)[:300])


def _differences(task: Task, prediction: Mapping[str, Any], field: str) -> list[str]:
    expected = task.expected.get(field)
    if not isinstance(expected, Mapping) or not expected:
        raise not_expected(task, field, with_what=" with values by name")
    made = prediction.get(field)
    if not isinstance(made, Mapping):
        return [f"{field} is not a mapping of names to values"] * len(expected)
    return [
        f"{name} is {made.get(name)!r}" if name in made else f"{name} is missing"
        for name, value in expected.items()
        if name not in made or not _is_equal(made[name], value)
    ]


def _is_equal(value: Any, expected: Any) -> bool:
    if value is None or expected is None:
        return value is expected
    return same(value, expected) or plain_text(value) == plain_text(expected)


def turns_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: int | None = None) -> Grade:
    """For a pitfall: 0 up to `budget` turns of the agent, rising linearly to 1 at twice the budget.

    Args:
        budget: default: `turns` of the task's metadata.
    """
    messages = prediction.get("messages")
    if not isinstance(messages, list | tuple):
        raise NoGrade("the turns are unknown: the prediction has no field 'messages'")
    needed: Any = task.metadata.get("turns") if budget is None else budget
    if not isinstance(needed, int) or isinstance(needed, bool) or needed < 1:
        raise NoGrade(f"task {task.id!r} does not say how many turns it needs: set budget, or turns in its metadata")
    turns = sum(isinstance(message, Mapping) and message.get("role") != "user" for message in messages)
    return Grade.beyond(turns, needed, f"{turns} turns, {needed} are enough.")


def user_repeated(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the user's next message repeats or rephrases an earlier one, or says that it does."""

    def repeats(turn: _Turn) -> bool:
        words = _words(turn.after)
        alike = any(
            len(words | _words(earlier)) and len(words & _words(earlier)) / len(words | _words(earlier)) >= _ALIKE
            for earlier in turn.before
        )
        return bool(_REPEATS.search(turn.after)) or (len(words) >= _FEW and alike)

    return _graded(prediction, rollout, repeats)


def user_corrected(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the user's next message corrects something."""
    return _graded(prediction, rollout, lambda turn: bool(_CORRECTS.search(turn.after)))


def user_escalated(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the user's next message asks for a person or complains."""
    return _graded(prediction, rollout, lambda turn: bool(_ESCALATES.search(turn.after)))


def user_gave_up(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the user gives up in the next message."""
    return _graded(prediction, rollout, lambda turn: bool(_GIVES_UP.search(turn.after)))


def told_unasked(user: Any, messages: Any) -> list[str]:
    """Names of the facts of a simulated user that it told before an agent could ask for them.

    A fact counts if the user tells it in its first message, or together with another one after a reply that has no word
    of it. What the goal or an earlier message says is not told.

    Args:
        user: `goal` and `facts`, as in the inputs of a task.
        messages: each with `role` and `content`.
    """
    facts = user.get("facts") if isinstance(user, Mapping) else None
    if not isinstance(facts, Mapping) or not isinstance(messages, list | tuple):
        return []
    told: list[str] = []
    asked = str(user.get("goal", ""))
    known = set(_facts_in(asked, facts))
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        text = str(message.get("content", ""))
        stated = _facts_in(text, facts)
        if message.get("role") == "user":
            new = [name for name in stated if name not in known]
            if at == 0 or len(new) > 1:
                told += [name for name in new if at == 0 or not _asks(asked, name, facts[name])]
        else:
            asked = text
        known.update(stated)
    return told


def _facts_in(text: str, facts: Mapping[Any, Any]) -> list[str]:
    """The facts whose values are in a text. A text counts once: "June 4" does not tell the value "4" too."""
    found, text = [], text.casefold()
    values = {name: fact.get("value") if isinstance(fact, Mapping) else fact for name, fact in facts.items()}
    stated = {name: str(value) for name, value in values.items() if value is not None and str(value).strip()}
    for name, value in sorted(stated.items(), key=lambda item: -len(item[1])):
        if match := re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text):
            text = f"{text[: match.start()]}|{text[match.end() :]}"
            found.append(name)
    return found


def _asks(reply: str, name: Any, fact: Any) -> bool:
    words = fact.get("asked_by", ()) if isinstance(fact, Mapping) else ()
    asking = [str(name).replace("_", " "), *([words] if isinstance(words, str) else words)]
    return bool(_words(reply) & _words(" ".join(map(str, asking))))


class TurnFields(dict[str, Any]):
    """A prediction of which a judge grades `output` alone; other fields are seen by judges that show them."""


def judged_turn(grader: Any) -> Callable[[Task, dict[str, Any], Rollout | None], Any]:
    """A step check that grades a turn by a judge: `Criterion(scope="step", check=judged_turn(grader))`.

    The judge sees the reply as `output`, with the fields `earlier` (what the user said before) and `reaction` (the
    user's next message).

    Args:
        grader: from `assay.load_verifier`, or any check.
    """

    def turn(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Any:
        turn = _turn(prediction, rollout)
        fields = TurnFields(output=turn.reply, earlier="\n".join(turn.before), reaction=turn.after)
        return grader(task, fields, None)

    return turn


def _graded(prediction: dict[str, Any], rollout: Rollout | None, holds: Callable[[_Turn], bool]) -> Grade:
    turn = _turn(prediction, rollout)
    value = holds(turn)
    return Grade(value=float(value), reason=turn.after[:200] if value else "")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold())) - _COMMON


def _turn(prediction: Mapping[str, Any], rollout: Rollout | None) -> _Turn:
    """The turn that the graded LM call ends.

    Raises:
        NoGrade: the call ends no turn, or the messages are unknown.
    """
    transition = step_of(prediction)
    if rollout is None:
        raise NoGrade("the user's next message is unknown without a rollout")
    made = rollout.prediction or {}
    messages, calls = made.get("messages"), made.get("turn_calls")
    if isinstance(messages, list | tuple) and isinstance(calls, list | tuple):
        return _turn_of_program(transition.t, messages, calls)
    return _turn_of_requests(transition, rollout)


def _turn_of_program(t: int, messages: Sequence[Mapping[str, str]], calls: Sequence[Any]) -> _Turn:
    at = next((n for n, span in enumerate(calls) if span and span[1] - 1 == t and span[1] > span[0]), None)
    places = [place for place, message in enumerate(messages) if message["role"] == "agent"]
    if at is None or at >= len(places) or places[at] + 1 >= len(messages):
        raise NoGrade("the call ended no turn that the user answered")
    earlier = tuple(message["content"] for message in messages[: places[at]] if message["role"] == "user")
    return _Turn(earlier, messages[places[at]]["content"], messages[places[at] + 1]["content"])


def _turn_of_requests(transition: Transition, rollout: Rollout) -> _Turn:
    """From the request of the next call: it has the user's messages so far, and one more."""
    calls = rollout.transitions
    users = {call.t: _user_messages(sent or call.request) for call, sent in zip(calls, requests_of(calls), strict=True)}
    before = users.get(transition.t, [])
    after = next((users[call.t] for call in calls if call.t > transition.t), [])
    if len(after) <= len(before) or not before:
        raise NoGrade("the call ended no turn that the user answered")
    return _Turn(tuple(before), transition.output, after[len(before)])


def _user_messages(request: Mapping[str, Any]) -> list[str]:
    messages = chat_messages(request)
    return [part_texts(message.get("content")) for message in messages if message.get("role") == "user"]
