"""Edits of an agent's texts: how they are applied, and which texts are refused."""

import pytest

from assay.datasets import Task
from assay.optimizers.prompts.edits import Edit, edited
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.programs.foreign_agent import TextAgent
from assay.testing import scripted_lm

OWN = "Answer questions about refunds for {name}. Be polite."


def edit(passage: str, new: str, why: str = "it fails") -> Edit:
    return Edit(passage=passage, new=new, why=why)


def test_edits_replace_delete_and_add_passages() -> None:
    text, why = edited(
        OWN, [edit("polite", "brief", "a"), edit(" about refunds", "", "b"), edit("", "Ask first.", "c")]
    )
    assert text == "Answer questions for {name}. Be brief.\n\nAsk first."
    assert why == ["a", "b", "c"]


def test_an_edit_whose_passage_does_not_occur_once_is_left_out() -> None:
    assert edited(OWN, [edit("impolite", "x"), edit("e", "x"), edit("", " ")]) == (OWN, [])


def test_at_most_four_edits_are_made() -> None:
    text, why = edited(OWN, [edit("", f"Rule {n}.") for n in range(6)])
    assert (text.count("Rule"), len(why)) == (4, 4)


def agent(most_tokens: int = 2000) -> TextAgent:
    return TextAgent("python agent.py", [{"name": "a.md", "text": OWN, "is_value": False}], most_tokens=most_tokens)


def test_the_length_of_a_text_is_limited_by_its_own() -> None:
    lm = scripted_lm(lambda request: "x")  # counts four characters a token
    own = len(OWN) // 4 + 1
    assert InstructionCheck(agent(), lm).limit_of("a.md") == own + 300
    assert InstructionCheck(agent(100), lm).limit_of("a.md") == 100
    assert InstructionCheck(agent(5), lm).limit_of("a.md") == own
    check = InstructionCheck(agent(), lm)
    long = f"{OWN} {'Be brief and polite. ' * 80}"
    assert (check.why(long, OWN, most_tokens=check.limit_of("a.md")) or "").startswith("long: ")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Answer questions about refunds. Be polite.", "placeholder: it lacks {name}"),
        (f"{OWN} The order zulu: 1001. For yankee say 1002, for xray 1003.", "copied: words of 3 training tasks"),
        (f"{OWN} Ask for the number of the order.", None),
        (f"{OWN} Ask for the number\x07 of the order.", "control: it has the character '\\x07'"),
    ],
)
def test_a_text_that_has_memorised_tasks_or_lost_a_placeholder_is_refused(text: str, rule: str | None) -> None:
    words = ("zulu", "yankee", "xray", "whiskey")
    tasks = [
        Task(id=word, inputs={"question": f"Where is {word}?"}, expected={"answer": str(1001 + at)})
        for at, word in enumerate(words)
    ]
    check = InstructionCheck(agent(), scripted_lm(lambda request: "x"))
    why = check.why(text, OWN, sources=tasks)
    assert why is None if rule is None else (why or "").startswith(rule)


def test_tasks_that_a_text_has_memorised_beside_others_or_in_several_steps_are_found() -> None:
    words = ("zulu", "yankee", "xray", "whiskey")
    tasks = [
        Task(id=word, inputs={"question": f"Where is {word}?"}, expected={"answer": str(1001 + at)})
        for at, word in enumerate(words)
    ]
    check = InstructionCheck(agent(), scripted_lm(lambda request: "x"))
    first, last = f"{OWN} For zulu say 1001, for yankee 1002.", "For xray say 1003, for whiskey 1004."
    assert check.why(first, OWN, sources=tasks) is None
    assert (check.why(f"{first} {last}", first, sources=tasks) or "").startswith("copied: words of 4 training tasks")
    assert (check.why(first, OWN, sources=tasks, beside=[last]) or "").startswith("copied: words of 4 training tasks")
