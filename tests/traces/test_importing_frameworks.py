"""Imports of the spans of agent frameworks, written by hand after recordings of an agent that adds two numbers.

Recorded with semantic-kernel 1.45, agent-framework 1.23, google-adk 2.13, strands-agents 1.62 and ai 6.0 (Vercel).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from client_spans import ADD, SCHEMA, attributes, call, span
from importing_rows import body, choice, langfuse, observation, read

from assay.traces import Rollout, Store
from assay.traces.importers import Skipped, import_traces
from assay.traces.messages.endings import ending_of

USER, SYSTEM = {"role": "user", "content": "1+2?"}, {"role": "system", "content": "You add."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c0", a=1)]}
ANSWERED = [USER, CALLED, {"role": "tool", "tool_call_id": "c0", "content": "3"}]
DEFINED = json.dumps([{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}])
AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "adder", "gen_ai.tool.definitions": DEFINED}


def text(data: Any) -> str:
    return json.dumps(data)


def event(name: str, **data: Any) -> dict[str, Any]:
    return {"name": name, "attributes": attributes(data)}


def log(number: int, name: str, logged: str | dict[str, Any]) -> dict[str, Any]:
    """A record of a span, with its body as text (Python's logging) or as an object."""
    value = {"stringValue": logged} if isinstance(logged, str) else {"kvlistValue": {"values": attributes(logged)}}
    return {
        "traceId": f"{1:032x}",
        "spanId": f"{number:016x}",
        "body": value,
        "attributes": attributes({"event.name": name, "gen_ai.system": "openai"}),
    }


def chat(number: int, data: dict[str, Any] | None = None, *events: dict[str, Any], at: float = 0) -> dict[str, Any]:
    recorded = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **(data or {})}
    return {**span(number, recorded, at=at), "events": list(events)}


