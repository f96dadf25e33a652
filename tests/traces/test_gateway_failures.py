"""Failures, refusals and loops in answers at the gateway are stored with their kind and text, on every wire."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.datasets import Task
from assay.errors import ConfigError, FailureKind
from assay.evaluation.stored import grade_rollout
from assay.rubrics import load_rubric
from assay.traces import Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.gateway import AnsweringServer, Stage, body_of, opened_stage, send_events
from rigs.serving import get
from rigs.upstream import ScriptedUpstream

OVERLOADED = {"message": "overloaded", "type": "server_error"}


class Planned(AnsweringServer):
    """Answers every call with one body, or one stream of events, and a status."""

    def __init__(self) -> None:
        super().__init__(self._planned)
        self.body: Any = {}
        self.status = 200

    async def _planned(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.body, list):
            return await send_events(request, self.body)
        return web.json_response(self.body, status=self.status)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with opened_stage(tmp_path_factory.mktemp("failures"), Planned(), model=None) as opened:
        yield opened


numbers = itertools.count()


def answered(stage: Stage, dialect: str, body: Any, status: int = 200) -> tuple[bytes, Rollout, Transition]:
    """What a caller gets of an answer, or of the events of a stream, and the rollout and call on record."""
    stage.upstream.body, stage.upstream.status = body, status
    request = body_of(dialect, f"hello {next(numbers)}")  # each is a rollout of its own
    if isinstance(body, list):
        received = stage.stream(dialect, request)
    else:
        returned, reply = stage.post(dialect, request, **{"x-assay-end": "1"})
        assert returned == status
        received = json.dumps(reply).encode()
    stage.store.flush()
    rollout = stage.store.rollout(next(stage.store.rollouts()).id)
    (transition,) = rollout.transitions
    return received, rollout, transition


# -- bodies


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"error": OVERLOADED}),
        ("chat", {"error": "overloaded"}),
        ("chat", {"choices": []}),
        ("chat", {"choices": [None]}),
        ("chat", {"choices": None}),
        ("chat", {"choices": [{"index": 0, "message": None}]}),
        ("chat", {}),
        ("chat", {"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}),
        ("chat", {"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": OVERLOADED}]}),
        ("chat", {"object": "error", **OVERLOADED, "code": 400}),
        ("chat", {"detail": "overloaded"}),
        ("responses", {"error": OVERLOADED}),
        ("responses", {"status": "failed", "output": [], "error": OVERLOADED}),
        ("responses", {"status": "completed"}),
        ("messages", {"type": "error", "error": OVERLOADED}),
        ("messages", {"type": "message", "content": None}),
        ("gemini", {"usageMetadata": {}}),
        ("gemini", {"error": {"code": 503, **OVERLOADED}}),
    ],
    ids=str,
)
def test_status_200_without_an_answer_is_a_failure(stage: Stage, dialect: str, body: dict[str, Any]) -> None:
    received, rollout, transition = answered(stage, dialect, body)
    assert json.loads(received) == body  # the caller gets it as it came
    assert (transition.failure, transition.output, rollout.prediction) == (FailureKind.MODEL, "", None)
    assert ("overloaded" if "overloaded" in str(body) else "") in str(transition.error)
    assert transition.error is not None


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "too long", "code": "context_length_exceeded"}, "context"),
        (400, {"message": "too long", "type": "exceed_context_size_error"}, "context"),
        (400, {"message": "context_length_exceeded is what you may think of"}, "model"),
        (504, {"message": "late"}, "timeout"),
        (500, {"message": "boom"}, "model"),
    ],
)
def test_an_upstreams_error_has_the_kind_of_its_code(
    stage: Stage, status: int, error: dict[str, str], kind: str
) -> None:
    assert answered(stage, "chat", {"error": error}, status)[2].failure == kind


@pytest.mark.parametrize(
    "fields", [{"code": "context_length_exceeded"}, {"code": 400, "param": "input_tokens"}, {"code": 40303}]
)
def test_a_flat_context_error_has_its_kind(stage: Stage, fields: dict[str, Any]) -> None:
    error = {"object": "error", "message": "too long", **fields}
    for body in (error, [error]):
        call = answered(stage, "chat", body)[2]
        assert (call.failure, "too long" in str(call.error)) == (FailureKind.CONTEXT, True)


# -- streams


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}
    return {"id": "1", "model": "m", "choices": [choice]}


CREATED = {"type": "response.created", "response": {"id": "r", "output": []}}
STARTED = {"type": "message_start", "message": {"id": "m", "content": []}}
FAILED = {"id": "r", "status": "failed", "output": [], "error": OVERLOADED}
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        ("chat", [chunk("par"), {"error": OVERLOADED}]),
        ("chat", [{"error": OVERLOADED}]),
        ("chat", [chunk("par"), {"object": "error", **OVERLOADED, "code": 400}]),
        ("chat", [chunk("par"), chunk("", "error", error=OVERLOADED)]),
        ("chat", [{"detail": "overloaded"}]),
        ("chat", [chunk("par"), b"event: error\ndata: overloaded\n\n"]),
        ("responses", [CREATED, {"type": "error", "code": "server_error", "message": "overloaded"}]),
        ("responses", [CREATED, {"type": "response.failed", "response": FAILED}]),
        ("messages", [STARTED, {"type": "error", "error": OVERLOADED}]),
    ],
)
def test_the_error_of_a_stream_that_breaks_is_kept(stage: Stage, dialect: str, events: list[Any]) -> None:
    received, _, transition = answered(stage, dialect, events)
    assert b"overloaded" in received
    assert (transition.failure, "overloaded" in str(transition.error)) == (FailureKind.MODEL, True)
    assert transition.output == ("par" if len(events) == 2 and dialect == "chat" else "")


@pytest.mark.parametrize(
    "event",
    [b'data: {"choices": [{"delta": {"con\n\n', b'data: {"id": "\xff\xfe"}\n\n', b"data: upstream timed out\n\n"],
)
def test_a_stream_with_an_event_that_is_not_json_is_a_failure(stage: Stage, event: bytes) -> None:
    received, _, transition = answered(stage, "chat", [chunk("one "), event, chunk("two", "stop"), DONE])
    assert event in received  # the caller gets it as it came, and cannot read it either
    assert (transition.failure, transition.output) == (FailureKind.MODEL, "one two")
    assert "is not JSON" in str(transition.error)


def test_a_stream_that_ends_with_an_error_is_a_failure(stage: Stage) -> None:
    transition = answered(stage, "chat", [chunk("par"), chunk("", "error"), DONE])[2]
    assert (transition.failure, transition.output) == (FailureKind.MODEL, "par")


# -- the gateway's own


@pytest.mark.parametrize(("given", "status"), [("nonsense", 422), ("loop", 200)])
def test_a_rollout_is_closed_with_a_known_kind_of_failure_only(stage: Stage, given: str, status: int) -> None:
    opened = stage.manage("/assay/rollouts", {"id": given})[1]["id"]
    close = {"status": "failed", "failure": given}
    assert stage.manage(f"/assay/rollouts/{opened}/close", close)[0] == status
    stage.store.flush()
    assert stage.store.rollout(opened).failure == (FailureKind.LOOP if status == 200 else None)


# -- refusals

REFUSAL = {"type": "refusal", "refusal": "I will not."}
TEXT = {"type": "output_text", "text": "I will not."}


def chat(finish: str, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def response(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    items = [{"type": "message", "id": "i", "role": "assistant", "content": list(parts)}] if parts else []
    return {"id": "r", "object": "response", "model": "m", "status": "completed", "output": items, **more}


def responses_stream() -> list[Any]:
    at = {"output_index": 0, "content_index": 0, "item_id": "i"}
    deltas = [{"type": "response.refusal.delta", **at, "delta": delta} for delta in ("I will ", "not.")]
    return [CREATED, *deltas, {"type": "response.completed", "response": response(REFUSAL)}]


def claude(stop: str | None, *texts: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text} for text in texts]
    usage = {"input_tokens": 1, "output_tokens": 1}
    known = {"id": "m", "type": "message", "role": "assistant", "model": "m"}
    return {**known, "content": content, "stop_reason": stop, "usage": usage}


def claude_stream(stop: str, text: str) -> list[Any]:
    return [
        {"type": "message_start", "message": claude(None)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]


def gemini(reason: str, *texts: str) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": text} for text in texts]}
    return {"candidates": [{"index": 0, "finishReason": reason, **({"content": content} if texts else {})}]}


FILTERED = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}


@pytest.mark.parametrize(
    ("dialect", "reply", "word"),  # the provider's word; None where a text that says no is an answer
    [
        ("chat", chat("stop", refusal="I will not."), "refusal"),
        ("chat", chat("stop", content=[REFUSAL]), "refusal"),
        ("chat", chat("content_filter", content="I will not."), "content_filter"),
        ("chat", chat("SAFETY", content="I will not."), "SAFETY"),
        ("chat", chat("content_filter"), "content_filter"),
        ("chat", [chunk("", "stop", delta={"refusal": "I will not."}), DONE], "refusal"),
        ("chat", [chunk("I will not."), chunk("", "content_filter"), DONE], "content_filter"),
        ("responses", response(REFUSAL), "refusal"),
        ("responses", response(TEXT, **FILTERED), "content_filter"),
        ("responses", responses_stream(), "refusal"),
        ("messages", claude("refusal", "I will not."), "refusal"),
        ("messages", claude("refusal"), "refusal"),
        ("messages", claude_stream("refusal", "I will not."), "refusal"),
        ("gemini", gemini("SAFETY", "I will not."), "SAFETY"),
        ("gemini", gemini("PROHIBITED_CONTENT"), "PROHIBITED_CONTENT"),
        ("gemini", {"promptFeedback": {"blockReason": "OTHER"}}, "OTHER"),
        ("gemini", [gemini("", "I will "), gemini("RECITATION", "not.")], "RECITATION"),
        ("chat", chat("stop", content="I will not."), None),
        ("chat", chat("length", content="I will not."), None),
        ("responses", response(TEXT), None),
        ("messages", claude_stream("end_turn", "I will not."), None),
        ("gemini", gemini("STOP", "I will not."), None),
    ],
)  # fmt: skip
def test_a_refusal_is_a_failure_with_the_providers_word(
    stage: Stage, dialect: str, reply: Any, word: str | None
) -> None:
    _, rollout, transition = answered(stage, dialect, reply)
    rollout.status = "done"  # its client ends it
    task = Task(id="t", inputs={}, expected={"answer": "I will not."})
    graded = grade_rollout(load_rubric("exact"), task, rollout)
    failed = graded.result.failed if graded.result else None
    assert (transition.error, graded.value) == (None, 1.0 if word is None else 0.0)
    assert failed is None if word is None else f"({word})" in str(failed)


# -- loops: marked, and ended only if asked

LOOP = "and so we check the sum once more " * 60
NO_LOOPS = {"alarms": 0, "stopped": 0, "repeated_words": 0, "tokens_saved": 0}


@pytest.fixture
def looping(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    # what arrives together is passed on together: a stream that is to be stopped is slow enough for a busy machine
    server = ScriptedUpstream(chunks=60, delay_s=0.025 if request.param == "stop" else 0.004)
    with opened_stage(tmp_path, server, loops=request.param) as opened:
        yield opened


def limited(dialect: str, text: str) -> dict[str, Any]:
    """A request for at most 900 tokens, where the dialect's test has a limit."""
    limits: dict[str, Any] = {"responses": {}, "gemini": {"generationConfig": {"maxOutputTokens": 900}}}
    return body_of(dialect, text, **limits.get(dialect, {"max_tokens": 900}))


