"""Simulated users: messages of the rule-based one for each kind of reply, and choices of the one with a model."""

import json
from typing import Any

import dspy
import pytest

from assay.errors import DataError
from assay.programs import RuleBasedUser, SimulatedUser
from assay.programs.simulated_users import UserProfile
from assay.testing import scripted_lm

PROFILE = {
    "goal": "I want to book a table.",
    "facts": {
        "day": {"value": "Friday", "says": "On Friday, please."},
        "people": {"value": "4", "says": "There will be 4 of us.", "asked_by": ["people", "guests"]},
    },
}


def talk(*replies: str, profile: Any = PROFILE, user: Any = None) -> list[tuple[str, str]]:
    """What the user says at the start and after each reply."""
    user, messages, turns = user or RuleBasedUser(), [], []
    for reply in (None, *replies):
        if reply is not None:
            messages.append({"role": "agent", "content": reply})
        result = user(profile=profile, messages=messages)
        messages.append({"role": "user", "content": result.message})
        turns.append((result.message, result.ended))
    return turns


def test_the_user_corrects_a_wrong_value_and_notices_a_repeated_question() -> None:
    turns = talk("Which day?", "Which day was that?", "Confirmed. day: Monday.")
    assert turns[2][0] == "I already told you. On Friday, please."
    assert turns[3] == ("No, the day is wrong. On Friday, please.", "")


def test_the_user_escalates_and_gives_up_after_useless_replies() -> None:
    turns = talk("Hm.", "Well.", "Let us see.", "So.")
    assert [ended for _, ended in turns] == ["", "", "", "", "gave_up"]
    assert "real person" in turns[3][0]


def test_facts_in_short_forms_are_those_in_long_ones() -> None:
    day = {"value": "Friday", "asked_by": "when", "first": "Monday", "corrects": "Sorry, Friday."}
    profile = {**PROFILE, "facts": {**PROFILE["facts"], "day": day}}
    turns = talk("What are the details?", "When do you come?", "How many guests?", profile=profile)
    assert [text for text, _ in turns[1:]] == [
        "Sorry, I do not understand what you need from me.",  # no letter of `when` asks for the day
        "The day is Monday.",
        "Sorry, Friday.",
    ]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"fact": {"day": "Friday"}}, r"user has the key 'fact'\. Did you mean 'facts'\?"),
        (
            {"facts": {"day": {"value": "Friday", "say": "On Friday."}}},
            r"'day' .* key 'say'\. Did you mean 'says'",
        ),
        ({"facts": {"day": {"value": "Friday", "ask_by": ["when"]}}}, r"key 'ask_by'\. Did you mean 'asked_by'"),
        ({"facts": {"day": {"valeu": "Friday"}}}, r"key 'valeu'\. Did you mean 'value'"),
        ({"facts": {"day": {"says": "On Friday."}}}, r"fact 'day' of the user is .* without a 'value'"),
    ],
)
def test_misspelled_keys_of_a_user_are_refused_by_the_nearest_one(user: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        UserProfile.of({"goal": "Hello.", **user})


def test_other_keys_are_those_of_a_users_own_program() -> None:
    profile = UserProfile.of({"goal": "Hello.", "mood": "bad", "facts": {"day": {"value": "Friday", "secret": True}}})
    assert profile.facts["day"]["secret"] is True
    assert UserProfile.of({"goal": "Hello.", "facts": {"day": {"odd": "Friday"}}}).facts["day"]["asked_by"] == ["day"]


def test_a_delayed_fact_is_told_at_the_second_request_and_one_told_before_never() -> None:
    delayed = {**PROFILE, "facts": {"day": {"value": "Friday", "delays": "Let me think."}}}
    assert [text for text, _ in talk("Which day?", "Which day?", profile=delayed)[1:]] == [
        "Let me think.",
        "The day is Friday.",
    ]
    before = {**PROFILE, "facts": {"day": {"value": "Friday", "told_before": True}}}
    assert "Friday" not in json.dumps(talk("Which day?", "Which day?", profile=before))


@pytest.mark.parametrize("profile", [None, "a table", {"goal": ""}, {"goal": "x", "facts": ["day"]}])
def test_a_profile_without_goal_or_facts_is_refused(profile: Any) -> None:
    with pytest.raises(DataError, match="must have a 'goal'"):
        RuleBasedUser()(profile=profile, messages=[])


def test_the_user_with_a_model_states_the_goal_literally_and_chooses_facts_by_name() -> None:
    choices = iter(["people", "unknown", "done"])
    schemas = []

    def script(request: Any) -> str:
        schemas.append(request.config.response_format["schema"]["properties"]["say"])
        return json.dumps({"say": next(choices)})

    with dspy.context(lm=scripted_lm(script)):
        turns = talk("How many?", "What is your shoe size?", "Booked.", user=SimulatedUser())
    assert turns == [
        ("I want to book a table.", ""),
        ("There will be 4 of us.", ""),
        ("I do not know that.", ""),
        ("Yes, that is right. Thank you, goodbye.", "done"),
    ]
    assert schemas[0]["enum"] == ["day", "people", "unknown", "done", "gave_up"]


def test_the_user_with_a_model_words_a_fact_that_has_no_words_or_all_of_them() -> None:
    def script(request: Any) -> str:
        asks = request.config.response_format["schema"]["properties"]
        return json.dumps({"say": "people"} if "say" in asks else {"reply": "We are four."})

    with dspy.context(lm=scripted_lm(script)):
        assert talk("How many?", user=SimulatedUser(writes=True))[1] == ("We are four.", "")
