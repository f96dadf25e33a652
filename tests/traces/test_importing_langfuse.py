"""Imports of Langfuse's exports, after its documentation: traces, scores, tokens and costs."""

import json
import math
import time
from pathlib import Path

import pytest
from importing_rows import CALLS, body, choice, langfuse, mark, observation

from assay.traces import Rollout, ToolCall

PAGE = {  # of the sample response of the Observations API v2
    "data": [{
        "id": "support-chat-7-950dc53a-gen", "traceId": "support-chat-7-950dc53a", "parentObservationId": None,
        "type": "GENERATION", "name": "llm-generation", "level": "DEFAULT", "statusMessage": "", "version": "",
        "startTime": "2025-12-17T16:09:00.875Z", "endTime": "2025-12-17T16:09:01.456Z",
        "input": '{"messages":[{"role":"user","content":"Perfect."}]}',
        "output": '{"role":"assistant","content":"You\'re all set. Have a great day!"}', "metadata": {},
        "providedModelName": "gpt-4o", "internalModelId": "clm1a2b3", "modelParameters": {"temperature": 0.2},
        "usageDetails": {"input": 98, "output": 68, "total": 166}, "inputUsage": 98, "outputUsage": 68,
        "costDetails": {"input": 0.00049, "output": 0.00204, "total": 0.00253}, "totalCost": 0.00253,
        "latency": 0.581, "userId": "", "sessionId": "support-chat-session", "tags": ["support", "chat"],
        "release": "v1.4.2", "traceName": "support-chat",
    }],
    "meta": {"cursor": "eyJsYXN0"},
}  # fmt: skip


def test_a_page_of_langfuses_api_is_read(tmp_path: Path) -> None:
    (run,), skipped = langfuse(tmp_path, PAGE)
    (call,) = run.transitions
    assert (run.source, run.status, run.data_subject, skipped) == ("langfuse", "done", None, [])
    assert (run.program, run.program_version) == ("support-chat", "v1.4.2")
    assert run.metadata == {"trace_id": "support-chat-7-950dc53a", "session_id": "support-chat-session"}
    assert (run.inputs, run.prediction) == ({"input": "Perfect."}, {"output": "You're all set. Have a great day!"})
    assert body(call) == {"model": "gpt-4o", "messages": [{"role": "user", "content": "Perfect."}], "temperature": 0.2}
    assert call.output == "You're all set. Have a great day!"
    assert (call.prompt_tokens, call.completion_tokens, call.cost_usd) == (98, 68, 0.00253)
    assert (call.started_at, call.latency_ms) == (1765987740.875, 581.0)  # 2025-12-17T16:09:00.875Z


AGENT = [
    observation(1, "AGENT", input={"q": "12 + 30"}, output="42"),
    observation(2, at=1, parent=1, input="12 + 30", output={"role": "assistant", "content": None, "tool_calls": CALLS}),
    observation(3, "TOOL", at=2, parent=1, name="add", input={"a": 12, "b": 30}, output=42),
    observation(
        4, "TOOL", at=3, parent=1, name="add", input={"a": 1, "b": "x"}, level="ERROR", statusMessage="no number"
    ),
    observation(5, at=5, parent=1, input=[{"role": "user", "content": "12 + 30"}], output="42"),
    observation(6, "EMBEDDING", at=6, parent=1, model="e"),
]


def reads_as_the_agent(run: Rollout) -> None:
    assert (run.status, run.inputs, run.prediction) == ("done", {"q": "12 + 30"}, {"output": "42"})
    first, second = run.transitions
    assert choice(first)["message"]["tool_calls"] == CALLS
    assert first.tools == [
        ToolCall(name="add", arguments={"a": 12, "b": 30}, result="42"),
        ToolCall(name="add", arguments={"a": 1, "b": "x"}, error="no number"),
    ]
    assert (second.output, second.tools, run.score, run.human_rating) == ("42", [], 0.5, 1.0)


def test_a_langfuse_trace_with_nested_observations_and_scores_is_read(tmp_path: Path) -> None:
    inside = [{key: value for key, value in row.items() if key != "traceId"} for row in AGENT]
    scores = [mark("ok", 0.5), mark("stars", 1, "ANNOTATION")]
    names = {"name": "adder", "userId": "eve", "sessionId": "s", "release": "r", "metadata": {"tenant": "acme"}}
    of_it = {"id": "t", "timestamp": "2025-01-01T00:00:00.000Z", **names}
    older = {"trace": {**of_it, "observations": [], "scores": []}, "observations": inside, "scores": scores}
    for trace in ({**of_it, "observations": inside, "scores": scores}, older):
        (run,), skipped = langfuse(tmp_path, trace)
        reads_as_the_agent(run)
        assert (run.program, run.data_subject, run.tenant, skipped) == ("adder", "eve", "acme", [])
        assert (run.program_version, run.metadata["session_id"]) == ("r", "s")
    (run,), skipped = langfuse(tmp_path, {"observations": AGENT, "scores": scores})  # today's download
    reads_as_the_agent(run)
    assert (run.program, skipped) == ("agent 1", [])