@pytest.mark.parametrize("looping", ["stop"], indirect=True)
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
def test_a_stop_ends_the_stream_where_the_loop_is_found(looping: Stage, dialect: str) -> None:
    looping.stream(dialect, limited(dialect, LOOP))
    transition = looping.call()
    assert (transition.failure, "repeated itself" in str(transition.error)) == (FailureKind.LOOP, True)
    assert 4 <= transition.output.count("check") < 40
    counts = get(f"{looping.url}/assay/stats", **looping.owner)["loops"]
    # the limit of the request is 900 tokens; the loop is found at a check, every 16 words
    assert (counts["stopped"], counts["tokens_saved"]) == (1, 0 if dialect == "responses" else 900 - 80)


@pytest.mark.parametrize("looping", ["stop"], indirect=True)
def test_a_client_reads_a_stopped_stream_as_cut_by_its_limit(looping: Stage) -> None:
    messages: Any = [{"role": "user", "content": LOOP}]
    chunks = list(looping.client.chat.completions.create(model="m", messages=messages, stream=True))
    first, last = chunks[0], chunks[-1]
    assert last.choices[0].finish_reason == "length"
    assert (last.id, last.created, last.model) == (first.id, first.created, first.model)  # strict clients need them
    assert last.id


@pytest.mark.parametrize("looping", ["alarm", "stop"], indirect=True)
def test_ordinary_answers_are_not_marked(looping: Stage) -> None:
    text = " ".join(f"word{number}" for number in range(300))
    for dialect in ("chat", "responses", "messages", "gemini"):
        assert b"word299" in looping.stream(dialect, limited(dialect, text))
    assert [call.failure for call in looping.calls()] == [None] * 4
    assert looping.gateway.stats()["loops"] == NO_LOOPS


@pytest.mark.parametrize("looping", ["off"], indirect=True)
def test_loop_detection_off_marks_no_answer(looping: Stage) -> None:
    looping.stream("chat", limited("chat", LOOP))
    assert looping.call().failure is None


@pytest.mark.parametrize("looping", ["stop"], indirect=True)
def test_an_answer_in_one_piece_is_marked_and_passed_on(looping: Stage) -> None:
    assert looping.chat({"role": "user", "content": LOOP})["content"].count("check") == 60
    assert (looping.call().failure, looping.call().error) == (FailureKind.LOOP, None)


def test_an_unknown_action_on_loops_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store, pytest.raises(ConfigError, match="loops='never'"):
        Gateway(store, upstream_of("echo", base="http://127.0.0.1:9"), loops="never")
