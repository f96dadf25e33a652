"""Exports: selected rollouts, gates, content of the files; and that trainers load and train on them."""

import asyncio
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

import assay
from assay.api.traces import forget_subject
from assay.datasets.tasks import content_hash
from assay.errors import ConfigError, DataError
from assay.traces import Rollout, Store, ToolCall, Transition
from assay.traces.export.balance import Balance, Sampler, targets
from assay.traces.export.gates import GateReport, Gates, UngatedExport
from assay.traces.export.selection import Selection
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import store_splits

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)


def chat(text: str) -> dict[str, Any]:
    return {"dialect": "chat", "body": {"model": "m", "messages": [{"role": "user", "content": text}]}}


def response_of(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"body": {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}}


def turn(t: int, ask: str, answer: str, **options: Any) -> Transition:
    finish = options.pop("finish", "stop")
    return Transition(
        t=t, model="m", weights="w", request=chat(ask), response=response_of(answer, finish), output=answer, **options
    )


def add_rollout(store: Store, *turns: Transition, **options: Any) -> Rollout:
    task = options.pop("task", "t1")
    fields = {
        "run_id": "r",
        "task_id": task,
        "group_id": task,
        "status": "done",
        "program": "p",
        "program_version": "v",
        "model": "m",
        "score": 1.0,
        "split": "train",
        "inputs": {"question": task},
        "expected": {"answer": "7"},
        "rubric": "r@1",
        **options,
    }
    rollout = Rollout(transitions=list(turns), **fields)
    if rollout.split in ("train", "val"):  # as a file that names splits would: else the hash of the inputs decides
        store_splits(store, {rollout.split: [(content_hash(rollout.inputs), "")]})
    store.put_rollout(rollout)
    for transition in turns:
        store.put_transition(rollout.id, transition)
    return rollout


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / ".assay" / "assay.db") as opened:
        yield opened


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().rstrip("\n").split("\n")]


def exported(store: Store, kind: str, out: str = "out", **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    store.flush()
    report = assay.export(kind, out, store=store.url, **{"gates": LOOSE, **options})
    return rows(report.path), report.manifest


@pytest.mark.slow
def test_transitions_have_rewards_returns_and_advantages_in_both_files(store: Store) -> None:
    for score in (1.0, 0.0):
        add_rollout(
            store,
            turn(0, "a", "b", step_rewards={"ran": 0.25}, token_ids=(1, 2), logprobs=(-0.5, -1.0)),
            turn(1, "c", "d"),
            score=score,
        )
    rows, manifest = exported(store, "transitions")
    good = [row for row in rows if row["score"] == 1.0]
    assert [(row["t"], row["reward"], row["return"], row["weight"]) for row in good] == [
        (0, 0.25, 1.25, 0.5),
        (1, 1.0, 1.0, 0.5),
    ]
    # turn 0: 1.25 against 0.25, turn 1: 1 against 0; the deviation of the returns 1.25 and 0.25 is sqrt(0.5)
    assert [row["advantage"] for row in good] == pytest.approx([1 / (math.sqrt(0.5) + 1e-4)] * 2)
    assert good[0]["token_ids"] == [1, 2]
    assert good[0]["input"]["body"]["messages"][0]["content"] == "a"
    assert manifest["files"]["data.jsonl"]["rows"] == 4
    table = pq.read_table("out/data.parquet").to_pylist()
    assert [row["advantage"] for row in table] == [row["advantage"] for row in rows]
    assert json.loads(table[0]["input"]) == rows[0]["input"]
    assert table[0]["token_ids"] == [1, 2]


@pytest.mark.slow
def test_transitions_have_reasoning_and_refusal_in_columns_that_hide_personal_data(store: Store) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": "No, jane.doe@corp.com.",
        "reasoning_content": "Is jane.doe@corp.com kind?",
    }
    made = turn(0, "Is she kind?", "No, jane.doe@corp.com.", token_ids=(1,), logprobs=(-1.0,))
    made.response = {"body": {"choices": [{"message": message}]}}
    add_rollout(store, made)
    (row,), _ = exported(store, "transitions")
    assert (row["reasoning"].startswith("Is "), row["refusal"].startswith("No, "), row["refusal"]) == (
        True,
        True,
        row["output"],
    )
    assert "jane.doe" not in json.dumps(row)
    assert row["token_ids"] is None  # they spell what was hidden
    assert pq.read_table("out/data.parquet").column("reasoning").to_pylist() == [row["reasoning"]]


def test_identical_rollouts_are_counted_and_have_advantage_zero(store: Store) -> None:
    for _ in range(3):
        add_rollout(store, turn(0, "a", "b"))
    rows, manifest = exported(store, "transitions")
    assert [row["advantage"] for row in rows] == [0.0] * 3
    assert manifest["groups_without_spread"] == 1


@pytest.mark.parametrize("how", ["group", "batch", "none"])
def test_advantages_are_relative_to_the_group_or_the_batch(store: Store, how: str) -> None:
    for task, scores in {"easy": (1.0, 1.0), "hard": (0.0, 0.0)}.items():
        for score in scores:
            add_rollout(store, turn(0, task, "x"), task=task, score=score)
    rows, _ = exported(store, "transitions", advantage=how)
    signs = {row["task"]: math.copysign(1, row["advantage"]) if row["advantage"] else 0 for row in rows}
    assert signs == ({"easy": 1, "hard": -1} if how == "batch" else {"easy": 0, "hard": 0})


