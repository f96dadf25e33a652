"""Checks of conversations: completion, and signals of the user's next message."""

from typing import Any

import pytest

from assay.datasets.tasks import make_task
from assay.rubrics import Criterion, Grade, NoGrade, Rubric
from assay.rubrics.conversations import (
    completed,
    filled,
    judged_turn,
    told_unasked,
    turns_used,
    user_corrected,
    user_escalated,
    user_gave_up,
    user_repeated,
)
from assay.traces.records import Rollout, Transition

TASK = make_task(
    {"inputs": {"service": "x"}, "expected": {"outcome": {"day": "Friday", "people": "4"}}, "metadata": {"turns": 2}}
)


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": "agent" if at % 2 else "user", "content": content} for at, content in enumerate(contents)]


def grade(check: Any, prediction: dict[str, Any], **arguments: Any) -> float:
    return check(TASK, prediction, None, **arguments).value


def test_completed_needs_every_value_and_a_user_who_did_not_leave() -> None:
    right = {"day": "friday", "people": " 4 "}
    assert grade(completed, {"outcome": right, "ended": "done"}) == 1
    assert grade(completed, {"outcome": right}) == 1
    assert grade(completed, {"outcome": right, "ended": "limit"}) == 0
    assert grade(completed, {"outcome": right, "ended": "gave_up"}) == 0
    assert grade(completed, {"outcome": {"day": "Friday"}, "ended": "done"}) == 0
    assert grade(filled, {"outcome": {"day": "Friday", "people": "5"}}) == 0.5
    assert grade(filled, {"outcome": "Friday"}) == 0


def test_a_task_without_an_outcome_is_not_graded() -> None:
    other = make_task({"inputs": {"service": "x"}, "expected": {"answer": "1"}})
    for check in (completed, filled):
        with pytest.raises(NoGrade, match="no expected 'outcome'"):
            check(other, {"outcome": {}}, None)


def test_turns_above_the_needed_number_cost() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "agent", "content": "b"}]
    assert grade(turns_used, {"messages": messages * 2}) == 0
    assert grade(turns_used, {"messages": messages * 3}) == 0.5
    assert grade(turns_used, {"messages": messages * 9}) == 1
    assert grade(turns_used, {"messages": messages * 3}, budget=3) == 0


SIGNALS = {
    "repeated": user_repeated, "corrected": user_corrected, "escalated": user_escalated, "gave_up": user_gave_up
}  # fmt: skip
MESSAGES = ("I want to book a table for Friday evening.", "My number is 555-1234.")


def after(text: str) -> dict[str, float]:
    """Grades of the second reply, which the user answers with `text`."""
    messages = said(MESSAGES[0], "Your number?", MESSAGES[1], "How many people?", text)
    rollout = Rollout(prediction={"messages": messages, "turn_calls": [[0, 2], [2, 4]]})
    rollout.transitions = [Transition(t=t, model="m", request={}) for t in range(4)]
    prediction = {"transition": rollout.transitions[3]}
    return {name: check(TASK, prediction, rollout).value for name, check in SIGNALS.items()}


@pytest.mark.parametrize(
    ("text", "signals"),
    [
        ("Four of us.", set()),
        ("I do not know yet.", set()),
        ("Yes, that is right.", set()),
        ("My number is 555-1234.", {"repeated"}),
        ("I already told you. My number is 555-1234.", {"repeated"}),
        ("I want a table on Friday evening, to book.", {"repeated"}),
        ("No, the day is wrong.", {"corrected"}),
        ("Sorry, it should be Sunday, not Friday.", {"corrected"}),
        ("That's not what I asked for.", {"corrected"}),
        ("Can I talk to a real person, please?", {"escalated"}),
        ("I will complain.", {"escalated"}),
        ("Never mind, forget it.", {"gave_up"}),
        ("I'll call somebody else, this is useless.", {"gave_up"}),
    ],
)
def test_signals_of_the_users_next_message(text: str, signals: set[str]) -> None:
    assert {name for name, value in after(text).items() if value} == signals


def request(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def test_conversations_of_any_agent_are_read_from_the_requests() -> None:
    rollout = Rollout()
    rollout.transitions = [
        Transition(t=0, model="m", request=request("A table, please."), output="Which day?"),
        Transition(t=1, model="m", request=request("A table, please.", "Which day?", "No, a room!"), output="Sorry."),
    ]
    assert user_corrected(TASK, {"transition": rollout.transitions[0]}, rollout).value == 1
    with pytest.raises(NoGrade):
        user_corrected(TASK, {"transition": rollout.transitions[1]}, rollout)


def test_a_judge_grades_a_turn_with_the_users_reaction() -> None:
    predictions: list[dict[str, Any]] = []

    def grader(task: Any, prediction: dict[str, Any], rollout: Any) -> Grade:
        predictions.append(prediction)
        return Grade(value=0.25)

    rollout = Rollout(prediction={"messages": said("Hi", "Yes?", "A table."), "turn_calls": [[0, 1]]})
    rollout.transitions = [Transition(t=0, model="m", request={})]
    helps = Criterion(name="helps", scope="step", weight=0.1, check=judged_turn(grader))
    rubric = Rubric("r", [Criterion(name="done", check=completed), helps])
    assert rubric.step_rewards(TASK, rollout) == [{"helps": pytest.approx(0.025)}]
    assert predictions == [{"output": "Yes?", "earlier": "Hi", "reaction": "A table."}]


USER = {
    "goal": "I want to book a table.",
    "facts": {"day": "June 4", "people": {"value": "4", "asked_by": ["guests"]}, "phone": "555 0199", "note": None},
}


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (("I want to book a table.", "Which day?", "June 4.", "How many guests?", "4"), []),
        (("I want to book a table.", "Which day, and how many people?", "June 4, for 4."), []),
        (("I want to book a table.", "What is your name?", "Call me at 555 0199."), []),  # misunderstood the question
        (("I want to book a table for June 4.", "How many guests?", "4"), ["day"]),
        (("I want to book a table.", "Which day?", "June 4, for 4, and my phone is 555 0199."), ["phone", "people"]),
        (("I want to book a table.", "June 4, for 4 guests, phone 555 0199?", "June 4, 4, 555 0199"), []),
        ((), []),
    ],
)
def test_facts_that_a_user_tells_before_they_are_asked_for(contents: tuple[str, ...], told: list[str]) -> None:
    assert told_unasked(USER, said(*contents)) == told


@pytest.mark.parametrize("user", [None, "Ada", {}, {"facts": ["day"]}, {"goal": 3, "facts": {"day": ""}}])
@pytest.mark.parametrize("messages", [None, "hello", [None, {"role": "user"}], said("hello")])
def test_other_inputs_tell_nothing(user: Any, messages: Any) -> None:
    assert told_unasked(user, messages) == []
