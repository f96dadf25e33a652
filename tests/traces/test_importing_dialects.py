"""Imports: requests and answers in the forms of other APIs and frameworks read as chat, and what has none is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from exact_answers import ANSWERS as EXACT
from importing_rows import (
    attributes,
    call,
    child as span,
    choice,
    imported,
    langfuse,
    lines,
    mark,
    messages_of,
    mlflow_span,
    mlflow_trace,
    observation,
    read,
)

from assay.traces import Rollout, Store
from assay.traces.importers import Skipped, import_traces
from assay.traces.messages.endings import ending_of

USER = {"role": "user", "content": "1+2?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c0")]}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "3"}
ROOT = span(1, parent=0)
KINDS = pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
text = json.dumps


def chat(recorded: dict[str, Any], *events: dict[str, Any]) -> dict[str, Any]:
    named = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    return span(2, {**named, **recorded}, events=list(events))


def recorded_by(kind: str, folder: Path, given: Any, said: Any) -> tuple[Rollout, list[Skipped]]:
    """A call whose input and output one of the three tools recorded."""
    if kind == "otlp":
        return imported(
            folder, ROOT, chat({"gen_ai.input.messages": text(given), "gen_ai.output.messages": text(said)})
        )
    if kind == "langfuse":
        (run,), skipped = langfuse(folder, observation(1, input=given, output=said))
    else:
        (run,), skipped = read("mlflow", lines(folder / "m.jsonl", mlflow_trace(mlflow_span(1, "LLM", given, said))))
    return run, skipped


# -- requests

KERNELS = [
    {"role": "user", "items": [{"content_type": "text", "text": "1+2?"}]},
    {"role": "assistant", "items": [{"content_type": "function_call", "id": "c0", "name": "add", "arguments": "{}"}]},
    {"role": "tool", "items": [{"content_type": "function_result", "id": "c0", "name": "add", "result": "3"}]},
]
FRAMEWORKS = [
    {"role": "user", "contents": [{"type": "text", "text": "1+2?"}]},
    {"role": "assistant", "contents": [{"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"}]},
    {"role": "tool", "contents": [{"type": "function_result", "call_id": "c0", "result": 3}]},
]
RESPONSES = [
    USER,
    {"type": "reasoning", "id": "rs", "summary": []},
    {"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c0", "output": "3"},
]


@KINDS
@pytest.mark.parametrize(
    "given", [KERNELS, {"chat_history": {"messages": KERNELS}}, FRAMEWORKS, RESPONSES, {"input": RESPONSES}]
)
def test_conversations_as_frameworks_write_them_are_read(tmp_path: Path, kind: str, given: Any) -> None:
    run, skipped = recorded_by(kind, tmp_path, given, [{"role": "assistant", "content": "It is 3."}])
    assert messages_of(run) == [USER, CALLED, RESULT]
    assert (run.status, skipped) == ("done", [])


def test_requests_of_other_apis_read_as_chat(tmp_path: Path) -> None:
    system, input_text = {"role": "system", "content": "s"}, [{"type": "input_text", "text": "1+2?"}]
    contents = [{"role": "user", "parts": [{"text": "1+2?"}]}]
    human = {"content": "1+2?", "type": "human"}
    for given, expected in (
        ("1+2?", [USER]),
        ({"prompt": "1+2?"}, [USER]),
        ([[human]], [USER]),
        ([{"lc": 1, "type": "constructor", "id": ["HumanMessage"], "kwargs": human}], [USER]),
        ({"args": ["1+2?"], "kwargs": {}}, [USER]),
        ({"question": "1+2?"}, [USER]),
        (text({"input": [USER]}), [USER]),
        ([{**USER, "name": "eve"}], [{**USER, "name": "eve"}]),
        (["1+2?", "b"], [USER, {"role": "user", "content": "b"}]),
        ({"contents": contents, "systemInstruction": {"parts": [{"text": "s"}]}}, [system, USER]),
        (
            {
                "instructions": "s",
                "input": [{"type": "message", "role": "user", "content": input_text}, *RESPONSES[2:]],
            },
            [system, USER, CALLED, RESULT],
        ),
    ):
        (run,), _ = langfuse(tmp_path, observation(1, input=given, output="x"))
        assert messages_of(run) == expected, given


# -- answers

CALL = {"id": "c", "name": "f"}
AS_CHAT = {**CALL, "arguments": '{"x": 1}'}
USED = [{"type": "text", "text": "a"}, {"type": "tool_use", **CALL, "input": {"x": 1}}]
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
PARTS = [{"text": "a"}, {"functionCall": {**CALL, "args": {"x": 1}}}]
LANGCHAIN = {"type": "ai", "content": "a", "tool_calls": [{**CALL, "args": {"x": 1}}]}
BLOCKS = {"role": "assistant", "blocks": [{"block_type": "text", "text": "a"}]}
ANSWERS: list[tuple[Any, str, int, str | None]] = [  # output, text, calls, finish reason
    ({"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}, "a", 0, "stop"),
    ({"choices": [{"text": "a", "finish_reason": "length"}]}, "a", 0, "length"),
    ({"choices": [{"message": {"content": None, "audio": {"id": "i", "transcript": "a"}}}]}, "a[audio: i]", 0, None),
    ({"role": "assistant", "content": USED, "stop_reason": "tool_use"}, "a", 1, "tool_calls"),
    ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a", 0, None),
    ({"output": [SAID, {"type": "function_call", "call_id": "c", **AS_CHAT}]}, "a", 1, "tool_calls"),
    ({"candidates": [{"content": {"role": "model", "parts": PARTS}, "finishReason": "stop"}]}, "a", 1, "stop"),
    ({"generations": [[{"text": "a", "message": LANGCHAIN}]]}, "a", 1, None),
    ([{"text": "a", "reasoning_content": "hm"}], "a", 0, None),  # DSPy
    ({"message": BLOCKS, "raw": {}}, "a", 0, None),  # LlamaIndex
    ({"finish_reason": "function_calls", "content": [AS_CHAT]}, "", 1, "tool_calls"),  # AutoGen
    (["a", "b"], "a", 0, None),
    ({"content": "a"}, "a", 0, None),
    (7, "7", 0, None),
    ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot.", 0, None),
    *(({"role": "assistant", "content": exact}, exact, 0, None) for exact in EXACT.values()),  # byte for byte
]


@KINDS
def test_answers_of_other_apis_and_frameworks_read_as_chat(tmp_path: Path, kind: str) -> None:
    for said, output, calls, reason in ANSWERS:
        run, skipped = recorded_by(kind, tmp_path, [USER], said)
        (transition,) = run.transitions
        called = choice(transition)["message"].get("tool_calls", [])
        assert (transition.output, called, skipped) == (output, [as_chat()] * calls, []), said
        assert choice(transition)["finish_reason"] == reason, said


def as_chat() -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("said", "output"),
    [
        ({"model": "m", "message": {"role": "assistant", "content": "3"}, "done": True}, "3"),  # Ollama
        ({"output": {"message": {"role": "assistant", "content": [{"text": "3"}]}}, "stopReason": "end_turn"}, "3"),
        ({"output": [SAID]}, "a"),
        ({"text": "3", "generation_id": "g", "finish_reason": "COMPLETE"}, "3"),  # Cohere
        ({"answer": 3}, '{"answer": 3}'),  # the model's own JSON
        ({"output": {"sum": 3}, "message": "added"}, '{"output": {"sum": 3}, "message": "added"}'),
    ],
)
def test_langfuses_spans_hold_answers_as_text_that_is_an_envelope_or_the_models_own(
    tmp_path: Path, said: Any, output: str
) -> None:
    recorded = {"langfuse.observation.input": text([USER]), "langfuse.observation.output": text(said)}
    run, skipped = imported(tmp_path, ROOT, chat(recorded))
    assert (run.transitions[0].output, skipped) == (output, [])


@KINDS
@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}]}, "refusal"),
        ({"role": "assistant", "content": [{"type": "text", "text": "no"}], "stop_reason": "refusal"}, "refusal"),
        ({"candidates": [{"content": {"parts": [{"text": "no"}]}, "finishReason": "SAFETY"}]}, "SAFETY"),
        ({"choices": [{"message": {"content": "no"}, "finish_reason": "content_filter"}]}, "content_filter"),
    ],
)
def test_an_imported_refusal_is_named(tmp_path: Path, kind: str, said: Any, word: str) -> None:
    run, _ = recorded_by(kind, tmp_path, [USER], said)
    assert f"({word})" in ending_of(run.transitions[0])


# -- streams


def log(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """A record of the span of the call."""
    place = {"traceId": f"{1:032x}", "spanId": f"{2:016x}"}
    names = attributes({"event.name": name, "gen_ai.system": "openai"})
    return {**place, "attributes": names, "body": {"kvlistValue": {"values": attributes(data)}}}


def test_pieces_of_a_stream_are_one_answer(tmp_path: Path) -> None:
    pieces, ends = ["It", " is", " 3."], ["", "", "stop"]
    parts = [{"role": "assistant", "parts": [{"type": "text", "content": piece}]} for piece in pieces]
    messages = [{**part, "finish_reason": end} for part, end in zip(parts, ends, strict=True)]
    endless = [{"role": "model", "parts": [{"text": piece}]} for piece in pieces]  # Gemini CLI
    asked = {"gen_ai.input.messages": text([{"role": "user", "parts": [{"type": "text", "content": "1+2?"}]}])}
    logs = [
        log("gen_ai.user.message", {"content": {"role": "user", "parts": [{"text": "1+2?"}]}}),
        *(
            log("gen_ai.choice", {"content": content, "index": 0} | ({"finish_reason": end} if end else {}))
            for content, end in zip(endless, ends, strict=True)
        ),
    ]
    items = {f"llm.output_messages.{n}.message.content": piece for n, piece in enumerate(pieces)}
    for recorded, logged in (
        ({**asked, "gen_ai.output.messages": text(messages)}, None),
        ({**asked, "gen_ai.output.messages": text(endless)}, None),
        ({**asked, **items, "gen_ai.response.finish_reasons": ["stop"]}, None),
        ({}, logs),
    ):
        run, _ = imported(tmp_path, ROOT, chat(recorded), logs=logged)
        (transition,) = run.transitions
        assert transition.output == "It is 3.", recorded
        assert len((transition.response or {})["body"]["choices"]) == 1
        assert messages_of(run) == [USER]


def test_choices_with_different_indexes_are_not_pieces(tmp_path: Path) -> None:
    texts = [(0, "a"), (1, "x"), (0, "b"), (1, "y")]
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "?"}
    messages = [{"role": "assistant", "index": n, "parts": [{"type": "text", "content": t}]} for n, t in texts]
    logs = [log("gen_ai.choice", {"message": {"content": t}, "index": n}) for n, t in texts]
    events = [
        {"name": "gen_ai.choice", "attributes": attributes({"index": n, "message": text({"content": t})})}
        for n, t in texts
    ]
    for recorded, logged, evented in (
        ({"gen_ai.output.messages": text(messages)}, [], []),
        ({"gen_ai.output.messages": text(messages[:2])}, [], []),
        ({}, logs, []),
        ({}, [], events),
    ):
        run, _ = imported(tmp_path, ROOT, chat({**asked, **recorded}, *evented), logs=logged)
        choices = (run.transitions[0].response or {})["body"]["choices"]
        assert [c["message"]["content"] for c in choices] in (["ab", "xy"], ["a", "x"]), recorded


# -- what is not understood

ODD = {"speaker": "u", "utterance": {"words": ["secret"]}}
PART = [{"role": "user", "parts": [{"hologram": "secret"}]}]
PARTED = [{"role": "user", "content": [{"type": "hologram", "data": "secret"}]}]
PIECE = {"content": {"role": "model", "parts": [{"text": "secret"}]}, "partial": True}


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("gen_ai.input.messages", [ODD]),
        ("gen_ai.input.messages", ODD),
        ("gen_ai.input.messages", PART),
        ("gen_ai.input.messages", PARTED),
        ("gen_ai.output.messages", [ODD]),
        ("gen_ai.output.messages", ODD),
        ("gen_ai.output.messages", PART),
        ("mlflow.spanInputs", ODD),
        ("mlflow.spanInputs", None),
        ("mlflow.spanOutputs", ODD),
        ("langfuse.observation.input", ODD),
        ("langfuse.observation.input", None),
        ("traceloop.entity.output", ODD),
        ("ai.prompt.messages", [ODD]),
        ("ai.response.toolCalls", ODD),
        ("gcp.vertex.agent.llm_request", ODD),
        ("gcp.vertex.agent.llm_response", ODD),
        ("gcp.vertex.agent.llm_response", PIECE),  # of a stream, and not its end
        ("gen_ai.tool.definitions", "secret"),
    ],
)
def test_an_unknown_shape_is_counted_with_its_attribute_and_is_never_text(
    tmp_path: Path, name: str, recorded: Any
) -> None:
    known: dict[str, Any] = {}
    if not any(word in name for word in ("input", "prompt", "request", "Inputs")):
        known["gen_ai.input.messages"] = text([USER])
    elif "output" not in name:
        known["gen_ai.completion"] = "fine"
    run, skipped = imported(tmp_path, ROOT, chat({**known, name: text(recorded)}))
    assert (run.status, run.failure, run.score) == ("error", "record", None)
    assert [name in item.reason for item in skipped] == [True]
    assert "secret" not in text(messages_of(run)) + run.transitions[0].output
    with Store(tmp_path / "s.db") as store:
        report = import_traces(store, "otlp", tmp_path / "x.jsonl")
    assert (report.skipped, name in report.reasons[0]) == (1, True)


@pytest.mark.parametrize(("name", "recorded"), [("input", ODD), ("output", ODD), ("input", None)])
def test_fields_of_an_unknown_shape_in_langfuse_are_unscored_and_not_texts(
    tmp_path: Path, name: str, recorded: Any
) -> None:
    row = observation(1, **{"input": "q", "output": "a", name: recorded})
    (run,), (skipped,) = langfuse(tmp_path, row, mark("ok", 1))
    assert (run.status, run.failure, run.score, repr(name) in skipped.reason) == ("error", "record", None, True)
    assert "secret" not in text(messages_of(run)) + run.transitions[0].output


@KINDS
@pytest.mark.parametrize(
    "given",
    [
        {"input": [USER, {"type": "item_reference", "id": "msg_1"}]},
        {"input": "and?", "previous_response_id": "resp_1"},
        {"input": "and?", "conversation": {"id": "conv_1"}},
    ],
)
def test_a_request_that_names_earlier_messages_is_incomplete(tmp_path: Path, kind: str, given: Any) -> None:
    run, skipped = recorded_by(kind, tmp_path, given, [{"role": "assistant", "content": "3"}])
    assert (run.status, run.failure, run.score, len(skipped)) == ("error", "record", None, 1)


@KINDS
@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_a_response_that_goes_on_or_ended_without_output_is_no_answer(tmp_path: Path, kind: str, status: str) -> None:
    run, (skipped,) = recorded_by(kind, tmp_path, [USER], {"object": "response", "status": status, "output": []})
    assert (run.status, run.failure, run.transitions[0].output) == ("error", "record", "")
    assert "output" in skipped.reason.lower()


def test_null_answers_withheld_requests_and_tools_of_the_provider_are_understood(tmp_path: Path) -> None:
    run, _ = recorded_by("otlp", tmp_path, [USER], None)
    assert (run.transitions[0].output, run.prediction) == ("", None)
    run, _ = imported(tmp_path, ROOT, chat({"gen_ai.input.messages": "[REDACTED]", "gen_ai.completion": "a"}))
    assert (run.status, run.failure) == ("error", "record")
    known = {"gen_ai.input.messages": text([USER]), "gen_ai.completion": "a"}
    for defined in ([], [{"type": "web_search"}]):
        run, skipped = imported(tmp_path, ROOT, chat({**known, "gen_ai.tool.definitions": text(defined)}))
        assert (run.status, skipped) == ("done", [])
