"""Conversations that the server of a Responses API kept for its client, in the rows of exports and of training."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.optimizers.finetuning.rows import trajectory_of
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.messages.chaining import full_requests
from assay.traces.messages.dialects import chat_messages

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)


def responses_request(items: Any, **body: Any) -> dict[str, Any]:
    return {"dialect": "responses", "body": {"model": "m", "input": items, **body}}


def text(response_id: str, content: str) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": content}]}
    return {"id": response_id, "status": "completed", "output": [item]}


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
CALLED = {"id": "resp_1", "status": "completed", "output": [{"type": "reasoning", "id": "rs_1", "summary": []}, CALL]}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
CONVERSATION = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def test_a_fork_continues_the_response_that_it_names() -> None:
    calls = [
        (responses_request("1 + 2?"), CALLED),
        (responses_request([RESULT], previous_response_id="resp_1"), text("resp_2", "3")),
        (responses_request([RESULT], previous_response_id="resp_1"), text("resp_3", "three")),
    ]
    assert [chat_messages(request or {}) for request in full_requests(calls)[1:]] == [CONVERSATION, CONVERSATION]


def test_requests_of_one_conversation_contain_the_earlier_calls() -> None:
    calls = [
        (responses_request("1 + 2?", conversation="conv_1"), CALLED),
        (responses_request("hi", conversation={"id": "conv_2"}), text("resp_9", "hello")),
        (responses_request([RESULT], conversation={"id": "conv_1"}), text("resp_2", "3")),
    ]
    assert chat_messages(full_requests(calls)[2] or {}) == CONVERSATION


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / ".assay" / "assay.db") as opened:
        yield opened


def store_rollout(store: Store, *calls: tuple[dict[str, Any], dict[str, Any]]) -> Rollout:
    turns = [
        Transition(t=t, model="m", request=request, response={"body": body}, output="3")
        for t, (request, body) in enumerate(calls)
    ]
    rollout = Rollout(
        run_id="r",
        task_id="t",
        status="done",
        score=1.0,
        model="m",
        split="train",
        inputs={"question": "1 + 2?"},
        expected={"answer": "3"},
        transitions=turns,
    )
    store.put_rollout(rollout)
    for turn in turns:
        store.put_transition(rollout.id, turn)
    store.flush()
    return rollout


def rows(kind: str, store: Store, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    report = assay.export(kind, kind, store=store.url, gates=LOOSE, privacy="off", **options)
    return [json.loads(line) for line in (report.path / "data.jsonl").read_text().splitlines()], report.manifest


def test_rows_with_an_unrecorded_conversation_are_left_out_and_fail_the_gate(store: Store) -> None:
    store_rollout(
        store,
        (responses_request("1 + 2?"), CALLED),
        (responses_request([RESULT], previous_response_id="resp_0"), text("resp_2", "3")),
    )
    exported, manifest = rows("sft", store)
    assert ([row["t"] for row in exported], manifest["problems"]) == ([0], {"conversation": 1})


def test_training_on_chained_calls_reads_the_complete_conversation(store: Store) -> None:
    class Words:
        """One token a message."""

        def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
            return list(range(len(messages)))

    rollout = store_rollout(
        store,
        (responses_request("1 + 2?"), CALLED),
        (responses_request([RESULT], previous_response_id="resp_1"), text("resp_2", "3")),
    )
    rollout.transitions[1].token_ids, rollout.transitions[1].prompt_tokens = (1, 2), 3
    excluded = Counter[str]()
    trajectory = trajectory_of(rollout, Words(), max_length=100, behaviour=False, left_out=excluded)
    assert [(row.turn, len(row.prompt_ids)) for row in trajectory.rows] == [(1, 3)]
    rollout.transitions[1].request["body"]["previous_response_id"] = "resp_0"
    assert not trajectory_of(rollout, Words(), max_length=100, behaviour=False, left_out=excluded).rows
    assert excluded["calls that continue a conversation that is not on record"] == 1
