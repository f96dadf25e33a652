"""Calls whose conversation or answer the server keeps: chained responses, references to items, background responses."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from click.testing import CliRunner
from exact_answers import as_turn

import assay
from assay.cli import group
from assay.datasets import Task
from assay.errors import FailureKind
from assay.evaluation.stored import grade_rollout
from assay.optimizers.finetuning.rows import trajectory_of
from assay.reports.texts import Budget
from assay.rubrics import Criterion, Rubric
from assay.rubrics.conversations import user_corrected
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.messages.chaining import complete_requests, full_requests
from assay.traces.messages.dialects import chat_messages
from assay.web.rollouts import turns_of
from rigs.gateway import AnsweringServer, Stage, opened_stage, send_events, user


def message(number: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": f"a{number}", "annotations": []}
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}


def response(number: int, *items: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    known = {"id": f"resp_{number}", "object": "response", "created_at": 1, "model": "m", "status": status}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    return {**known, "output": list(items), "usage": usage, "tools": [], "tool_choice": "auto"}


def asked(items: Any, **body: Any) -> dict[str, Any]:
    return {"dialect": "responses", "body": {"model": "m", "input": items, **body}}


def turn(t: int, request: dict[str, Any], body: dict[str, Any], output: str = "") -> Transition:
    return Transition(t=t, model="m", request=request, response={"body": body}, output=output)


class Server(AnsweringServer):
    """A server of the Responses API that answers with the texts `a1`, `a2`, …, in the background if it is asked to."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.made = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":  # a background response, which is finished when it is read
            number = int(request.path.rpartition("_")[2])
            ended = response(number, message(number))
            if "stream" in request.query:
                return await send_events(request, [{"type": "response.completed", "response": ended}])
            return web.json_response(ended)
        body = await request.json()
        self.made += 1
        if body.get("stream"):
            begun = response(self.made, status="in_progress")
            return await send_events(request, [{"type": "response.created", "response": begun}])  # and breaks off
        if body.get("background"):
            return web.json_response(response(self.made, status="queued"))
        return web.json_response(response(self.made, message(self.made)))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with opened_stage(tmp_path, Server(), upstream_key="secret") as opened:
        yield opened


def score_of(rollout: Rollout) -> float:
    rubric = Rubric(name="r", criteria=[Criterion(name="c", check=lambda task, prediction, rollout: 1.0)])
    rollout.status = "done"  # its client has closed it
    return grade_rollout(rubric, Task(id="t", inputs=rollout.inputs), rollout).value


# -- references to items


