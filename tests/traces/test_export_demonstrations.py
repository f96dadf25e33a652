"""Exports: which demonstrations and conversations may be in them; supervised and preference rows."""

import json
from collections import Counter
from typing import Any

import pytest
from export_rows import add_rollout, exported, response_of, turn
from export_rows import store as store

from assay.errors import ConfigError
from assay.traces import Store, ToolCall, Transition


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


def test_a_later_step_with_its_own_prompt_as_a_demonstration_is_not_exported(store: Store) -> None:
    """The second step of a program is given other fields than the task's inputs."""
    step = "[[ ## summary ## ]]\nA deep lake."
    demonstrating = turn(0, "a", "217 m")
    demonstrating.request = dspy_request(
        ("system", "Answer."), ("user", step), ("assistant", "217"), ("user", f"{step}\n\nRespond with the fields")
    )
    add_rollout(store, demonstrating, turn(1, "q", "x"))
    _, manifest = exported(store, "sft")
    assert manifest["left_out"] == {"calls whose prompt demonstrates their own task": 1}


def test_earlier_turns_of_the_same_rollout_are_not_demonstrations(store: Store) -> None:
    """Each turn repeats the question; the earlier answers are of the same rollout."""
    first, second = turn(0, "Q t1", "look it up"), turn(1, "", "7")
    second.request = {"dialect": "chat", "body": {"model": "m", "messages": [
        {"role": "user", "content": "Q t1"}, {"role": "assistant", "content": "look it up"},
        {"role": "user", "content": "Q t1, and now?"}]}}  # fmt: skip
    add_rollout(store, first, second, inputs={"question": "Q t1"})
    rows, manifest = exported(store, "sft")
    assert (len(rows), manifest["left_out"]) == (2, {})


def test_a_conversation_with_rewritten_answers_is_not_a_demonstration(store: Store) -> None:
    """smolagents writes tool calls and their results as plain text."""
    first, second, other = turn(0, "Q t1", "7"), turn(1, "", "7"), turn(0, "", "7")
    rewritten = [
        {"role": "user", "content": "Q t1"}, {"role": "assistant", "content": "Calling tools: []"},
        {"role": "user", "content": "Observation: 7"},
    ]  # fmt: skip
    for call in (second, other):
        call.request = {"dialect": "chat", "body": {"model": "m", "messages": rewritten}}
    add_rollout(store, first, second, inputs={"question": "Q t1"}, task="own")
    add_rollout(
        store, other, inputs={"question": "Q t1"}, task="other"
    )  # no earlier call asked this, so the messages are a demonstration
    rows, manifest = exported(store, "sft")
    assert [(row["task"], row["t"]) for row in rows] == [("own", 0), ("own", 1)]
    assert manifest["left_out"] == {"calls whose prompt demonstrates their own task": 1}


def test_unscored_rollouts_are_left_out_and_count_against_clean(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), score=None)
    add_rollout(store, turn(0, "a", "b"), score=0.0)
    rows, manifest = exported(store, "transitions")
    assert ([row["score"] for row in rows], manifest["left_out"], manifest["problems"]) == (
        [0.0],
        {"unscored": 1},
        {"unscored": 1},
    )


def test_sft_exports_good_rollouts_by_call_or_as_complete_conversations(store: Store) -> None:
    more = {
        "dialect": "chat",
        "body": {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        },
    }
    second = Transition(t=1, model="m", request=more, response=response_of("d"), output="d")
    add_rollout(store, turn(0, "a", "b"), second, score=0.5, human_rating=0.9)
    add_rollout(store, turn(0, "a", "bad"), score=0.9, human_rating=0.2)  # human ratings count first
    rows, _ = exported(store, "sft")
    assert [(row["prompt"][-1]["content"], row["completion"], row["quality"]) for row in rows] == [
        ("a", [{"role": "assistant", "content": "b"}], 0.9), ("c", [{"role": "assistant", "content": "d"}], 0.9),
    ]  # fmt: skip
    conversations, _ = exported(store, "sft", "whole", whole=True)
    assert [[m["content"] for m in row["messages"]] for row in conversations] == [["a", "b", "c", "d"]]