def file_of(folder: Path, spans: list[dict[str, Any]], logs: list[dict[str, Any]] | None = None) -> Path:
    rows: list[dict[str, Any]] = [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]
    if logs:
        rows.append({"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]})
    (path := folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(
    folder: Path, spans: list[dict[str, Any]], logs: list[dict[str, Any]] | None = None
) -> tuple[Rollout, list[Skipped]]:
    (run,), skipped = read("otlp", file_of(folder, spans, logs))
    return run, skipped


def assert_added(run: Rollout, *, system: bool = True, tools: bool = True) -> None:
    """The two calls of the agent, with its tool in between."""
    first, second = run.transitions
    before = [SYSTEM] if system else []
    assert [body(first)["messages"], body(second)["messages"]] == [[*before, USER], [*before, *ANSWERED]]
    assert choice(first)["message"] == CALLED
    assert choice(second)["message"] == {"role": "assistant", "content": "It is 3."}
    assert (choice(first)["finish_reason"], choice(second)["finish_reason"]) == ("tool_calls", "stop")
    if tools:
        assert [body(t)["tools"] for t in run.transitions] == [[ADD], [ADD]]
    assert [(tool.name, tool.arguments, tool.result) for tool in run.tools] == [("add", {"a": 1}, "3")]
    assert (run.status, run.prediction, run.inputs) == ("done", {"output": "It is 3."}, {"input": "1+2?"})


def adk(contents: list[dict[str, Any]], parts: list[dict[str, Any]], finish: str) -> dict[str, Any]:
    declared = [{"name": "add", "description": "adds", "parameters_json_schema": SCHEMA}]
    config = {"system_instruction": "You add.", "tools": [{"function_declarations": declared}], "temperature": 0.5}
    return {
        "gen_ai.system": "gcp.vertex.agent",
        "gen_ai.request.model": "m",
        "gcp.vertex.agent.llm_request": text({"model": "m", "config": config, "contents": contents}),
        "gcp.vertex.agent.llm_response": text(
            {
                "content": {"parts": parts, "role": "model"},
                "finish_reason": finish,
                "usage_metadata": {"prompt_token_count": 10, "candidates_token_count": 3},
            }
        ),
    }


ADK_USER = {"role": "user", "parts": [{"text": "1+2?"}]}


def test_pieces_of_a_stream_are_one_answer(tmp_path: Path) -> None:
    pieces = ["It", " is", " 3."]
    ends = ["", "", "stop"]
    messages = [
        {"role": "assistant", "parts": [{"type": "text", "content": piece}], "finish_reason": end}
        for piece, end in zip(pieces, ends, strict=True)
    ]
    asked = {"gen_ai.input.messages": text([{"role": "user", "parts": [{"type": "text", "content": "1+2?"}]}])}
    logs = [
        log(2, "gen_ai.user.message", {"content": {"role": "user", "parts": [{"text": "1+2?"}]}}),
        *(
            log(2, "gen_ai.choice", {"content": {"role": "model", "parts": [{"text": piece}]}, "index": 0} | end)
            for piece, end in zip(pieces, [{}, {}, {"finish_reason": "STOP"}], strict=True)
        ),
    ]
    endless = [{"role": "model", "parts": [{"text": piece}]} for piece in pieces]  # Gemini CLI
    items = {f"llm.output_messages.{n}.message.content": piece for n, piece in enumerate(pieces)}
    for recorded, logged in (
        ({**asked, "gen_ai.output.messages": text(messages)}, None),
        ({**asked, "gen_ai.output.messages": text(endless)}, None),
        ({**asked, **items, "gen_ai.response.finish_reasons": ["stop"]}, None),
        ({}, logs),
    ):
        run, _ = imported(tmp_path, [span(1, {}, parent=0), chat(2, recorded)], logged)
        (transition,) = run.transitions
        assert transition.output == "It is 3.", recorded
        assert len(transition.response["body"]["choices"]) == 1  # type: ignore[index]
        assert body(transition)["messages"] == [USER]


def test_choices_with_different_indexes_are_not_pieces(tmp_path: Path) -> None:
    texts = [(0, "a"), (1, "x"), (0, "b"), (1, "y")]
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "?"}
    messages = [{"role": "assistant", "index": n, "parts": [{"type": "text", "content": t}]} for n, t in texts]
    logs = [log(2, "gen_ai.choice", {"message": {"content": t}, "index": n}) for n, t in texts]
    events = [event("gen_ai.choice", index=n, message=text({"content": t})) for n, t in texts]
    for recorded, logged, evented in (
        ({"gen_ai.output.messages": text(messages)}, [], []),
        ({"gen_ai.output.messages": text(messages[:2])}, [], []),
        ({}, logs, []),
        ({}, [], events),
    ):
        run, _ = imported(tmp_path, [span(1, {}, parent=0), chat(2, {**asked, **recorded}, *evented)], logged)
        choices = (run.transitions[0].response or {})["body"]["choices"]
        assert [c["message"]["content"] for c in choices] in (["ab", "xy"], ["a", "x"]), recorded


def test_strands_takes_the_system_prompt_and_tools_from_its_agent(tmp_path: Path) -> None:
    use = {"toolUse": {"toolUseId": "c0", "name": "add", "input": {"a": 1}}}
    result = {"toolResult": {"toolUseId": "c0", "status": "success", "content": [{"text": "3"}]}}
    asked = event("gen_ai.user.message", content=text([{"text": "1+2?"}]))
    first = chat(2, None, asked, event("gen_ai.choice", finish_reason="tool_use", message=text([use])), at=1)
    thought = {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}}
    second = chat(
        4,
        None,
        asked,
        event("gen_ai.assistant.message", content=text([use])),
        event("gen_ai.user.message", content=text([result])),
        event("gen_ai.choice", finish_reason="end_turn", message=text([thought, {"text": "It is 3."}])),
        at=4,
    )
    tool = span(
        3, {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.id": "c0"}, at=3
    )
    tool["events"] = [
        event("gen_ai.tool.message", role="tool", content='{"a": 1}', id="c0"),
        event("gen_ai.choice", message=text([{"text": "3"}]), id="c0"),
    ]
    agent = span(1, {**AGENT, "system_prompt": "You add."}, parent=0)
    agent["events"] = [
        event("gen_ai.user.message", content="1+2?"),
        event("gen_ai.choice", message="It is 3.\n", finish_reason="end_turn"),
    ]
    run, skipped = imported(tmp_path, [agent, first, tool, second])
    assert choice(run.transitions[1])["message"].pop("reasoning_content") == "hm"
    assert_added(run)
    assert skipped == []


def vercel(operation: str, **data: Any) -> dict[str, Any]:
    known = {"ai.operationId": f"ai.{operation}", "ai.telemetry.functionId": "adder", "ai.model.id": "m"}
    return {**known, **{f"ai.{name.replace('_', '.')}": value for name, value in data.items()}}


@pytest.mark.parametrize("version", [4, 6])
def test_the_vercel_ai_sdks_spans_are_read(tmp_path: Path, version: int) -> None:
    inner = "doGenerate" if version == 6 else "doStream"
    outer = "generateText" if version == 6 else "streamText"
    given = {"input": {"a": 1}} if version == 6 else {"args": {"a": 1}}
    output = {"output": {"type": "json", "value": 3}} if version == 6 else {"result": 3}
    requested = {
        "toolCallId": "c0",
        "toolName": "add",
        **({"input": '{"a": 1}'} if version == 6 else {"args": '{"a": 1}'}),
    }
    question = [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
    ]
    names = {"toolCallId": "c0", "toolName": "add"}
    later = [
        *question,
        {"role": "assistant", "content": [{"type": "tool-call", **names, **given}]},
        {"role": "tool", "content": [{"type": "tool-result", **names, **output}]},
    ]
    schema = {"inputSchema": SCHEMA} if version == 6 else {"parameters": SCHEMA}
    tools = [text({"type": "function", "name": "add", "description": "adds", **schema})]
    ends = [("tool-calls", {"response_toolCalls": text([requested])}), ("stop", {"response_text": "It is 3."})]
    first, second = (
        vercel(
            f"{outer}.{inner}",
            prompt_messages=text(messages),
            prompt_tools=tools,
            prompt_toolChoice='{"type":"auto"}',
            response_finishReason=reason,
            usage_inputTokens=10,
            usage_outputTokens=3,
            **said,
        )
        for messages, (reason, said) in zip((question, later), ends, strict=True)
    )
    tool = vercel("toolCall", toolCall_name="add", toolCall_id="c0", toolCall_args='{"a":1}', toolCall_result="3")
    root = vercel(outer, prompt=text({"system": "You add.", "prompt": "1+2?"}), response_text="It is 3.")
    run, skipped = imported(
        tmp_path, [span(1, root, parent=0), span(2, first, at=1), span(3, tool, at=3), span(4, second, at=4)]
    )
    assert_added(run)
    assert (run.program, skipped) == ("adder", [])
    assert [(t.model, t.prompt_tokens, t.completion_tokens) for t in run.transitions] == [("m", 10, 3)] * 2


# -- what is not understood


ODD = {"speaker": "u", "utterance": {"words": ["secret"]}}
PART = [{"role": "user", "parts": [{"hologram": "secret"}]}]
PARTED = [{"role": "user", "content": [{"type": "hologram", "data": "secret"}]}]


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
        ("mlflow.spanOutputs", ODD),
        ("langfuse.observation.input", ODD),
        ("traceloop.entity.output", ODD),
        ("ai.prompt.messages", [ODD]),
        ("ai.response.toolCalls", ODD),
        ("gcp.vertex.agent.llm_request", ODD),
        ("gcp.vertex.agent.llm_response", ODD),
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
    path = file_of(tmp_path, [span(1, {}, parent=0), chat(2, {**known, name: text(recorded)})])
    (run,), skipped = read("otlp", path)
    assert (run.status, run.failure, run.score) == ("error", "record", None)
    assert [name in item.reason for item in skipped] == [True]
    assert "secret" not in json.dumps([body(t)["messages"] for t in run.transitions]) + run.transitions[0].output
    report = import_traces(Store(tmp_path / "s.db"), "otlp", path)
    assert report.skipped == 1
    assert name in report.reasons[0]


@pytest.mark.parametrize("kind", ["input", "output"])
def test_objects_of_an_unknown_shape_in_langfuse_are_not_texts(tmp_path: Path, kind: str) -> None:
    row = {"input": "q", "output": "a", kind: {"speaker": "u", "said": {"x": "secret"}}}
    (run,), (skipped,) = langfuse(tmp_path, observation(1, **row))
    assert (run.status, run.score, repr(kind) in skipped.reason) == ("error", None, True)
    assert "secret" not in json.dumps(body(run.transitions[0])["messages"]) + run.transitions[0].output


def recorded_by(kind: str, folder: Path, given: Any, said: Any) -> tuple[Rollout, list[Skipped]]:
    """A call whose input and output one of the three tools recorded."""
    if kind == "langfuse":
        (run,), skipped = langfuse(folder, observation(1, input=given, output=said))
        return run, skipped
    if kind == "otlp":
        data = {"gen_ai.input.messages": text(given), "gen_ai.output.messages": text(said)}
        return imported(folder, [span(1, {}, parent=0), chat(2, data)])
    values = {"mlflow.spanType": "LLM", "mlflow.spanInputs": text(given), "mlflow.spanOutputs": text(said)}
    (path := folder / "m.jsonl").write_text(
        text({"info": {"trace_id": "t", "state": "OK"}, "data": {"spans": [{"span_id": "a", "attributes": values}]}})
    )
    (run,), skipped = read("mlflow", path)
    return run, skipped


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


@pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
@pytest.mark.parametrize(
    "given", [KERNELS, {"chat_history": {"messages": KERNELS}}, FRAMEWORKS, RESPONSES, {"input": RESPONSES}]
)
def test_conversations_as_frameworks_write_them_are_read(tmp_path: Path, kind: str, given: Any) -> None:
    run, skipped = recorded_by(kind, tmp_path, given, [{"role": "assistant", "content": "It is 3."}])
    called = {"role": "assistant", "content": None, "tool_calls": [call("c0")]}
    assert body(run.transitions[0])["messages"] == [USER, called, ANSWERED[2]]
    assert (run.status, skipped) == ("done", [])


@pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
@pytest.mark.parametrize(
    ("said", "output", "calls"),
    [
        ([{"text": "3", "reasoning_content": "hm"}], "3", 0),  # DSPy
        ({"message": {"role": "assistant", "blocks": [{"block_type": "text", "text": "3"}]}, "raw": {}}, "3", 0),
        (
            {"finish_reason": "function_calls", "content": [{"id": "c", "name": "add", "arguments": "{}"}]},
            "",
            1,
        ),  # AutoGen
        ({"choices": [{"message": {"content": None, "audio": {"id": "a", "transcript": "3"}}}]}, "3[audio: a]", 0),
    ],
)
def test_answers_as_frameworks_write_them_are_read(
    tmp_path: Path, kind: str, said: Any, output: str, calls: int
) -> None:
    run, skipped = recorded_by(kind, tmp_path, [USER], said)
    (transition,) = run.transitions
    assert (transition.output, len(choice(transition)["message"].get("tool_calls", [])), skipped) == (output, calls, [])


@pytest.mark.parametrize(
    ("said", "output"),
    [
        ({"model": "m", "message": {"role": "assistant", "content": "3"}, "done": True}, "3"),  # Ollama
        ({"output": {"message": {"role": "assistant", "content": [{"text": "3"}]}}, "stopReason": "end_turn"}, "3"),
        (
            {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}]},
            "3",
        ),
        ({"text": "3", "generation_id": "g", "finish_reason": "COMPLETE"}, "3"),  # Cohere
        ({"answer": 3}, '{"answer": 3}'),  # the model's own JSON
        ({"output": {"sum": 3}, "message": "added"}, '{"output": {"sum": 3}, "message": "added"}'),
    ],
)
def test_langfuses_spans_hold_answers_as_text_that_is_an_envelope_or_the_models_own(
    tmp_path: Path, said: Any, output: str
) -> None:
    recorded = {"langfuse.observation.input": text([USER]), "langfuse.observation.output": text(said)}
    run, skipped = imported(tmp_path, [span(1, {}, parent=0), chat(2, recorded)])
    assert (run.transitions[0].output, skipped) == (output, [])


@pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
@pytest.mark.parametrize(
    "given",
    [
        {"input": [{"role": "user", "content": "and?"}, {"type": "item_reference", "id": "msg_1"}]},
        {"input": "and?", "previous_response_id": "resp_1"},
        {"input": "and?", "conversation": {"id": "conv_1"}},
    ],
)
def test_a_request_that_names_earlier_messages_is_incomplete(tmp_path: Path, kind: str, given: Any) -> None:
    run, skipped = recorded_by(kind, tmp_path, given, [{"role": "assistant", "content": "3"}])
    assert (run.status, run.failure, run.score, len(skipped)) == ("error", "record", None, 1)


@pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
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


def test_a_null_answer_is_no_text(tmp_path: Path) -> None:
    run, _ = recorded_by("otlp", tmp_path, [USER], None)
    assert (run.transitions[0].output, run.prediction) == ("", None)


def test_no_tools_and_tools_of_the_provider_are_understood(tmp_path: Path) -> None:
    for defined in ([], [{"type": "web_search"}]):
        recorded = {"gen_ai.input.messages": text([USER]), "gen_ai.completion": "a"}
        spans = [span(1, {}, parent=0), chat(2, {**recorded, "gen_ai.tool.definitions": text(defined)})]
        run, skipped = imported(tmp_path, spans)
        assert (run.status, skipped) == ("done", [])


