"""Imports of traces: files of real tracers.

The files in `data/` were recorded once from one agent that calls the embedded SmolLM2-135M over HTTP, and are
unchanged. The first response, with two tool calls, was scripted: so small a model calls no tools. Tracers:
opentelemetry-instrumentation-openai-v2 2.4b0 with opentelemetry-util-genai 1.0b0 (`otlp_openai_v2*`, the events by
2.3b0), opentelemetry-instrumentation-openai 0.40.14 and 0.62.4 (`otlp_openllmetry*`),
openinference-instrumentation-openai 0.1.66, langfuse 5.0.4 (as OTLP), mlflow-skinny 3.17.2 and 2.22.5. Agents that end
with a tool call in front of a scripted model wrote `otlp_pydantic_ai.jsonl` (pydantic-ai 2.68, its own spans as logfire
stores them) and `otlp_*_final.jsonl`.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from importing_rows import CALLS, DATA, body, choice, read

from assay.errors import DataError, MissingExtra
from assay.traces import ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


RAISED = "invalid literal for int() with base 10: 'x'"
BURNT = "Error code: 500 - the server is on fire"
PROMPT = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": "What is 12 + 30?"}]


CALLED = [
    *PROMPT,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_one", "content": "42"},
    {"role": "tool", "tool_call_id": "call_two", "content": f"error: {RAISED}"},
]


FINAL_ANSWER = "calling a tool with a non-integer value."  # a small model


# file, kind, whether tools were recorded with the request, how the inputs read
RECORDED = [
    ("otlp_openai_v2.jsonl", "otlp", False, "input"),
    ("otlp_openai_v2_events.jsonl", "otlp", False, "input"),
    ("otlp_openllmetry_0_40.jsonl", "otlp", True, "input"),
    ("otlp_openllmetry_0_62.jsonl", "otlp", True, "input"),
    ("otlp_openinference.jsonl", "otlp", True, "input"),
    ("otlp_langfuse_sdk.jsonl", "otlp", True, "input"),
    ("mlflow_3.jsonl", "mlflow", True, "question"),
]


@pytest.mark.parametrize(("name", "kind", "with_tools", "input_name"), RECORDED)
def test_recorded_traces_of_every_tracer_give_the_same_rollouts(
    name: str, kind: str, with_tools: bool, input_name: str
) -> None:
    (run, failed), _ = read(kind, DATA / name)
    assert (run.status, run.error, run.source, run.program) == ("done", None, kind, "adder")
    assert run.inputs == {input_name: "What is 12 + 30?"}
    # in the events' file the root span says nothing: it is the last call's answer
    assert run.prediction == {"output": FINAL_ANSWER}
    first, second = run.transitions
    assert (body(first)["messages"], body(second)["messages"]) == (PROMPT, CALLED)
    assert body(first).get("tools") == ([ADD] if with_tools else None)
    assert (body(first)["temperature"], body(first)["max_tokens"]) == (0.0, 24)
    assert choice(first)["message"] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert choice(second)["message"] == {"role": "assistant", "content": FINAL_ANSWER}
    if "langfuse" not in name:  # which records no reasons, and the answer's model
        assert (choice(first)["finish_reason"], choice(second)["finish_reason"]) == ("tool_calls", "stop")
        # as it was asked for, not as the answer names it
        assert [t.model for t in run.transitions] == ["smollm2-135m"] * 2
    assert (first.output, second.output) == ("", FINAL_ANSWER)
    assert [(t.prompt_tokens, t.completion_tokens) for t in run.transitions] == [(91, 23), (66, 12)]
    assert first.tools[0] == ToolCall(name="add", arguments={"a": 12, "b": 30}, result="42")
    assert first.tools[1].arguments == {"a": 1, "b": "x"}
    assert first.tools[1].result is None
    assert str(first.tools[1].error).removeprefix("ValueError: ") == RAISED
    assert (second.tools, run.early_tools) == ([], [])
    assert 5 < first.latency_ms < 60 < second.latency_ms < 600
    assert run.started_at <= first.started_at < second.started_at < (run.ended_at or 0)
    assert 1_795_305_000 < run.started_at < 1_795_306_000  # when they were recorded
    call_failed = failed.transitions[0]
    for error in (failed.error, call_failed.error):
        assert str(error).removeprefix("InternalServerError: ").removeprefix("openai.") == BURNT
    assert (failed.status, failed.inputs, failed.prediction) == ("failed", {input_name: "boom"}, None)
    assert body(call_failed)["messages"] == [PROMPT[0], {"role": "user", "content": "boom"}]
    assert (call_failed.output, call_failed.response, call_failed.prompt_tokens) == ("", None, None)
    assert (len(failed.transitions), call_failed.tools) == (1, [])


@pytest.mark.parametrize(
    ("name", "calls", "answers"),
    [
        ("otlp_pydantic_ai.jsonl", [3, 3, 3], [42, '{"value": 42, "unit": "42"}', "The answer is 42."]),
        ("otlp_openinference_final.jsonl", [3], ["42"]),
        ("otlp_openllmetry_final.jsonl", [3], ["42"]),
        ("mlflow_2.json", [1], ["42"]),
        ("mlflow_3_flavours.json", [3], ["yes"]),
    ],
)
def test_recorded_agents_of_other_kinds_have_their_answers(name: str, calls: list[int], answers: list[Any]) -> None:
    """The first three end with a tool call that is the answer."""
    rollouts, _ = read(name.partition("_")[0], DATA / name)
    assert [len(run.transitions) for run in rollouts] == calls
    assert [(run.status, (run.prediction or {})["output"]) for run in rollouts] == [("done", a) for a in answers]


def test_a_recording_without_content_is_structure_alone() -> None:
    rollouts, _ = read("otlp", DATA / "otlp_openai_v2_no_content.jsonl")
    assert [(run.status, run.inputs, run.prediction) for run in rollouts] == [("done", {}, None), ("failed", {}, None)]


def test_users_and_sessions_of_tracers_are_stored() -> None:
    for name, session in (("otlp_openinference", "s-1"), ("otlp_langfuse_sdk", "s-1"), ("otlp_openllmetry_0_40", None)):
        (run, _), _ = read("otlp", DATA / f"{name}.jsonl")
        assert (run.data_subject, run.metadata.get("session_id"), run.tenant) == ("u-1", session, None)
    (run, _), _ = read("mlflow", DATA / "mlflow_3.jsonl")
    assert (run.data_subject, run.metadata["session_id"], run.tenant) == ("u-1", "s-1", "acme")


def test_protobuf_gives_the_same_rollouts_as_json() -> None:
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="opentelemetry-proto is not installed")
    from_json, _ = read("otlp", DATA / "otlp_openai_v2.jsonl")
    from_binary, _ = read("otlp", DATA / "otlp_openai_v2.pb")
    assert [{**vars(rollout), "run_id": ""} for rollout in from_binary] == [
        {**vars(rollout), "run_id": ""} for rollout in from_json
    ]


def test_protobuf_messages_after_their_lengths_are_read_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="opentelemetry-proto is not installed")
    message = (DATA / "otlp_openai_v2.pb").read_bytes()
    cut = (999).to_bytes(4, "big") + message[:100]
    (path := tmp_path / "x.pb").write_bytes(len(message).to_bytes(4, "big") + message + cut)
    rollouts, skipped = read("otlp", path)
    assert len(rollouts) == 2
    assert [skip.where for skip in skipped] == [f"{path}[1]"]
    assert "not OTLP protobuf" in skipped[0].reason
    (broken := tmp_path / "y.pb").write_bytes(message[:100])
    with pytest.raises(DataError, match="neither JSON nor OTLP protobuf"):
        read("otlp", broken)


def test_protobuf_without_its_package_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.trace.v1.trace_pb2", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"opentelemetry-proto.*assay\[otlp\]"):
        read("otlp", DATA / "otlp_openai_v2.pb")
