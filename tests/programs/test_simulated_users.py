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


@pytest.mark.parametrize("profile", [None, "a table", {"goal": ""}, {"goal": "x", "facts": ["day"]}])
def test_a_profile_without_goal_or_facts_is_refused(profile: Any) -> None:
    with pytest.raises(DataError, match="must have a 'goal'"):
        RuleBasedUser()(profile=profile, messages=[])


def test_the_user_with_a_model_words_a_fact_that_has_no_words_or_all_of_them() -> None:
    def script(request: Any) -> str:
        asks = request.config.response_format["schema"]["properties"]
        return json.dumps({"say": "people"} if "say" in asks else {"reply": "We are four."})

    with dspy.context(lm=scripted_lm(script)):
        assert talk("How many?", user=SimulatedUser(writes=True))[1] == ("We are four.", "")