def test_null_requests_are_counted_and_unscored(tmp_path: Path) -> None:
    scored = {"id": "s", "traceId": "t", "name": "ok", "value": 1, "source": "EVAL", "dataType": "NUMERIC"}
    (run,), (skipped,) = langfuse(tmp_path, observation(1, input=None, output="a"), scored)
    assert (run.status, run.failure, run.score, run.inputs) == ("error", "record", None, {})
    assert "'input'" in skipped.reason
    null = {"mlflow.spanType": "LLM", "mlflow.spanInputs": "null", "mlflow.spanOutputs": '"a"'}
    run, (skipped,) = imported(tmp_path, [span(1, {}, parent=0), span(2, null)])
    assert (run.status, "'mlflow.spanInputs'" in skipped.reason) == ("error", True)
    null = {"langfuse.observation.type": "generation", "langfuse.observation.input": "null"}
    run, (skipped,) = imported(tmp_path, [span(1, {}, parent=0), span(2, {**null, "langfuse.observation.output": "a"})])
    assert (run.status, "'langfuse.observation.input'" in skipped.reason) == ("error", True)
    withheld = {"gen_ai.input.messages": "[REDACTED]", "gen_ai.completion": "a"}
    run, _ = imported(tmp_path, [span(1, {}, parent=0), chat(2, withheld)])
    assert (run.status, run.failure) == ("error", "record")


@pytest.mark.parametrize("kind", ["mlflow", "langfuse", "otlp"])
@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_a_response_that_goes_on_or_ended_without_output_is_no_answer(tmp_path: Path, kind: str, status: str) -> None:
    run, (skipped,) = recorded_by(kind, tmp_path, [USER], {"object": "response", "status": status, "output": []})
    assert (run.status, run.failure, run.transitions[0].output) == ("error", "record", "")
    assert "output" in skipped.reason.lower()


def test_one_piece_of_a_stream_is_no_answer(tmp_path: Path) -> None:
    recorded = adk([ADK_USER], [{"text": "It"}], "STOP")
    piece = {"content": {"role": "model", "parts": [{"text": "It"}]}, "partial": True}
    recorded["gcp.vertex.agent.llm_response"] = text(piece)
    run, (skipped,) = imported(tmp_path, [span(1, {}, parent=0), span(2, recorded)])
    assert (run.status, run.prediction, "'gcp.vertex.agent.llm_response'" in skipped.reason) == ("error", None, True)
