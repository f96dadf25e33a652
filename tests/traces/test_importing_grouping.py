"""Imports: which rollout a span belongs to, which call, and which tool."""

import json
from pathlib import Path
from typing import Any

from importing_rows import chat, lines, otlp, read, request, span, tool

from assay.traces import ToolCall


def test_interleaved_spans_are_grouped_by_trace(tmp_path: Path) -> None:
    rows = [request(span(n, chat(f"{trace}.{n}"), at=n, trace=trace)) for n in (3, 1, 2) for trace in (1, 2)]
    (first, second), _ = read("otlp", lines(tmp_path / "x.jsonl", *rows))
    assert [t.output for t in first.transitions] == ["1.1", "1.2", "1.3"]
    assert [t.output for t in second.transitions] == ["2.1", "2.2", "2.3"]
    assert [t.t for t in first.transitions] == [0, 1, 2]


def test_without_recorded_inputs_they_are_what_the_first_call_was_sent(tmp_path: Path) -> None:
    (run,), _ = otlp(tmp_path, span(1), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == ({"input": "hello"}, {"output": "hi"})  # and what the last one said


def test_the_roots_input_and_output_are_those_of_the_rollout(tmp_path: Path) -> None:
    recorded = {"input.value": '{"question": "q", "k": 2}', "output.value": '{"answer": "a"}'}
    (run,), _ = otlp(tmp_path, span(1, recorded), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == ({"question": "q", "k": 2}, {"answer": "a"})
    called = {"traceloop.entity.input": '{"args": [], "kwargs": {"question": "q"}}', "traceloop.entity.output": '"[1]"'}
    (run,), _ = otlp(tmp_path, span(1, called), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == ({"question": "q"}, {"output": [1]})


def asks(*ids: str) -> dict[str, Any]:
    parts = [{"type": "tool_call", "id": call_id, "name": "f", "arguments": {"of": call_id}} for call_id in ids]
    return {**chat(), "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}])}


def test_a_tool_belongs_to_the_call_that_requested_it_by_id(tmp_path: Path) -> None:
    late = tool("a", **{"gen_ai.tool.call.result": "1"})
    calls = [span(1, asks("a"), at=0), span(2, asks("b"), at=2)]
    (run,), _ = otlp(tmp_path, *calls, span(3, tool("b"), at=3), span(4, late, at=9), span(5, tool("b"), at=-5))
    first, second = run.transitions
    # though the second call was before it too
    assert first.tools == [ToolCall(name="f", arguments={"of": "a"}, result="1")]
    assert second.tools == [ToolCall(name="f", arguments={"of": "b"})] * 2  # one by a clock that runs before


def test_a_repeated_id_belongs_to_the_latest_call_before_it(tmp_path: Path) -> None:
    calls = [span(1, asks("call_0"), at=0), span(2, asks("call_0"), at=10)]
    used = [span(3, tool("call_0", name="x"), at=5), span(4, tool("call_0", name="y"), at=15)]
    (run,), _ = otlp(tmp_path, *calls, *used)
    assert [[used.name for used in t.tools] for t in run.transitions] == [["x"], ["y"]]


def test_a_trace_without_tool_spans_has_the_tools_of_its_messages(tmp_path: Path) -> None:
    def back(*pairs: tuple[str, str]) -> dict[str, Any]:
        parts = [
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": name, "response": result}]}
            for name, result in pairs
        ]
        return {"gen_ai.input.messages": json.dumps(parts)}

    (run,), _ = otlp(
        tmp_path, span(1, asks("a", "b"), at=0), span(2, {**asks("a"), **back(("a", "1"), ("b", "2"))}, at=1),
        span(3, chat(**back(("a", "1"), ("b", "2"), ("a", "3"))), at=2),
    )  # fmt: skip
    assert [[(used.arguments["of"], used.result) for used in t.tools] for t in run.transitions] == [
        [("a", "1"), ("b", "2")],
        [("a", "3")],
        [],
    ]


def test_an_lm_span_around_another_is_not_counted_twice(tmp_path: Path) -> None:
    outer, inner = chat("outer", **{"gen_ai.usage.input_tokens": 5}), chat("inner", **{"gen_ai.usage.input_tokens": 5})
    (run,), skipped = otlp(tmp_path, span(1), span(2, outer, parent=1), span(3, parent=2), span(4, inner, parent=3))
    assert ([t.output for t in run.transitions], run.tokens) == (["inner"], 5)
    assert [skip.reason for skip in skipped] == [f"the span 'span 2' is the same LM call as the span '{4:016x}'"]
    silent = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    (run,), _ = otlp(tmp_path, span(1, chat("outer")), span(2, silent, parent=1))
    assert [t.output for t in run.transitions] == ["outer"]  # the inner one recorded nothing of what was said


def test_an_lm_call_inside_a_tool_is_a_separate_call(tmp_path: Path) -> None:
    (run,), skipped = otlp(
        tmp_path, span(1, chat("outer")), span(2, tool(), parent=1), span(3, chat("inner"), parent=2, at=1)
    )
    assert ([t.output for t in run.transitions], skipped) == (["outer", "inner"], [])
