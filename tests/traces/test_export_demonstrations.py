"""Exports: which demonstrations and conversations may be in them; supervised and preference rows."""

from collections import Counter
from typing import Any

import pytest
from export_rows import add_rollout, exported, store as store, turn

from assay.traces import Store


def dspy_request(*messages: tuple[str, str]) -> dict[str, Any]:
    """A request as recorded DSPy calls store it: without a dialect, instructions first."""
    system, *others = messages
    turns = [{"role": role, "parts": [{"type": "text", "text": text}]} for role, text in others]
    return {"model": "m", "system": [{"type": "text", "text": system[1]}], "messages": turns, "config": {}}


QUESTION = "[[ ## question ## ]]\nHow deep is the lake of Thun?\n\nRespond with the fields"
DEMONSTRATION = ("user", "[[ ## question ## ]]\nHow deep is the lake of Thun?"), ("assistant", "217")
OTHER = ("user", "[[ ## question ## ]]\nHow deep is the lake of Zug?"), ("assistant", "198")


@pytest.mark.parametrize(
    ("messages", "rows_written"),
    [
        ((("system", "Answer."), *OTHER, ("user", QUESTION)), 1),
        ((("system", "Answer."), *OTHER, *DEMONSTRATION, ("user", QUESTION)), 0),
        ((("system", "Answer. How deep is the lake of Thun? 217"), ("user", QUESTION)), 0),
    ],
)
def test_a_prompt_that_demonstrates_its_own_task_is_not_exported(
    store: Store, messages: tuple[tuple[str, str], ...], rows_written: int
) -> None:
    demonstrating, other = turn(0, "a", "217 m"), turn(0, "q", "x")
    demonstrating.request = dspy_request(*messages)
    add_rollout(store, demonstrating, inputs={"question": "How deep is the lake of Thun?"}, task="own")
    add_rollout(store, other, task="other")
    for kind in ("sft", "transitions"):
        rows, manifest = exported(store, kind, kind)
        assert sum(row["task"] == "own" for row in rows) == rows_written
        assert manifest["left_out"].get("calls whose prompt demonstrates their own task", 0) == 1 - rows_written
    without, _ = exported(store, "sft", "without", demos=False)  # nothing is shown where demonstrations are taken out
    assert sum(row["task"] == "own" for row in without) == (0 if len(messages) == 2 else 1)


ANSWER = """[[ ## thought ## ]]
Look it up.

[[ ## calls ## ]]
[{"name":"depth"}]

[[ ## completed ## ]]"""


@pytest.mark.parametrize(
    "earlier",
    [
        '[[ ## calls ## ]]\n[{"name": "depth"}]\n\n[[ ## completed ## ]]\n',
        '[[ ## calls ## ]]\n[{"name":  "depth"}]',
        '[[ ## calls ## ]]\n[{"name": "depth"}]\n[[ ## completed ## ]]',
        "[[ ## thought ## ]]\nLook it up.\n\n[[ ## completed ## ]]\n",
        "<thought>\nLook it up.\n</thought>",
        '{"thought": "Look it up."}',
    ],
)
def test_an_answer_that_the_history_writes_in_another_way_is_no_demonstration(store: Store, earlier: str) -> None:
    """ReActV2 writes its earlier calls anew, without written tool calls if its adapter sends native ones, and its first
    prompt in another way than it was sent."""
    asked, again = turn(0, "a", ANSWER), turn(1, "b", "217 m")
    question = "[[ ## question ## ]]\nHow deep is the lake of Thun?"
    asked.request = dspy_request(("system", "Answer."), ("user", f"{question}\n\n[[ ## tools ## ]]\ndepth"))
    again.request = dspy_request(
        ("system", "Answer."), ("user", question), ("assistant", earlier), ("user", "[[ ## results ## ]]\n217")
    )
    add_rollout(store, asked, again, inputs={"question": "How deep is the lake of Thun?"})
    rows, manifest = exported(store, "transitions")
    assert (len(rows), manifest["left_out"]) == (2, {})


def test_sft_exports_good_rollouts_by_call_or_as_complete_conversations(store: Store) -> None:
    second = turn(1, "c", "d")
    second.request["body"]["messages"][:0] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    add_rollout(store, turn(0, "a", "b"), second, score=0.5, human_rating=0.9)
    add_rollout(store, turn(0, "a", "bad"), score=0.9, human_rating=0.2)  # human ratings count first
    rows, _ = exported(store, "sft")
    assert [(row["prompt"][-1]["content"], row["completion"], row["quality"]) for row in rows] == [
        ("a", [{"role": "assistant", "content": "b"}], 0.9), ("c", [{"role": "assistant", "content": "d"}], 0.9),
    ]  # fmt: skip
    conversations, _ = exported(store, "sft", "whole", whole=True)
    assert [[m["content"] for m in row["messages"]] for row in conversations] == [["a", "b", "c", "d"]]


def test_demonstrations_of_a_dspy_program_can_be_left_out_and_a_conversation_cannot(store: Store) -> None:
    history = [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "3")]
    theirs = {"dialect": "chat", "body": {"messages": [{"role": role, "content": text} for role, text in history]}}
    for request, task in ((dspy_request(("system", "Say it."), *history), "a"), (theirs, "b")):
        call = turn(0, "", "three")
        call.request = request
        add_rollout(store, call, task=task)
    rows, _ = exported(store, "sft", demos=False)
    assert [[(m["role"], m["content"]) for m in row["prompt"]] for row in rows] == [
        [("system", "Say it."), ("user", "3")],
        history,
    ]


def test_preferences_pair_answers_to_the_same_prompt(store: Store) -> None:
    for answer, score in (("good", 1.0), ("bad", 0.0), ("bad", 0.0), ("middling", 0.95)):
        add_rollout(store, turn(0, "a", answer), score=score)
    rows, _ = exported(store, "preferences")
    pairs = {(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows}
    assert pairs == {("good", "bad"), ("middling", "bad")}  # good and medium differ by less than the margin
    labels, _ = exported(store, "preferences", "kto", unpaired=True)
    counts = Counter((row["completion"][0]["content"], row["label"]) for row in labels)
    assert counts == {("good", True): 1, ("bad", False): 2, ("middling", True): 1}
