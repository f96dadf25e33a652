"""Texts of an agent in its requests: where they are found, and what is sent in their place."""

from typing import Any

import pytest

from assay.support.placeholders import with_added
from assay.traces.gateway.texts import NewText, Roles, TextSwap

OWN = "You answer questions about refunds.\n\nBe polite to {name}."
NEW = "Be brief, {name}. Refunds take a week."


def swap(before: str = OWN, after: str = NEW, roles: Roles | None = None, examples: str = "") -> TextSwap:
    return TextSwap([NewText(name="a.md", before=before, after=after, examples=examples)], roles)


SENT = "You answer questions about refunds.\n\nBe polite to Ann."
INSTEAD = "Be brief, Ann. Refunds take a week."


@pytest.mark.parametrize(
    ("body", "roles"),
    [
        ({"messages": [{"role": "system", "content": SENT}]}, {"system"}),
        ({"messages": [{"role": "developer", "content": [{"type": "text", "text": SENT}]}]}, {"system"}),
        ({"messages": [{"role": "user", "content": f"{SENT}\n\nQuestion"}]}, {"user"}),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": SENT}]}, {"tool"}),
        ({"system": SENT, "messages": []}, {"system"}),
        ({"system": [{"type": "text", "text": SENT, "cache_control": {"type": "ephemeral"}}]}, {"system"}),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": SENT}]}]}, {"tool"}),
        ({"instructions": SENT, "input": "Question"}, {"system"}),
        ({"input": [{"role": "developer", "content": [{"type": "input_text", "text": SENT}]}]}, {"system"}),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": SENT}]}, {"tool"}),
        ({"systemInstruction": {"parts": [{"text": SENT}]}, "contents": []}, {"system"}),
        ({"contents": [{"role": "model", "parts": [{"text": SENT}]}]}, {"assistant"}),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": SENT}}]}, {"tools"}),
        ({"tools": [{"functionDeclarations": [{"name": "f", "description": SENT}]}]}, {"tools"}),
    ],
)
def test_a_text_is_replaced_wherever_a_dialect_has_it(body: dict[str, Any], roles: set[str]) -> None:
    texts = swap()
    assert str(texts.body(body)) == str(body).replace(repr(SENT)[1:-1], INSTEAD)
    assert texts.seen == {"a.md": roles}


def test_a_text_is_replaced_in_its_known_roles_alone() -> None:
    texts = swap(roles={"a.md": frozenset({"system"})})
    messages = [{"role": "system", "content": SENT}, {"role": "user", "content": SENT}]
    assert texts.body({"messages": messages})["messages"] == [{"role": "system", "content": INSTEAD}, messages[1]]


def test_a_request_without_the_text_is_not_changed() -> None:
    texts, body = swap(), {"messages": [{"role": "system", "content": SENT[:-9]}], "model": "m", "metadata": SENT}
    changed = texts.body(body)
    assert (changed, texts.seen) == (body, {})
    assert changed["messages"] is body["messages"]


def test_a_text_may_be_part_of_a_message_and_occur_twice() -> None:
    content = f"# Rules\r\n{SENT}\n---\nYou answer questions about refunds.\r\n\r\nBe polite to Bob."
    changed = swap(examples="\n{x}").body({"system": content})["system"]
    assert changed == f"# Rules\n{INSTEAD}\n{{x}}\n---\n{INSTEAD.replace('Ann', 'Bob')}\n{{x}}"


def test_placeholders_around_the_text_stay_where_they_are() -> None:
    texts = swap("{role} agent. Answer the user.\n{question}", "{role} agent of few words.\n{question}")
    assert texts.body({"prompt": "Sales agent. Answer the user.\nWhy?"})["prompt"] == "Sales agent of few words.\nWhy?"


def test_examples_come_before_the_placeholders_at_the_end() -> None:
    texts = swap("{role}: answer.\n{question}", "{role}: answer well.\n{question}", examples="Like {this}.\n")
    assert texts.body({"prompt": "Sales: answer.\nWhy?"})["prompt"] == "Sales: answer well.\nLike {this}.\nWhy?"
    assert (
        with_added("{role}: answer well.\n{question}", "Like this.\n") == "{role}: answer well.\nLike this.\n{question}"
    )


def test_a_text_of_placeholders_alone_is_found_nowhere() -> None:
    assert swap("{question}", "{question}").body({"prompt": "Why?"}) == {"prompt": "Why?"}


def test_placeholders_are_matched_by_their_names_and_order() -> None:
    texts = swap("From {a} to {b}: {a} is first, {b} is last.", "{b} comes after {a}; begin with {a} ({b}).")
    assert texts.body({"system": "> From 1 to 2: 3 is first, 4 is last."})["system"] == (
        "> 2 comes after 1; begin with 3 (4)."
    )


def test_a_passage_that_begins_like_a_template_is_not_taken_for_it() -> None:
    texts = swap("You are {name}, a helper.", "Be {name}, brief.")
    sent = texts.body({"system": "You are welcome.\n\nYou are Ann, a helper. Hello."})["system"]
    assert sent == "You are welcome.\n\nBe Ann, brief. Hello."
    titled = swap("# {title}\nYou are a helper.", "# {title}\nBe brief.")
    assert titled.body({"system": "# C# guide\nYou are a helper."})["system"] == "# C# guide\nBe brief."


def test_the_longest_text_wins_where_one_contains_another() -> None:
    texts = TextSwap(
        [
            NewText(name="part", before="Be polite always.", after="Be brief always."),
            NewText(name="whole", before="You sell. Be polite always. Bye.", after="You buy."),
        ]
    )
    sent = texts.body({"system": "You sell. Be polite always. Bye. Be polite always."})["system"]
    assert sent == "You buy. Be brief always."
    assert texts.seen == {"part": {"system"}, "whole": {"system"}}
