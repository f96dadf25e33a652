"""Generated conversations: facts, changes, two meetings with a person, and options that are refused."""

import json

import pytest

from assay.datasets import load_splits, load_tasks
from assay.errors import DataError
from assay.programs.simulated_users import UserProfile


def test_the_outcome_is_that_of_the_facts_and_the_agent_gets_the_form() -> None:
    for task in load_tasks("conversations:?size=50&seed=3"):
        facts = task.inputs["user"]["facts"]
        assert task.expected["outcome"] == {name: fact["value"] for name, fact in facts.items()}
        assert list(task.inputs["form"]) == list(facts)
        assert 9 <= len(facts) <= 11
        assert all(fact["value"].casefold() in fact["says"].casefold() for fact in facts.values())
        visible = json.dumps([task.inputs["service"], task.inputs["form"], task.inputs["user"]["goal"]])
        assert not any(value in visible for value in task.expected["outcome"].values() if len(value) > 3)


def test_a_changed_fact_is_first_told_wrongly_and_its_correction_takes_a_turn() -> None:
    tasks = load_tasks("conversations:?size=40&changes=1&facts=9-9")
    for task in tasks:
        facts = UserProfile.of(task.inputs["user"]).facts
        changed = [fact for fact in facts.values() if "first" in fact]
        assert len(changed) == 1
        assert changed[0]["first"]["value"] != changed[0]["value"]
        assert changed[0]["value"] in changed[0]["corrects"]
        assert task.metadata["turns"] == 9 + 2 + 1  # facts, a correction and a delay, the end
    assert not any(
        "first" in f for t in load_tasks("conversations:?changes=0") for f in t.inputs["user"]["facts"].values()
    )


def test_the_second_conversation_has_the_person_of_the_first_and_another_service() -> None:
    first = load_tasks("conversations:?size=20&facts=9-10&meeting=first&seed=1")
    second = load_tasks("conversations:?size=20&facts=9-10&meeting=second&seed=1")
    for before, after in zip(first, second, strict=True):
        assert before.inputs["person"] == after.inputs["person"]
        assert before.inputs["service"] != after.inputs["service"]
        known = {name for name, fact in after.inputs["user"]["facts"].items() if fact.get("told_before")}
        assert known
        assert all(after.expected["outcome"][name] == before.expected["outcome"][name] for name in known)
        assert not any(fact.get("told_before") for fact in before.inputs["user"]["facts"].values())


def test_splits_are_those_of_the_content() -> None:
    one, two = (load_splits(f"conversations:?size={size}&seed=2", salt="s") for size in (60, 120))
    assert {task.id for task in one.train} <= {task.id for task in two.train}
    assert min(len(one.train), len(one.val), len(one.gate)) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("facts=0-4", "facts='0-4'"),
        ("facts=9-40", "facts='9-40'"),
        ("changes=2", "changes is .2.: it must be a number from 0 to 1"),
        ("changes=much", "changes is .much."),
        ("meeting=third", "meeting='third' must be one of only, first, second"),
        ("meeting=first&facts=3-4", "must be above 6"),
        ("turns=4", "unknown option"),
    ],
)
def test_options_out_of_range_are_refused(options: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(f"conversations:?{options}")
