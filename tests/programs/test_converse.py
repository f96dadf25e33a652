"""The shipped program `converse`: forms, users that fail or never stop, records; its simulated users."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import dspy
import pytest
import sqlalchemy as sa

import assay
from assay.datasets.tasks import make_task
from assay.errors import DataError, EnvironmentFailed, FailureKind, ProgramError
from assay.models.calls import failure_of_program, is_agent_failure
from assay.programs import Converse, RuleBasedUser
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces.export.selection import drawn
from assay.traces.export.settings import Selection
from assay.traces.recorder import Recorder
from assay.traces.records import Rollout
from assay.traces.store import Store, tables
from assay.traces.store.listing import find_rollouts

INPUTS = {
    "service": "You take bookings for a restaurant.",
    "form": {"day": "day", "people": "number of people"},
    "user": {
        "goal": "I want to book a table.",
        "facts": {"day": {"value": "Friday"}, "people": {"value": "4", "asked_by": ["people"]}},
    },
}
TASK = make_task(
    {"inputs": INPUTS, "expected": {"outcome": {"day": "Friday", "people": "4"}}, "metadata": {"turns": 3}}
)


def clerk(request: Any, *, seen: list[str] | None = None) -> str:
    """A model that does each step rightly, from what its prompt says."""
    text = request.messages[-1].parts[0].text
    if seen is not None:
        seen.append("\n".join(part.text for message in request.messages for part in message.parts))
    asks = list(request.config.response_format["schema"]["properties"])
    field = lambda name: re.search(rf"## {name} ## \]\]\n(.*)", text)[1].strip()  # noqa: E731
    if "value" in asks:
        value = field("message").rstrip(".").rpartition(" is ")[2]
        return json.dumps({"field": field("asked"), "value": value})
    if "about" in asks:
        return json.dumps({"about": field("missing").split(",")[0]})
    return json.dumps({asks[-1]: f"What is the {field('field')}?"})


def run(lm: Any, program: Converse | None = None, inputs: Any = INPUTS) -> dspy.Prediction:
    with dspy.context(lm=lm):
        return (program or Converse())(**copy.deepcopy(inputs))


def test_the_form_is_filled_and_the_score_is_that_of_the_outcome() -> None:
    result = run(scripted_lm(clerk))
    assert result.outcome == {"day": "Friday", "people": "4"}
    assert result.ended == "done"
    assert [m["role"] for m in result.messages] == ["user", "agent"] * 3 + ["user"]
    assert load_rubric("converse").score(TASK, result).value == 1.0


def test_no_prompt_of_the_agent_has_facts_that_the_user_did_not_tell() -> None:
    seen: list[str] = []
    user = {"goal": "I want to book a table.", "facts": {"day": {"value": "Friday"}, "people": {"value": "77"}}}

    def premature(request: Any) -> str:
        answer = clerk(request, seen=seen)
        return json.dumps({"about": "finish"}) if "day" not in json.loads(answer).get("about", "day") else answer

    result = run(scripted_lm(premature), inputs={**INPUTS, "user": user})
    assert result.outcome == {"day": "Friday"}
    assert seen
    assert not any("77" in text for text in seen)


class Endless(dspy.Module):
    def forward(self, profile: Any, messages: Any) -> dspy.Prediction:
        return dspy.Prediction(message=f"And {len(messages)} more things.", ended="")


def test_a_user_that_never_stops_is_cut_off_after_max_steps_and_scores_zero() -> None:
    program = Converse(user=Endless())
    program.set_parameters({"max_steps": 4})
    result = run(scripted_lm(clerk), program)
    assert result.ended == "limit"
    assert sum(m["role"] == "agent" for m in result.messages) == 4
    assert load_rubric("converse").score(TASK, result).grades["completed"] == 0


class Broken(dspy.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, profile: Any, messages: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("no user today"),
        SystemExit(3),
        None,
        dspy.Prediction(text="hello"),
        dspy.Prediction(message=None, ended=""),
        dspy.Prediction(message="x", ended="maybe"),
    ],
)
def test_a_user_that_fails_leaves_the_run_unscored(answer: Any) -> None:
    with pytest.raises(EnvironmentFailed, match="simulated user Broken") as caught:
        run(scripted_lm(clerk), Converse(user=Broken(answer)))
    kind = failure_of_program(caught.value)
    assert kind is FailureKind.ENVIRONMENT
    assert not is_agent_failure(kind)


def test_a_users_calls_are_recorded_apart_and_exports_leave_them_out(tmp_path: Path) -> None:
    def both(request: Any) -> str:
        asks = request.config.response_format["schema"]["properties"]
        if "say" not in asks:
            return clerk(request)
        text = request.messages[-1].parts[0].text
        return json.dumps({"say": "people" if "people?" in text else "day" if "day?" in text else "done"})

    with Store(tmp_path / "assay.db") as store:
        recorder, rollout = Recorder(store), Rollout(task_id="t", data_subject="Ada")
        lm = assay.models.with_recording(scripted_lm(both), observers=[recorder.observe])
        with recorder.active(), recorder.rollout(rollout):
            result = run(lm, Converse(user="model"))
        store.flush()
        users = list(find_rollouts(store, equal={"source": "simulated_user"}))
        listed = [r.id for r in find_rollouts(store, equal={})]
    assert result.ended == "done"
    assert users
    assert {r.data_subject for r in users} == {"Ada"}
    assert all('"say"' not in t.output for t in rollout.transitions)
    assert result.turn_calls[-1][1] == len(rollout.transitions)
    assert rollout.id in listed
    with Store(tmp_path / "assay.db") as store, store.engine.connect() as connection:
        ids = set(connection.execute(sa.select(tables.rollouts.c.id).where(*drawn(Selection()))).scalars())
    assert ids == {rollout.id}


def test_settings_without_effect_and_forms_that_clash_are_refused() -> None:
    with pytest.raises(ProgramError, match="user_model='m' applies to user='model' only"):
        Converse(user_model="m")
    with pytest.raises(DataError, match="rename it"):
        run(scripted_lm(clerk), inputs={**INPUTS, "form": ["finish"]})


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


@pytest.mark.parametrize("profile", [None, "a table", {"goal": ""}, {"goal": "x", "facts": ["day"]}])
def test_a_profile_without_goal_or_facts_is_refused(profile: Any) -> None:
    with pytest.raises(DataError, match="must have a 'goal'"):
        RuleBasedUser()(profile=profile, messages=[])