def test_fields_of_the_trace_take_precedence_over_its_root(tmp_path: Path) -> None:
    fields = {"name": "n", "input": {"asked": "x"}, "output": "y", "version": "2"}
    trace = {"id": "t", "timestamp": "2025-01-01T00:00:00.000Z", **fields}
    (run,), _ = langfuse(tmp_path, *({**row, "version": "1"} for row in AGENT), trace)
    assert (run.inputs, run.prediction, run.program, run.program_version) == ({"asked": "x"}, {"output": "y"}, "n", "2")


def test_times_without_a_zone_are_utc_and_may_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        for written in (
            "2025-01-01 00:00:01.500000",
            "2025-01-01T00:00:01.500Z",
            "2025-01-01T09:00:01.500+09:00",
            1735689601500,
            1735689601.5,
        ):
            (run,), _ = langfuse(tmp_path, {**observation(1, input="a", output="b"), "startTime": written})
            assert run.transitions[0].started_at == 1735689601.5
        (run,), _ = langfuse(tmp_path, {**observation(1, input="a", output="b"), "startTime": "yesterday"})
        assert run.transitions[0].started_at == 0.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_langfuse_scores_are_verdicts_and_annotations_ratings(tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    scores = [
        mark("stars", 0.5, "ANNOTATION"), mark("stars", 1.0, "ANNOTATION", comment="good"),
        mark("ok", 1, "API", "BOOLEAN", stringValue="True"),
        mark("tone", 2, kind="CATEGORICAL", stringValue="friendly"),
        mark("note", 0, "ANNOTATION", "TEXT", stringValue="as he said"),
        mark("five", 4), mark("nan", math.nan), mark("text", "0.7"),
        mark("fix", 0, "ANNOTATION", "CORRECTION", stringValue="better"), mark("step", 0.25, observationId="o9"),
        mark("root", 2.5, observationId="o1"),
    ]  # fmt: skip
    (run,), skipped = langfuse(tmp_path, call, *scores)
    assert (run.human_rating, run.score, run.rubric) == (0.75, 1.0, "imported:ok")  # the mean of 0.5 and 1
    assert run.expected == {"output": "better"}
    assert [v.reason for v in run.verdicts[:4]] == ["", "good", "", "imported as 'friendly'"]
    assert [(v.criterion, v.grade, v.label, v.scope) for v in run.verdicts] == [
        ("stars", 0.5, None, "final"), ("stars", 1.0, None, "final"), ("ok", 1.0, "True", "final"),
        ("tone", None, "friendly", "final"),
        ("note", None, "as he said", "final"), ("five", None, None, "final"), ("nan", None, None, "final"),
        ("text", None, "0.7", "final"),
        ("step", 0.25, None, "step"), ("root", None, None, "final"),
    ]  # fmt: skip
    assert [skip.reason for skip in skipped] == [
        "the score 'five' is 4: outside [0, 1]", "the score 'nan' is nan: not a finite number",
        "the score 'root' is 2.5: outside [0, 1]",
    ]  # fmt: skip
    assert [skip.where for skip in skipped] == [f"{tmp_path / 'x.jsonl'}:{line}" for line in (7, 8, 12)]


def test_a_score_of_zero_is_a_score_and_a_missing_one_is_not(tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    for scores, expected in (
        ([mark("ok", 0)], 0.0),
        ([mark("ok", None)], None),
        ([], None),
        ([mark("ok", -0.01)], None),
        ([mark("ok", 1.01)], None),
    ):
        (run,), _ = langfuse(tmp_path, call, *scores)
        assert (run.score, run.human_rating) == (expected, None)
    (run,), _ = langfuse(tmp_path, call, mark("ok", False, "ANNOTATION", "BOOLEAN"))
    assert (run.score, run.human_rating) == (None, 0.0)


def test_tools_in_separate_columns_are_read(tmp_path: Path) -> None:
    defined = {"description": "Adds.", "parameters": {"type": "object"}}
    recorded = {"toolDefinitions": {"add": json.dumps(defined)}, "toolCalls": [json.dumps(CALLS[0])]}
    (run,), _ = langfuse(tmp_path, observation(1, input="a", output=None, **recorded))
    (call,) = run.transitions
    assert body(call)["tools"] == [{"type": "function", "function": {"name": "add", **defined}}]
    assert choice(call)["message"]["tool_calls"] == CALLS[:1]
    assert call.tools == [ToolCall(name="add", arguments={"a": 12, "b": 30})]


def test_unknown_langfuse_rows_are_skipped_with_the_reason(tmp_path: Path) -> None:
    rows = [
        observation(1, input="a", output="b"), {"id": "x", "foo": 1}, {**mark("m", 1), "traceId": None},
        observation(1, input="a", output="c"),
        observation(2, trace=""), mark("alone", 1, traceId="other"), {"data": [3]},
    ]  # fmt: skip
    (run,), skipped = langfuse(tmp_path, *rows)
    assert run.transitions[0].output == "c"
    assert [(skip.where.rsplit(":", 1)[1], skip.reason, skip.repeated) for skip in skipped] == [
        ("2", "not an observation, score or trace: its fields are 'id', 'foo'", False),
        ("3", "the score 'm-1-0' belongs to no trace", False),
        ("4", "the observation 'o1' is in the file twice; the later one is imported", True),
        ("5", "the observation 'o2' belongs to no trace", False),
        ("7", "expected an object, found int", False), ("6", "no LM call among its 0 spans", False),
    ]  # fmt: skip