@pytest.mark.parametrize(
    ("answered", "history", "same"),
    [
        ('{"x": "1"}', '{"x":"1"}', True), ('{"x": "1", "y": 2}', '{"y":2,"x":"\\u0031"}', True), ("", "{}", True),
        ('{"x": NaN}', '{"x":NaN}', True),
        ('{"x": 1e999}', '{"x":1e999}', True), ('{"x": "\\ud800"}', '{"x":"\\ud800"}', True),
        ('{"x": 1', '{"x": 1', True),
        ('{"x": 1}', '{"x": true}', False), ('{"x": "1"}', '{"x": "2"}', False),
    ],
)  # fmt: skip
def test_a_conversation_is_one_row_for_every_formatting_of_arguments(
    store: Store, answered: str, history: str, same: bool
) -> None:
    def call(arguments: str) -> dict[str, Any]:
        calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "a"}, call(history), {"role": "tool", "tool_call_id": "c1", "content": "r"}]
    response = {"body": {"choices": [{"message": call(answered), "finish_reason": "tool_calls"}]}}
    first = Transition(
        t=0,
        model="m",
        request={"dialect": "chat", "body": {"messages": messages[:1], "tools": tools}},
        response=response,
        output="",
    )
    second = Transition(
        t=1,
        model="m",
        request={"dialect": "chat", "body": {"messages": messages, "tools": tools}},
        response=response_of("d"),
        output="d",
    )
    add_rollout(store, first, second)
    rows, _ = exported(store, "sft", whole=True)
    assert [row["t"] for row in rows] == ([1] if same else [0, 1])


def test_demonstrations_of_a_dspy_program_can_be_left_out_and_a_conversation_cannot(store: Store) -> None:
    history = [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "3")]
    dspys = {
        "system": "Say it.",
        "messages": [{"role": role, "parts": [{"type": "text", "text": text}]} for role, text in history],
    }
    theirs = {"dialect": "chat", "body": {"messages": [{"role": role, "content": text} for role, text in history]}}
    for request, task in ((dspys, "a"), (theirs, "b")):
        add_rollout(
            store, Transition(t=0, model="m", request=request, response=response_of("three"), output="three"), task=task
        )
    rows, _ = exported(store, "sft", demos=False)
    assert [[(m["role"], m["content"]) for m in row["prompt"]] for row in rows] == [
        [("system", "Say it."), ("user", "3")],
        history,
    ]
    with pytest.raises(ConfigError, match="demos=False requires kind='sft' and whole=False"):
        exported(store, "sft", "x", demos=False, whole=True)


def test_preferences_pair_answers_to_the_same_prompt(store: Store) -> None:
    for answer, score in (("good", 1.0), ("bad", 0.0), ("bad", 0.0), ("middling", 0.95)):
        add_rollout(store, turn(0, "a", answer), score=score)
    rows, _ = exported(store, "preferences")
    pairs = {(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows}
    assert pairs == {("good", "bad"), ("middling", "bad")}  # good and medium differ by less than the margin
    labels, _ = exported(store, "preferences", "kto", unpaired=True)
    assert Counter((row["completion"][0]["content"], row["label"]) for row in labels) == {
        ("good", True): 1,
        ("bad", False): 2,
        ("middling", True): 1,
    }


def with_call(ask: str, number: int, expression: str, *tools: str) -> Transition:
    """A turn that calls a tool; its id is numbered, as by servers that number their calls."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "calculator", "arguments": json.dumps({"expression": expression})},
    }
    transition = turn(0, ask, "")
    transition.request["body"]["tools"] = [{"type": "function", "function": {"name": name}} for name in tools]
    assert transition.response is not None
    transition.response["body"]["choices"][0]["message"] |= {"content": None, "tool_calls": [call]}
    transition.tools = [ToolCall(name="calculator", arguments={"expression": expression})]
    return transition


def test_answers_that_differ_only_in_tool_call_ids_are_not_a_pair(store: Store) -> None:
    for number, (expression, score) in enumerate([("6*7", 1.0), ("6*7", 0.25), ("6+7", 0.0)]):
        add_rollout(store, with_call("a", number, expression, "calculator"), score=score)
    rows, _ = exported(store, "preferences", model="nobody/unknown")  # calls stay fields
    expressions = [
        tuple(row[name][0]["tool_calls"][0]["function"]["arguments"]["expression"] for name in ("chosen", "rejected"))
        for row in rows
    ]
    assert expressions == [("6*7", "6+7")] * len(rows)
    assert rows


def test_preferences_do_not_pair_answers_with_other_tools_or_schemas(store: Store) -> None:
    add_rollout(store, with_call("a", 1, "6*7", "calculator"), score=1.0)
    add_rollout(store, with_call("a", 2, "6+7", "calculator", "search"), score=0.0)
    constrained = with_call("a", 3, "6-7", "calculator")
    constrained.request["body"]["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object"}},
    }
    add_rollout(store, constrained, score=0.0)
    add_rollout(store, with_call("a", 4, "6/7", "calculator"), score=0.0)
    (pair,), _ = exported(store, "preferences", model="nobody/unknown")  # calls stay fields
    assert pair["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"expression": "6/7"}
