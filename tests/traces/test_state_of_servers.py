"""Calls whose conversation or answer the server keeps: references to items, and background responses."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from click.testing import CliRunner
from exact_answers import as_turn

from assay.cli.main import group
from assay.datasets import Task
from assay.errors import FailureKind
from assay.evaluation.stored import grade_rollout
from assay.reports.texts import Budget
from assay.rubrics import Criterion, Rubric
from assay.rubrics.conversations import user_corrected
from assay.traces import Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.messages.chaining import complete_requests, full_requests
from assay.traces.messages.dialects import chat_messages
from assay.web.rollouts import turns_of
from rigs.serving import post, served


def message(item_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": [part]}


def response(response_id: str, *items: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    known = {"id": response_id, "object": "response", "created_at": 1, "model": "m", "status": status}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    return {**known, "output": list(items), "usage": usage, "tools": [], "tool_choice": "auto", **more}


class Server:
    """A server of the Responses API that answers with the texts `a1`, `a2`, …, in the background if it is asked to.

    A background response is finished when it has been read `polls` times.
    """

    def __init__(self, polls: int = 2, ends: str = "completed") -> None:
        self.made, self.polls, self.ends, self.reads = 0, polls, ends, 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/responses", self._create)
        app.router.add_get("/v1/responses/{id}", self._read)
        app.router.add_post("/v1/responses/{id}/cancel", self._cancel)
        return app

    def _answer(self, number: int, status: str = "completed") -> dict[str, Any]:
        items = [message(f"msg_{number}", f"a{number}")] if status == "completed" else []
        return response(f"resp_{number}", *items, status=status)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.made += 1
        status = "queued" if body.get("background") else "completed"
        if not body.get("stream"):
            return web.json_response(self._answer(self.made, status))
        events = [{"type": "response.created", "response": self._answer(self.made, "in_progress")}]
        return await self._stream(request, events)  # and breaks off

    async def _read(self, request: web.Request) -> web.StreamResponse:
        self.reads += 1
        number = int(request.match_info["id"].removeprefix("resp_"))
        status = self.ends if self.reads >= self.polls else "in_progress"
        if "stream" in request.query:
            ended = self._answer(number, self.ends)
            return await self._stream(request, [{"type": f"response.{self.ends}", "response": ended}])
        return web.json_response(self._answer(number, status))

    async def _cancel(self, request: web.Request) -> web.Response:
        return web.json_response(self._answer(int(request.match_info["id"].removeprefix("resp_")), "cancelled"))

    async def _stream(self, request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await reply.write_eof()
        return reply


class Stage:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, *items: Any, **more: Any) -> Any:
        return self.client.responses.create(model="m", input=list(items), **more)

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]

    def run(self) -> Rollout:
        (rollout,) = self.rollouts()
        return rollout


@pytest.fixture
def stage_of(tmp_path: Path) -> Iterator[Callable[[Server], Stage]]:
    closing: list[Any] = []

    def make(server: Server) -> Stage:
        closing.append(store := Store(tmp_path / "s.db"))
        store.__enter__()
        closing.append(behind := served(server.app()))
        gateway = Gateway(store, upstream_of("m", base=behind.__enter__(), key="secret"))
        closing.append(front := served(gateway.app()))
        return Stage(gateway, front.__enter__())

    yield make
    for opened in reversed(closing):
        opened.__exit__(None, None, None)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def named(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def score_of(rollout: Rollout) -> float:
    rubric = Rubric(name="r", criteria=[Criterion(name="c", check=lambda task, prediction, rollout: 1.0)])
    rollout.status = "done"  # its client has closed it
    return grade_rollout(rubric, Task(id="t", inputs=rollout.inputs), rollout).value


# -- references


def test_a_request_that_names_items_continues_their_rollout(stage_of: Callable[[Server], Stage]) -> None:
    stage = stage_of(Server())
    stage.ask(user("one"))
    stage.ask(user("one"), named("msg_1"), user("two"))
    stage.ask(user("one"), named("msg_1"), user("two"), {"id": "msg_2"}, user("three"))
    stage.ask(user("something else"))
    first, other = stage.rollouts()
    assert ([t.output for t in first.transitions], [t.output for t in other.transitions]) == (
        ["a1", "a2", "a3"],
        ["a4"],
    )
    last = full_requests([(t.request, (t.response or {})["body"]) for t in first.transitions])[-1]
    assert last is not None
    assert [(m["role"], m["content"]) for m in chat_messages(last)] == [
        ("user", "one"), ("assistant", "a1"), ("user", "two"), ("assistant", "a2"), ("user", "three"),
    ]  # fmt: skip
    assert score_of(first) == 1.0
    rows = [as_turn(transition) for transition in first.transitions]
    complete_requests(rows)
    assert [len(row.messages) for row in rows] == [1, 3, 5]


@pytest.mark.parametrize(
    "more",
    [
        {"input": [user("one"), named("msg_99"), user("two")]},
        {"input": "two", "previous_response_id": "resp_99"},
    ],
)
def test_what_is_not_on_record_leaves_the_rollout_unscored(more: dict[str, Any]) -> None:
    request = {"dialect": "responses", "body": {"model": "m", **more}}
    body = response("resp_1", message("msg_1", "a"))
    call = Transition(t=0, model="m", request=request, response={"body": body}, output="a")
    rollout = Rollout(status="done", inputs={"prompt": "two"}, prediction={"answer": "a"}, transitions=[call])
    assert full_requests([(request, body)]) == [None]
    assert str(score_of(rollout)) == "nan"
    assert (rollout.score, rollout.failure) == (None, FailureKind.RECORD)


def conversation() -> list[Transition]:
    """Two calls whose second names the items of the first."""
    later = [user("one"), {"id": "msg_1"}, user("I still need two")]
    bodies = [(1, [user("one")]), (2, later)]
    return [
        Transition(
            t=number - 1,
            model="m",
            request={"dialect": "responses", "body": {"model": "m", "input": items}},
            response={"body": response(f"resp_{number}", message(f"msg_{number}", f"a{number}"))},
            output=f"a{number}",
        )
        for number, items in bodies
    ]


def test_named_items_are_shown_with_their_texts(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(rollout := Rollout(id="r1", status="done", inputs={"prompt": "one"}))
        for call in conversation():
            store.put_transition(rollout.id, call)
        store.flush()
    shown = CliRunner().invoke(group, ["traces", "show", "r1", "--store", store.url])
    assert shown.output.count("assistant: a1") == 1
    assert "user: \n" not in shown.output
    (_, second) = turns_of(conversation(), None, Budget())
    assert [m.text.text for m in second.messages] == ["a1", "I still need two"]


def test_checks_of_conversations_read_what_the_server_keeps() -> None:
    first, second = conversation()
    second.request["body"] = {"input": [user("That is wrong, it is two")], "previous_response_id": "resp_1"}
    rollout = Rollout(status="done", inputs={"prompt": "one"}, transitions=[first, second])
    assert user_corrected(Task(id="t", inputs={}), {"transition": first}, rollout).value == 1.0


# -- background responses


def test_a_background_stream_that_broke_off_is_completed_by_reading_on(stage_of: Callable[[Server], Stage]) -> None:
    stage = stage_of(Server(polls=1))
    assert [event.type for event in stage.ask(user("one"), background=True, stream=True)] == ["response.created"]
    stage.client.responses.retrieve("resp_1", stream=True, starting_after=0).close()
    stage.client.responses.retrieve("resp_1")
    (call,) = stage.run().transitions
    assert (call.output, call.error) == ("a1", None)


def test_a_rollouts_token_reads_only_its_own_background_responses(stage_of: Callable[[Server], Stage]) -> None:
    stage = stage_of(Server(polls=1))
    owner = {"Authorization": f"Bearer {stage.gateway.access.key}"}
    tokens = [post(f"{stage.url}/assay/rollouts", {"id": name}, **owner)[1]["api_key"] for name in ("a", "b")]
    own, foreign = (openai.OpenAI(base_url=f"{stage.url}/v1", api_key=token, max_retries=0) for token in tokens)
    begun = own.responses.create(model="m", input="one", background=True)
    with pytest.raises(openai.APIStatusError):
        foreign.responses.retrieve(begun.id)
    assert own.responses.retrieve(begun.id).status == "completed"