def test_advantages_do_not_depend_on_the_ids_of_rollouts(tmp_path: Path) -> None:
    by_score = []
    for name, backwards in (("one", False), ("other", True)):
        with Store(tmp_path / name / ".assay" / "assay.db") as store:
            scores = [0.1, 0.7, 0.3, 0.9, 0.2, 0.6, 0.45]
            for at, score in enumerate(reversed(scores) if backwards else scores):
                add_rollout(store, turn(0, "a", f"b {score}"), id=f"r{at}", score=score)
            store.flush()
            rows, _ = exported(store, "transitions", str(tmp_path / f"{name}-out"))
            by_score.append({row["score"]: row["advantage"] for row in rows})
    assert by_score[0] == by_score[1]  # to the last bit
    assert len(by_score[0]) == 7


def test_good_and_bad_rollouts_can_be_separate_groups(store: Store) -> None:
    for score, step in ((1.0, 0.2), (1.0, 0.0), (0.0, 0.2), (0.0, 0.0)):
        add_rollout(store, turn(0, "a", "b", step_rewards={"s": step}), score=score)
    rows, _ = exported(store, "transitions", by_outcome=True)
    by_score = {(row["score"], row["reward"] > row["score"]): row["advantage"] for row in rows}
    assert all((value > 0) == tidy for (_, tidy), value in by_score.items())


def test_sealed_rollouts_and_their_inputs_are_never_exported(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="mine")
    add_rollout(store, turn(0, "a", "b"), task="sealed", split="test")
    add_rollout(
        store, turn(0, "a", "b"), task="again", split="", inputs={"question": "sealed"}
    )  # the same question, asked outside a split
    add_rollout(store, turn(0, "a", "b"), task="gated", split="gate")
    rows, manifest = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"mine"}
    assert manifest["left_out"] == {"of the gate or test split": 2, "with the inputs of a sealed task": 1}


def test_text_that_overlaps_with_sealed_text_is_measured_and_named(store: Store) -> None:
    long = "the quick brown fox jumps over the lazy dog and runs far away from here"
    add_rollout(store, turn(0, "a", "b"), task="near", inputs={"question": long + " today"})
    add_rollout(
        store,
        turn(0, "a", "b"),
        task="far",
        inputs={"question": "something else entirely that has nothing to do with animals at all, ever"},
    )
    add_rollout(store, turn(0, "a", "b"), task="sealed", split="test", inputs={"question": long})
    _, manifest = exported(store, "transitions")
    overlap = manifest["overlap"]
    assert (overlap["tasks"], overlap["shared"], overlap["worst"][0]["task"]) == (2, 1, "near")
    assert overlap["worst"][0]["share"] == pytest.approx(8 / 9, abs=1e-4)  # 16 words: 9 n-grams of 8, one of them new


def test_tenants_and_consent_limit_the_selection(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="free")
    add_rollout(store, turn(0, "a", "b"), task="acme", tenant="acme")
    add_rollout(store, turn(0, "a", "b"), task="other", tenant="other")
    add_rollout(store, turn(0, "a", "b"), task="no", consent="Withdrawn")
    add_rollout(store, turn(0, "a", "b"), task="yes", consent="given")
    rows, manifest = exported(store, "transitions", selection=Selection(tenants=("acme",)))
    assert {row["task"] for row in rows} == {"free", "acme", "yes"}
    assert manifest["left_out"] == {"of a tenant that was not selected": 1, "with a consent that was not given": 1}
    assert manifest["tenants"] == ["acme"]
    rows, _ = exported(store, "transitions", "out2", selection=Selection(require_consent=True))
    assert {row["task"] for row in rows} == {"yes"}
    free = next(rollout.id for rollout in store.rollouts(limit=None) if rollout.task_id == "free")
    store.rate(free, 0.9)
    rows, manifest = exported(store, "transitions", "out3", selection=Selection(rated=True))
    assert {row["task"] for row in rows} == {"free"}
    assert manifest["left_out"]["without a human rating"] > 0


