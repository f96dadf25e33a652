"""Refusals and content filters of a gateway's agent are named and are no answers, on every wire and in streams."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.datasets import Task
from assay.evaluation.stored import grade_rollout
from assay.rubrics import load_rubric
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served

HEADERS = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hi"}]
REFUSAL = {"type": "refusal", "refusal": "I will not."}
PATHS = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": USER}),
    "responses": ("/v1/responses", {"model": "m", "input": "hi"}),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": USER}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}


def chat(finish: str, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def chunks(finish: str, *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    ended = [{"index": 0, "delta": {}, "finish_reason": finish}]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    return [{"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": c} for c in [*choices, ended]]


def response(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    items = [{"type": "message", "id": "i", "role": "assistant", "content": list(parts)}] if parts else []
    return {"id": "r", "object": "response", "model": "m", "status": "completed", "output": items, **more}


def claude(stop: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text} for text in texts]
    usage = {"input_tokens": 1, "output_tokens": 1}
    return {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": content, "stop_reason": stop,
            "usage": usage}  # fmt: skip


def claude_stream(stop: str, text: str) -> list[dict[str, Any]]:
    return [
        {"type": "message_start", "message": {**claude(stop), "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]


def gemini(reason: str, *texts: str) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": text} for text in texts]}
    return {"candidates": [{"index": 0, "finishReason": reason, **({"content": content} if texts else {})}]}


def responses_stream() -> list[dict[str, Any]]:
    at = {"output_index": 0, "content_index": 0, "item_id": "i"}
    return [
        {"type": "response.created", "response": response(status="in_progress")},
        {"type": "response.refusal.delta", **at, "delta": "I will "},
        {"type": "response.refusal.delta", **at, "delta": "not."},
        {"type": "response.completed", "response": response(REFUSAL)},
    ]


def graded(folder: Path, dialect: str, reply: Any) -> tuple[float, str | None]:
    """The score and the failure of a gateway's rollout whose only call was answered so; a list is a stream's events."""

    async def answer(_: web.Request) -> web.Response:
        if isinstance(reply, dict):
            return web.json_response(reply)
        lines = [f"event: {e.get('type', 'message')}\ndata: {json.dumps(e)}\n\n" for e in reply]
        text = "".join(lines) + "data: [DONE]\n\n" * (dialect == "chat")
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    path, body = PATHS[dialect]
    if isinstance(reply, list):
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        body = {**body, **({} if dialect == "gemini" else {"stream": True})}
    with Store(folder / "s.db") as store, served(app) as behind:
        gateway = Gateway(store, upstream_of(None, base=behind))
        with served(gateway.app()) as url:
            urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), HEADERS)).read()
        store.flush()
        (rollout,) = (store.rollout(r.id) for r in store.rollouts())
    assert rollout.transitions[0].error is None
    result = grade_rollout(load_rubric("exact"), Task(id="t", inputs={}, expected={"answer": "I will not."}), rollout)
    return result.value, result.result.failed if result.result else None


@pytest.mark.parametrize(
    ("dialect", "reply", "word"),
    [
        ("chat", chat("stop", refusal="I will not."), "refusal"),
        ("chat", chat("stop", content=[REFUSAL]), "refusal"),
        ("chat", chat("content_filter", content="I will not."), "content_filter"),
        ("chat", chat("SAFETY", content="I will not."), "SAFETY"),
        ("chat", chat("content_filter"), "content_filter"),
        ("chat", chunks("stop", {"refusal": "I will "}, {"refusal": "not."}), "refusal"),
        ("chat", chunks("content_filter", {"content": "I will not."}), "content_filter"),
        ("responses", response(REFUSAL), "refusal"),
        ("responses", response({"type": "output_text", "text": "I will not."}, status="incomplete",
                               incomplete_details={"reason": "content_filter"}), "content_filter"),
        ("responses", responses_stream(), "refusal"),
        ("messages", claude("refusal", "I will not."), "refusal"),
        ("messages", claude("refusal"), "refusal"),
        ("messages", claude_stream("refusal", "I will not."), "refusal"),
        ("gemini", gemini("SAFETY", "I will not."), "SAFETY"),
        ("gemini", gemini("PROHIBITED_CONTENT"), "PROHIBITED_CONTENT"),
        ("gemini", {"promptFeedback": {"blockReason": "OTHER"}}, "OTHER"),
        ("gemini", [gemini("", "I will "), gemini("RECITATION", "not.")], "RECITATION"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_failure_with_the_providers_word(tmp_path: Path, dialect: str, reply: Any, word: str) -> None:
    score, failed = graded(tmp_path, dialect, reply)
    assert score == 0.0
    assert f"({word})" in str(failed)


@pytest.mark.parametrize(
    ("dialect", "reply"),
    [
        ("chat", chat("stop", content="I will not.")),
        ("chat", chat("length", content="I will not.")),
        ("responses", response({"type": "output_text", "text": "I will not."})),
        ("messages", claude_stream("end_turn", "I will not.")),
        ("gemini", gemini("STOP", "I will not.")),
    ],
)
def test_a_text_that_says_no_is_an_answer(tmp_path: Path, dialect: str, reply: Any) -> None:
    assert graded(tmp_path, dialect, reply) == (1.0, None)