def test_a_request_that_names_items_continues_their_rollout(stage: Stage) -> None:
    first, second = {"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}
    for items in (
        [user("one")],
        [user("one"), first, user("two")],
        [user("one"), first, user("two"), second, user("three")],
        [user("something else")],
    ):
        stage.client.responses.create(model="m", input=items)  # type: ignore[arg-type]
    continued, other = stage.rollouts()
    assert [t.output for t in continued.transitions] == ["a1", "a2", "a3"]
    assert [t.output for t in other.transitions] == ["a4"]
    last = full_requests([(t.request, (t.response or {})["body"]) for t in continued.transitions])[-1]
    assert last is not None
    told = [(m["role"], m["content"]) for m in chat_messages(last)]
    assert told == [("user", "one"), ("assistant", "a1"), ("user", "two"), ("assistant", "a2"), ("user", "three")]
    assert score_of(continued) == 1.0
    rows = [as_turn(transition) for transition in continued.transitions]
    complete_requests(rows)
    assert [len(row.messages) for row in rows] == [1, 3, 5]


@pytest.mark.parametrize(
    "request_of",
    [
        asked([user("one"), {"type": "item_reference", "id": "msg_99"}, user("two")]),
        asked("two", previous_response_id="resp_99"),
    ],
)
def test_what_is_not_on_record_leaves_the_rollout_unscored(request_of: dict[str, Any]) -> None:
    body = response(1, message(1))
    calls = [turn(0, request_of, body, "a1")]
    rollout = Rollout(status="done", inputs={"prompt": "two"}, prediction={"answer": "a1"}, transitions=calls)
    assert full_requests([(request_of, body)]) == [None]
    assert str(score_of(rollout)) == "nan"
    assert (rollout.score, rollout.failure) == (None, FailureKind.RECORD)


def conversation(**second: Any) -> list[Transition]:
    """Two calls whose second names the items of the first, or has other fields."""
    requests = [asked([user("one")]), asked(**{"items": [user("one"), {"id": "msg_1"}, user("I need two")], **second})]
    return [turn(t, request, response(t + 1, message(t + 1)), output=f"a{t + 1}") for t, request in enumerate(requests)]


def test_named_items_are_shown_with_their_texts(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store_rollout(store, conversation(), id="r1")
    shown = CliRunner().invoke(group, ["traces", "show", "r1", "--store", store.url])
    assert shown.output.count("assistant: a1") == 1
    assert "user: \n" not in shown.output
    (_, second) = turns_of(conversation(), None, Budget())
    assert [m.text.text for m in second.messages] == ["a1", "I need two"]


def test_checks_of_conversations_read_what_the_server_keeps() -> None:
    calls = conversation(items=[user("That is wrong, it is two")], previous_response_id="resp_1")
    rollout = Rollout(status="done", inputs={"prompt": "one"}, transitions=calls)
    assert user_corrected(Task(id="t", inputs={}), {"transition": calls[0]}, rollout).value == 1.0


# -- background responses


def test_a_background_stream_that_broke_off_is_completed_by_reading_on(stage: Stage) -> None:
    responses = stage.client.responses
    begun = responses.create(model="m", input="one", background=True, stream=True)
    assert [event.type for event in begun] == ["response.created"]
    responses.retrieve("resp_1", stream=True, starting_after=0).close()
    responses.retrieve("resp_1")
    assert (stage.call().output, stage.call().error) == ("a1", None)


def test_a_rollouts_token_reads_only_its_own_background_responses(stage: Stage) -> None:
    tokens = [stage.manage("/assay/rollouts", {"id": name})[1]["api_key"] for name in ("a", "b")]
    own, foreign = (openai.OpenAI(base_url=f"{stage.url}/v1", api_key=token, max_retries=0) for token in tokens)
    begun = own.responses.create(model="m", input="one", background=True)
    with pytest.raises(openai.APIStatusError):
        foreign.responses.retrieve(begun.id)
    assert own.responses.retrieve(begun.id).status == "completed"


# -- chained responses, in the rows of exports and of training

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
CALLED = response(1, {"type": "reasoning", "id": "rs_1", "summary": []}, CALL)
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
FUNCTION = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
CONVERSATION = [
    user("1 + 2?"),
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def chained(response_id: str) -> list[Transition]:
    later = asked([RESULT], previous_response_id=response_id)
    return [turn(0, asked("1 + 2?"), CALLED, "3"), turn(1, later, response(2, message(2)), "3")]


def store_rollout(store: Store, calls: list[Transition], **more: Any) -> Rollout:
    given: dict[str, Any] = {"inputs": {"question": "1 + 2?"}, "expected": {"answer": "3"}, "run_id": "r", **more}
    rollout = Rollout(**given, task_id="t", status="done", score=1.0, model="m", split="train", transitions=calls)
    store.put_rollout(rollout)
    for call in calls:
        store.put_transition(rollout.id, call)
    store.flush()
    return rollout


@pytest.mark.parametrize(
    "requests",
    [
        [  # a fork continues the response that it names
            asked("1 + 2?"),
            asked([RESULT], previous_response_id="resp_1"),
            asked([RESULT], previous_response_id="resp_1"),
        ],
        [
            asked("1 + 2?", conversation="conv_1"),
            asked("hi", conversation={"id": "conv_2"}),
            asked([RESULT], conversation={"id": "conv_1"}),
        ],
    ],
)
def test_requests_contain_the_earlier_calls_of_their_conversation(requests: list[dict[str, Any]]) -> None:
    bodies = [CALLED, response(2, message(2)), response(3, message(3))]
    assert chat_messages(full_requests(list(zip(requests, bodies, strict=True)))[2] or {}) == CONVERSATION


def test_rows_with_an_unrecorded_conversation_are_left_out_and_fail_the_gate(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store_rollout(store, chained("resp_0"))
    gates = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
    report = assay.export("sft", "sft", store=store.url, gates=gates, privacy="off")
    rows = [json.loads(line) for line in (report.path / "data.jsonl").read_text().splitlines()]
    assert ([row["t"] for row in rows], report.manifest["problems"]) == ([0], {"conversation": 1})


def test_training_on_chained_calls_reads_the_complete_conversation() -> None:
    class Words:
        """One token a message."""

        def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
            return list(range(len(messages)))

    def rows_of(response_id: str) -> list[tuple[int, int]]:
        rollout = Rollout(inputs={"question": "1 + 2?"}, score=1.0, status="done", transitions=chained(response_id))
        rollout.transitions[1].token_ids, rollout.transitions[1].prompt_tokens = (1, 2), 3
        trajectory = trajectory_of(rollout, Words(), max_length=100, behaviour=False, left_out=excluded)
        return [(row.turn, len(row.prompt_ids)) for row in trajectory.rows]

    excluded = Counter[str]()
    assert (rows_of("resp_1"), rows_of("resp_0")) == ([(1, 3)], [])
    assert excluded["calls that continue a conversation that is not on record"] == 1