def test_failed_gates_report_what_is_missing_and_write_nothing(store: Store) -> None:
    for at in range(10):
        add_rollout(
            store, turn(0, "a", "b", finish="length" if at < 5 else "stop"), task=f"t{at}", task_type=f"k{at % 3}"
        )
    store.flush()
    with pytest.raises(UngatedExport) as caught:
        assay.export("transitions", "out", store=store.url, privacy="patterns")
    by_name = {gate["gate"]: gate for gate in caught.value.gates}
    assert by_name["transitions"]["missing"] == "4995 more clean transitions"
    assert by_name["clean"] == {
        "gate": "clean",
        "passed": False,
        "enforced": True,
        "value": 0.5,
        "required": 0.95,
        "missing": "5 truncated; 90 more clean transitions would do",
    }
    assert by_name["task types"]["missing"] == "2 more task types"
    assert (by_name["privacy"]["passed"], by_name["privacy"]["value"]) == (True, "patterns only")
    assert "names were not detected" in by_name["privacy"]["warning"]
    assert not Path("out").exists()
    assert [p.name for p in Path().iterdir()] == [".assay"]
    report = assay.export("transitions", "out", store=store.url, gates=Gates(min_clean=0))
    assert (report.manifest["passed"], report.manifest["gated"]) == (False, False)
    assert report.rows == 10  # what was cut off is what a policy must learn to avoid


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"error": "boom"}, "error"),
        ({"response": None}, "schema"),
        ({"request": {}}, "schema"),
        ({"response": response_of("x", "length")}, "truncated"),
        ({"output": "", "response": response_of("")}, "parse"),
        (
            {"tools": [ToolCall(name="f", arguments={"arguments": "{"}, error="the arguments are not a JSON object")]},
            "parse",
        ),
        ({"model": ""}, "provenance"),
        ({"token_ids": (1,), "logprobs": None}, "schema"),
    ],
)
def test_problems_of_unclean_calls_are_named(store: Store, broken: dict[str, Any], problem: str) -> None:
    plain = turn(0, "a", "b")
    for name, value in broken.items():
        setattr(plain, name, value)
    add_rollout(store, plain, turn(1, "c", "d"))
    _, manifest = exported(store, "transitions")
    assert manifest["problems"] == {problem: 1}


def test_a_cached_copy_of_an_exported_answer_is_left_out_and_fails_no_gate(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="search")
    for _ in range(9):  # a later run that the response cache answers
        add_rollout(store, turn(0, "a", "b", cached=True), run_id="collect")
    add_rollout(store, turn(0, "a", "b"))  # sampled anew, and the same: that is data
    rows, manifest = exported(store, "transitions", gates=Gates(min_transitions=0, min_task_types=0))
    assert (len(rows), manifest["problems"]) == (2, {})
    assert manifest["left_out"] == {"cached copies of calls that are exported": 9}


def test_a_failed_gate_names_the_run_and_rounds_its_figure(store: Store) -> None:
    for at in range(6):
        add_rollout(
            store,
            turn(0, "a", "b", finish="length" if at < 4 else "stop"),
            task=f"t{at}",
            run_id="late" if at else "early",
        )
    store.flush()
    with pytest.raises(
        UngatedExport,
        match=r"clean is 0\.3333, required is 0\.95: 4 truncated; 3 of them in run late; .*runs.*min_clean",
    ):
        assay.export("sft", "out", store=store.url)


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
    """smolagents writes calls of tools and their results as texts of its own."""
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
    )  # nobody asked this before: what stands there is a demonstration
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
    add_rollout(store, turn(0, "a", "bad"), score=0.9, human_rating=0.2)  # a person's word stands before the rubric's
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
    assert pairs == {("good", "bad"), ("middling", "bad")}  # good and middling are nearer than the margin
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


def test_personal_data_becomes_the_same_surrogate_everywhere_and_can_be_restored_with_the_key(
    store: Store, tmp_path: Path
) -> None:
    from assay.traces.privacy.anonymizer import Anonymizer, restore

    secret = "sk-" + "a1B2" * 12
    text = f"I am Ada Lovelace, ada@lovelace.org, key {secret}"
    for task in ("t1", "t2"):
        add_rollout(
            store,
            turn(0, text, "Dear Ada Lovelace"),
            task=task,
            data_subject="Ada Lovelace",
            metadata={"entities": {"person": ["Ada Lovelace"]}},
        )
    rows, manifest = exported(store, "sft", privacy_key=tmp_path / "keys" / "k")
    prompts = {row["prompt"][0]["content"] for row in rows}
    assert len(prompts) == 1
    (hidden,) = prompts
    assert "Lovelace" not in (tmp_path / "out" / "data.jsonl").read_text()
    assert "lovelace.org" not in hidden
    assert secret not in hidden
    assert manifest["privacy"]["state"] != "failed"
    assert manifest["privacy"]["found"]["email"] >= 1
    table = Anonymizer.read_table(tmp_path / "out" / "surrogates.enc", tmp_path / "keys" / "k")
    assert "ada@lovelace.org" in restore(hidden, table)
    assert secret not in json.dumps(table)
    again, _ = exported(store, "sft", "out2", privacy_key=tmp_path / "keys" / "k")
    assert again == rows
    other, _ = exported(store, "sft", "out3")
    assert other[0]["prompt"] != rows[0]["prompt"]
    with pytest.raises(ConfigError, match="key"):
        exported(store, "sft", "out4", privacy_key=tmp_path / "out4" / "k")


def test_an_erased_person_is_in_no_later_export_and_earlier_exports_are_named(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="t-1", data_subject="Ann Smith")
    add_rollout(store, turn(0, "a", "b"), task="t-2", data_subject="bob")
    rows, _ = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"t-1", "t-2"}
    assert "Smith" not in (Path("out") / "manifest.json").read_text()
    erased = forget_subject(" ann  smith", store=store.url)
    assert (erased["removed"], erased["made_from_them"]) == (1, [str(Path("out").absolute())])
    rows, _ = exported(store, "transitions", "out2")
    assert {row["task"] for row in rows} == {"t-2"}
    assert forget_subject("ann smith", store=store.url)["removed"] == 0
    add_rollout(store, turn(0, "a", "b"), task="t-3", data_subject="Ann Smith")  # of a run that was under way
    rows, manifest = exported(store, "transitions", "out3")
    assert {row["task"] for row in rows} == {"t-2"}
    assert manifest["left_out"] == {"without LM calls or of erased people": 1}


def test_anonymized_values_are_in_no_other_part_of_the_export(store: Store) -> None:
    ann = {"data_subject": "Ann Smithers", "task": "ann@smithers.org", "task_type": "mail of ann@smithers.org"}
    add_rollout(
        store,
        turn(0, "q", "I am Ann Smithers", token_ids=(1,), logprobs=(-1.0,)),
        turn(1, "r", "x", token_ids=(2,), logprobs=(-1.0,)),
        **ann,
        group_id="g",
    )
    add_rollout(
        store, turn(0, "q", "I am Zed Quimby"), score=0.0, **{**ann, "data_subject": "Zed Quimby"}, group_id="g"
    )
    rows, manifest = exported(store, "transitions")
    spelled = [row["token_ids"] for row in sorted(rows, key=lambda row: (-row["score"], row["t"]))]
    assert spelled == [None, [2], None]
    assert manifest["privacy"]["rows_without_token_ids"] == 1
    exported(store, "preferences", "dpo")
    exported(store, "sft", "sft")
    for folder in ("out", "dpo", "sft"):
        text = "".join(
            (Path(folder) / name).read_text() for name in ("data.jsonl", "manifest.json", "README.md")
        ).lower()
        assert not any(word in text for word in ("smithers", "quimby")), folder


def test_columns_of_grpo_are_read_with_their_names(store: Store) -> None:
    inputs = {"card": 4111111111111111, "password": "hunter2222", "phone": "2127365000", "prompt": "mine"}
    add_rollout(store, turn(0, "a", "b"), inputs=inputs)
    (row,), manifest = exported(store, "grpo", rubric="math_qa")
    assert not any(str(value) in json.dumps(row) for name, value in inputs.items() if name != "prompt")
    assert (row["prompt_"], row["prompt"]) == ("mine", [{"role": "user", "content": "a"}])
    assert manifest["privacy"]["state"] != "failed"


def test_a_sealed_task_in_another_spelling_is_not_exported(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="s", split="test", inputs={"question": "How much is 12 plus 30?"})
    add_rollout(store, turn(0, "a", "b"), task="other", inputs={"question": "How much is 12 plus 31?"})
    for at, inputs in enumerate(({"question": "how much  is 12 plus 30? "}, {"prompt": "How much is 12 plus 30?"})):
        add_rollout(store, turn(0, "a", "b"), task=f"again{at}", split="", inputs=inputs)
    add_rollout(store, turn(0, "a", "b"), task="loud", split="Test ")
    rows, _ = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"other"}


@pytest.mark.slow
def test_an_export_reads_a_snapshot_of_the_store(store: Store, tmp_path: Path) -> None:
    for at in range(300):
        add_rollout(store, turn(0, "a", f"b{at}"), task=f"t{at:03}")
    store.flush()
    stop = threading.Event()

    def disturb() -> None:
        with Store(store.url) as other:
            while not stop.is_set():
                with other.engine.begin() as connection:
                    connection.execute(
                        sa.text(
                            "UPDATE rollouts SET status = CASE status WHEN 'done' THEN 'running' ELSE 'done' END "
                            "WHERE task_id = 't100'"
                        )
                    )
                    connection.execute(
                        sa.text(
                            "DELETE FROM transitions WHERE rollout_id IN (SELECT id FROM rollouts WHERE task_id = "
                            "'t200')"
                        )
                    )
                time.sleep(0.001)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        counts = [len(exported(store, "transitions", f"o{n}")[0]) for n in range(6)]
    finally:
        stop.set()
        thread.join()
    assert all(298 <= count <= 300 for count in counts), counts


def test_bad_numbers_are_named_counted_and_left_out(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": float("nan")}))
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": 1e308, "y": 1e308}))
    add_rollout(store, turn(0, "a", "b"), score=5.0)
    add_rollout(store, turn(0, "a", "b"), score=0.5)
    rows, manifest = exported(store, "transitions")
    assert [row["score"] for row in rows] == [0.5]
    assert manifest["left_out"] == {"without an outcome or with a non-finite reward": 2, "unscored": 1}
    for bad in ({"step_weight": math.nan}, {"outcome_weight": math.inf}):
        with pytest.raises(ConfigError, match="finite"):
            exported(store, "transitions", "x", **bad)


def test_calls_of_judges_are_not_exported(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"))
    add_rollout(store, turn(0, "judge this", "yes"), source="judge", score=None)
    _, manifest = exported(store, "transitions")
    assert (manifest["rows"], manifest["problems"]) == (1, {})


def test_a_human_rating_takes_precedence_over_the_score(store: Store) -> None:
    add_rollout(store, turn(0, "a", "liked"), score=0.0, human_rating=1.0)
    add_rollout(store, turn(0, "a", "hated"), score=1.0, human_rating=0.0)
    (pair,), _ = exported(store, "preferences")
    assert pair["chosen"][0]["content"] == "liked"


def test_an_export_never_writes_over_another(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"))
    exported(store, "transitions")
    before = (Path("out") / "data.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        exported(store, "transitions")
    assert (Path("out") / "data.jsonl").read_bytes() == before


def test_an_export_of_an_empty_store_names_the_reason(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), split="test")
    store.flush()
    with pytest.raises(DataError, match="1 left out: of the gate or test split"):
        assay.export("sft", "out", store=store.url, gates=LOOSE)


@pytest.mark.parametrize(
    "bad", [{"method": "x"}, {"by": ()}, {"by": ("colour",)}, {"most_copies": 0}, {"temperature": 2.0}]
)
def test_invalid_settings_of_the_balance_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Balance(**bad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_quality": 2}, "between 0 and 1"), ({"returns": "magic"}, "must be one of"),
        ({"discount": 0.5, "returns": "episode"}, "no effect"), ({"advantage": "x"}, "must be one of"),
        ({"margin": math.nan}, "at least 0"),
    ],
)  # fmt: skip
def test_invalid_settings_of_an_export_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        assay.export("transitions", "out", **options)
    with pytest.raises(ConfigError, match="requires rubric="):
        assay.export("grpo", "out")


def test_an_unknown_setting_of_an_export_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keywords: speed"):
        assay.export("transitions", "out", speed=1)


def test_emoji_surrogates_and_hostile_text_survive(store: Store) -> None:
    add_rollout(store, turn(0, "\U0001f600 \ud800 \x00 \u2028", '</s> {"a": 1} \\u0000'))
    rows, _ = exported(store, "transitions")
    assert "\U0001f600" in json.dumps(rows[0]["input"], ensure_ascii=False)


# -- balance and gates, as arithmetic


@given(
    st.dictionaries(st.tuples(st.text(max_size=3)), st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from(["none", "down", "over", "temperature"]),
    st.integers(0, 5),
)
def test_the_sampler_reaches_exactly_its_targets(counts: dict[tuple[str, ...], int], method: str, seed: int) -> None:
    balance = Balance(method=method, seed=seed)
    sampler, totals = Sampler(counts, balance), Counter[tuple[str, ...]]()
    for cell, count in counts.items():
        copies = [sampler.take(cell) for _ in range(count)]
        totals[cell] += sum(copies)
        assert max(copies) <= (balance.most_copies if method == "over" else 1)
        assert sampler.take(cell) == 0
    expected = targets(counts, balance)
    assert dict(totals) == expected == dict(sampler.after)
    if method == "down":
        assert set(expected.values()) == {min(counts.values())}
    if method == "over":
        assert all(counts[cell] <= value <= max(counts.values()) for cell, value in expected.items())


def test_balancing_by_temperature_is_between_no_and_equal_balancing() -> None:
    # shares ~ 100^0.5 : 4^0.5 = 10 : 2; the smaller keeps its 4, so the larger gets 20
    assert targets({("a",): 100, ("b",): 4}, Balance(method="temperature")) == {("a",): 20, ("b",): 4}
    assert targets({("a",): 100, ("b",): 4}, Balance(method="temperature", temperature=1.0)) == {("a",): 100, ("b",): 4}
    assert targets({("a",): 100, ("b",): 4}, Balance(method="over")) == {("a",): 100, ("b",): 12}


def test_balancing_is_reported_in_the_manifest_and_seeded(store: Store) -> None:
    for at in range(12):
        add_rollout(store, turn(0, f"q{at}", "b"), task=f"t{at}", task_type="a" if at < 9 else "b", score=float(at % 2))
    exports = [
        exported(store, "transitions", f"o{n}", balance=Balance(method="down", seed=seed))
        for n, seed in enumerate((0, 0, 1))
    ]
    picks = [[row["task"] for row in rows] for rows, _ in exports]
    assert picks[0] == picks[1] != picks[2]
    assert exports[0][1]["balance"]["before"] == {"a": 9, "b": 3}
    assert exports[0][1]["balance"]["after"] == {"a": 3, "b": 3}
    many, manifest = exported(store, "transitions", "o9", balance=Balance(method="over", by=("task_type", "outcome")))
    assert manifest["balance"]["after"] == {"a / bad": 5, "a / good": 5, "b / bad": 3, "b / good": 5}
    assert len(many) == 18


def test_difficulty_is_the_tasks_own_or_derived_from_its_mean_score(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="told", metadata={"difficulty": "brutal"})
    add_rollout(store, turn(0, "a", "b"), task="easy")
    for score in (0.0, 0.0, 0.0, 1.0):
        add_rollout(store, turn(0, "a", "b"), task="hard", score=score)
    _, manifest = exported(store, "transitions", balance=Balance(method="over", by=("difficulty",)))
    assert manifest["balance"]["before"] == {"brutal": 1, "easy": 1, "hard": 4}


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_clean_gate_reports_how_many_clean_transitions_are_missing(clean: int, broken: int) -> None:
    report = GateReport(Gates())
    for _ in range(clean):
        report.see("a", None)
    for _ in range(broken):
        report.see("a", "error")
    gate = next(gate for gate in report.to_list() if gate["gate"] == "clean")
    if broken and not gate["passed"]:
        more = int(gate["missing"].split(";")[1].split()[0])
        assert (clean + more) / (clean + broken + more) >= 0.95 > (clean + more - 1) / (clean + broken + more - 1)


# -- trainers


def test_the_files_load_in_datasets(store: Store) -> None:
    from datasets import load_dataset

    add_rollout(store, turn(0, "a", "b"))
    exported(store, "sft")
    loaded = load_dataset("out", split="train")
    assert loaded[0]["prompt"] == [{"role": "user", "content": "a"}]
    exported(store, "transitions", "out2")
    assert len(load_dataset("parquet", data_files="out2/data.parquet", split="train")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo", "preferences"])
def test_plain_trl_trains_on_an_export_with_its_config(store: Store, tiny_model: Path, kind: str) -> None:
    for at in range(8):
        for answer, score in ((f"The answer is {at}.", 1.0), ("I do not know.", 0.0)):
            add_rollout(
                store,
                turn(0, f"How much is {at} + 0?", answer),
                task=f"t{at}",
                score=score,
                inputs={"question": f"How much is {at} + 0?"},
                expected={"answer": str(at)},
            )
    exported(store, kind, **({"rubric": "math_qa"} if kind == "grpo" else {}))
    command = {"sft": "sft", "grpo": "grpo", "preferences": "dpo"}[kind]
    flags = [
        "--model_name_or_path",
        str(tiny_model),
        "--max_steps",
        "2",
        "--use_cpu",
        "--bf16",
        "false",
        "--per_device_train_batch_size",
        "4",
    ]
    flags += ["--gradient_accumulation_steps", "1", "--use_peft", "false"]
    flags += ["--max_completion_length", "8"] if kind == "grpo" else []
    result = subprocess.run(
        [str(Path(sys.executable).with_name("trl")), command, "--config", f"{command}.yaml", *flags], cwd="out",
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."},
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "Training completed" in result.stdout + result.stderr
    assert (Path("out") / "out").is_dir()


def test_a_rubric_is_exported_with_its_check_files_helpers_and_judges(store: Store, tmp_path: Path) -> None:
    for folder in ("own", "own/judges", "own/more"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own" / "help.py").write_text("RIGHT = 'good'\n")
    (tmp_path / "own" / "mine.py").write_text(
        "from help import RIGHT\ndef check(task, prediction, rollout):\n"
        "    return float(prediction['label'] == RIGHT)\n"
    )
    (tmp_path / "own" / "more" / "mine.py").write_text("def check(task, prediction, rollout):\n    return 1.0\n")
    (tmp_path / "own" / "judges" / "one.yaml").write_text("text: Is it kind?\n")
    (tmp_path / "own" / "jury.yaml").write_text("jury:\n  members: [judges/one.yaml, judges/one.yaml]\n")
    (tmp_path / "own" / "r.yaml").write_text(
        "name: r  # mine.py:check stands in check below\ncriteria:\n- {name: a, weight: 2, check: 'mine.py:check'}\n"
        "- {name: b, check: more/mine.py:check}\n"
        "- name: c\n  judge:\n    use: jury.yaml\n"
    )
    add_rollout(store, turn(0, "Text: fine", "good"), inputs={"text": "fine"}, expected={"label": "good"})
    store.flush()
    assay.export("grpo", "out", store=store.url, rubric=tmp_path / "own" / "r.yaml", gates=LOOSE)
    shutil.rmtree(tmp_path / "own")
    shutil.move("out", "elsewhere")
    rubric = assay.load_rubric("elsewhere/rubric.yaml")
    checks = [c.check for c in rubric.criteria if c.check is not None]
    assert [check({}, {"label": "bad"}, None) for check in checks] == [0.0, 1.0]
    assert checks[0]({}, {"label": "good"}, None) == 1.0
    use = rubric.criteria[2].judge.use
    assert [member.spec.text for member in assay.load_judge(use).members] == ["Is it kind?"] * 2


@pytest.mark.parametrize(
    "answer", ['{"label": "good"}', "[[ ## label ## ]]\ngood\n\n[[ ## completed ## ]]", "label: good", "good"]
)
def test_a_reward_reads_the_fields_of_a_completion_and_the_columns_of_the_inputs(store: Store, answer: str) -> None:
    call = turn(0, "Text: fine\nLabel:", answer)
    add_rollout(store, call, inputs={"text": "fine", "prompts": "p"}, expected={"label": "good"})
    rows, manifest = exported(store, "grpo", rubric="classify")
    assert manifest["columns"] == {"inputs": {"text": "text", "prompts_": "prompts"}, "outputs": ["label"]}
    assert rows[0].keys() == {"text", "prompts_", "label", "prompt", "tools", "task_type"}
    spec = importlib.util.spec_from_file_location("exported_reward", Path("out") / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in (answer, answer.replace("good", "bad"))]
    right, wrong = (
        asyncio.run(module.reward([rows[0]["prompt"]], [completion], **columns)) for completion in completions
    )
    assert (right, wrong) == ([1.0], [0.0])


def test_an_export_without_rows_names_the_excluded_rollouts_and_how_to_include_them(
    store: Store, tmp_path: Path
) -> None:
    for at, more in enumerate(
        [{"score": 0.2}, {"score": 0.1}, {"score": None}, {"tenant": "acme"}, {"status": "running"}]
    ):
        add_rollout(store, turn(0, f"Q{at}", "a"), task=f"t{at}", **more)
    add_rollout(store, turn(0, "Q", "a"), task="t", split="test")
    add_rollout(store, turn(0, "Q", "a"), task="again", split="", inputs={"question": "t"})
    store.flush()
    with pytest.raises(DataError) as caught:
        assay.export("sft", "out", store=store.url, gates=LOOSE)
    for part in (
        "of 7 rollouts: ",
        "inputs with this hash are in the gate or test split; record other inputs)",
        "2 left out: below the quality of 0.8 (a lower min_quality includes them)",
        "1 left out: unscored (`assay traces score --rubric R` scores them)",
        "1 left out: of a tenant that was not selected (select it with tenants=…)",
        "1 left out: still running (`assay traces close` ends open rollouts)",
        "1 left out: of the gate or test split (these are never exported; `assay collect` makes rollouts of train "
        "tasks)",
    ):
        assert part in str(caught.value), str(caught.value)
    with pytest.raises(DataError, match="leave out rated=True"):
        assay.export("sft", "out", store=store.url, gates=LOOSE, selection=Selection(rated=True))
    with pytest.raises(DataError, match="no rollout of an agent was selected"):
        assay.export("sft", "out", store=tmp_path / "empty.db", gates=LOOSE)


def test_notes_of_a_reward_name_what_it_does_not_compute(store: Store, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: right, check: exact}\n- {name: kind, judge: 'Is it kind?'}\n"
        "- {name: parsed, scope: step, weight: 0.1, check: parsed}\n"
    )
    add_rollout(store, turn(0, "What?", "7"), prediction={"answer": "7"})
    store.flush()
    judged, step = assay.export("grpo", "out", store=store.url, rubric=tmp_path / "r.yaml", gates=LOOSE).notes
    assert "ASSAY_JUDGE_MODEL about 'kind'" in judged
    assert "the policy is trained on the score of the others" in judged
    assert step == "step criteria are graded on recorded rollouts and are not part of reward.py: 'parsed'"


def test_a_reward_reads_all_fields_of_the_answers_and_names_the_checks_that_it_cannot_decide(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def queue(task, prediction, rollout):\n    return float(prediction['queue'] == task.expected['queue'])\n"
        "def rude(task, prediction, rollout):\n    return float('Whatever' in prediction['reply'])\n"
        "def known(task, prediction, rollout):\n    return float(prediction['looked_up'])\n"
    )
    (tmp_path / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: queue, weight: 4, check: 'mine.py:queue'}\n"
        "- {name: rude, weight: -1, check: 'mine.py:rude'}\n"
        "- {name: known, check: 'mine.py:known'}\n"
    )
    answer = '{"queue": "billing", "reply": "Whatever you say"}'
    add_rollout(store, turn(0, "Refund?", answer), inputs={"text": "Refund?"}, expected={"queue": "billing", "id": "7"},
        prediction={"queue": "billing", "reply": "Whatever you say"})  # fmt: skip
    store.flush()
    report = assay.export("grpo", "out", store=store.url, rubric=tmp_path / "r.yaml", gates=LOOSE)
    assert report.manifest["columns"]["outputs"] == ["queue", "reply"]
    (note,) = report.notes
    assert "criterion 'known' is not computed by reward.py" in note
    assert "The policy is trained on the score of the other criteria" in note
    assert "looked_up" in note
    spec = importlib.util.spec_from_file_location("exported_reward_2", Path("out") / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    columns = {name: [value] for name, value in rows(report.path)[0].items() if name != "prompt"}
    assert asyncio.run(module.reward(["Refund?"], [[{"role": "assistant", "content": answer}]], **columns)) == [0.75]


def test_exclusions_are_counted_for_the_selected_runs_and_programs_only(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t1")
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t2", split="test")
    for status in ("done", "error"):
        add_rollout(store, turn(0, "a", "b"), run_id="other", task="t3", split="gate", status=status, program="q")
    _, manifest = exported(store, "transitions", selection=Selection(runs=("mine",)))
    assert manifest["left_out"] == {"of the gate or test split": 1}
    _, manifest = exported(store, "transitions", "two", selection=Selection(programs=("p",)))
    assert manifest["left_out"] == {"of the gate or test split": 1}
    for selection, message in (
        (Selection(runs=("nosuch",)), "no rollout has the run 'nosuch'.*'mine', 'other'"),
        (Selection(programs=("P",)), "no rollout has the program 'P'.*'p', 'q'"),
    ):
        with pytest.raises(DataError, match=message):
            exported(store, "transitions", "three", selection=selection)


def test_token_ids_are_removed_if_their_text_was_anonymized(store: Store) -> None:
    call = ToolCall(name="send", arguments={"to": "jane.doe@corp.com"}, result="sent")
    add_rollout(
        store,
        Transition(
            t=0,
            model="m",
            request=chat("send it"),
            response=response_of(""),
            output="",
            tools=[call],
            token_ids=(1, 2),
            logprobs=(-1.0, -1.0),
        ),
    )
    (row,), manifest = exported(store, "transitions")
    assert "jane.doe" not in str(row)
    assert (row["token_ids"], row["logprobs"]) == (None, None)
    assert manifest["privacy"]["rows_without_token_ids"] == 1


def test_a_person_named_user_does_not_change_roles_and_the_manifest_has_no_names(store: Store) -> None:
    add_rollout(
        store,
        turn(0, "I am user Jane Doe", "hello"),
        data_subject="user",
        metadata={"entities": {"person": "Jane Doe"}},
        task_type="Jane Doe type",
    )
    (row,), manifest = exported(store, "sft")
    assert [m["role"] for m in row["prompt"] + row["completion"]] == ["user", "assistant"]
    assert "Jane" not in json.dumps(manifest)
    assert "Jane" not in json.dumps(row)


def test_rows_with_the_maximum_nesting_of_the_store_are_exported(store: Store) -> None:
    deep: Any = "x"
    for _ in range(260):
        deep = [deep]
    odd = Transition(
        t=0,
        model="m",
        request={"dialect": "chat", "body": {"messages": [{"role": "user", "content": deep}]}},
        response=response_of("b"),
        output="b",
    )
    add_rollout(store, odd)
    add_rollout(store, turn(0, "a", "b"), task="t2")
    for kind in ("sft", "transitions", "grpo", "preferences"):
        more = {"rubric": "math_qa"} if kind == "grpo" else {"unpaired": True} if kind == "preferences" else {}
        assert len(exported(store, kind, kind, **more)[0]) == 2


def test_large_rows_are_written_in_small_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import assay.traces.export.files

    monkeypatch.setattr(assay.traces.export.files, "_BYTES", 50_000)
    for at in range(10):
        add_rollout(store, turn(0, "a" * 20_000, str(at)), task=f"t{at}")
    exported(store, "transitions")
    assert pq.ParquetFile("out/data.parquet").num_row_groups == 4


def test_a_task_collected_twice_is_one_group_if_grouped_by_task(store: Store) -> None:
    for run, score in (("a", 1.0), ("b", 0.0)):
        add_rollout(store, turn(0, "a", f"said in {run}"), run_id=run, group_id=f"{run}/t1", score=score)
    assert [row["advantage"] for row in exported(store, "transitions")[0]] == [0.0, 0.0]
    rows = exported(store, "transitions", "by-task", group_by="task")[0]
    assert sorted(row["advantage"] for row in rows) == pytest.approx([-(2**0.5), 2**0.5], rel=1e-3)
    assert {row["group"] for row in rows} == {"t1"}
    assert len(exported(store, "preferences", "pairs", group_by="task")[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "C:\\users\\u0000x", "\\"])
def test_texts_that_contain_escape_sequences_are_unchanged(store: Store, text: str) -> None:
    add_rollout(store, turn(0, text, text))
    (row,), _ = exported(store, "transitions")
    assert row["output"] == row["input"]["body"]["messages"][0]["content"] == text
    add_rollout(store, turn(0, "a\0b", "c"), task="nul")
    assert "a\ufffdb" in str(exported(store, "transitions", "nul")[0])


@pytest.mark.slow
def test_an_export_from_postgresql_is_the_same(store: Store, postgres_url: str) -> None:
    def filled(opened: Store) -> None:
        store_splits(opened, {"train": [(content_hash({"question": f"q{at}"}), "") for at in range(5)]})
        for at in range(6):
            for sample, score in enumerate((1.0, 0.0)):
                rollout = Rollout(
                    id=f"{0xe0 + at:016x}{sample:016x}", run_id="pg-export", task_id=f"Täsk {at}", group_id=f"g{at}",
                    task_type="ab"[at % 2], status="done", program="p",
                    program_version="v", model="m", score=score, split="test" if at == 5 else "train",
                    inputs={"question": f"q{at}"}, rubric="r@1",
                    data_subject="Ida Pg" if at == 0 else None,
                )  # fmt: skip
                opened.put_rollout(rollout)
                opened.put_transition(
                    rollout.id, turn(0, f"q{at} by jane.doe@corp.com", f"a{sample}", token_ids=(1,), logprobs=(-1.0,))
                )
        opened.flush()

    mine = Selection(runs=("pg-export",))  # other tests write there too
    with Store(postgres_url) as server:
        for opened, out in ((store, "lite"), (server, "pg")):
            filled(opened)
            for kind in ("transitions", "sft", "preferences"):
                exported(
                    opened,
                    kind,
                    f"{kind}-{out}",
                    privacy_key=Path("keys") / "k",
                    balance=Balance(method="down"),
                    selection=mine,
                )
        assert erase_subject(server, "Ida Pg").removed == 2
        assert {row["task"] for row in exported(server, "transitions", "after", selection=mine)[0]} == {
            f"Täsk {at}" for at in range(1, 5)
        }
    for kind in ("transitions", "sft", "preferences"):
        lite, pg = ([json.dumps(row, sort_keys=True) for row in rows(Path(f"{kind}-{out}"))] for out in ("lite", "pg"))
        assert sorted(lite) == sorted(pg)
        assert lite
