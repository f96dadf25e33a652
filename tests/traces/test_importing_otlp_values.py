"""Imports of OTLP spans, written by hand: other operations, values of every type and spelling, counts."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
from importing_rows import T0, attributes, body, chat, choice, lines, only, otlp, read, request, span

from assay.errors import DataError


def test_azures_system_instruction_is_a_system_message(tmp_path: Path) -> None:
    events = [
        ("gen_ai.system.instruction", {"gen_ai.event.content": '{"content": "s"}'}),
        ("gen_ai.user.message", {"gen_ai.event.content": '{"content": "hello"}'}),
    ]
    call = only(
        otlp(
            tmp_path,
            span(
                1,
                {"gen_ai.operation.name": "chat"},
                events=[{"name": n, "attributes": attributes(g)} for n, g in events],
            ),
        )
    )
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


def test_prompt_and_completion_of_a_text_completion(tmp_path: Path) -> None:
    recorded = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.prompt": "Once",
        "gen_ai.completion": "upon",
    }
    call = only(otlp(tmp_path, span(1, {**recorded, "gen_ai.response.finish_reasons": ["length"]})))
    assert body(call)["messages"] == [{"role": "user", "content": "Once"}]
    assert choice(call) == {"index": 0, "message": {"role": "assistant", "content": "upon"}, "finish_reason": "length"}


def test_json_written_by_a_model_stays_text(tmp_path: Path) -> None:
    for text in (
        '{"answer": 42}',
        '{"text": "x"}',
        '{"message": "x"}',
        '["a", "b"]',
        "{}",
        "[]",
        '"quoted"',
        "{not json",
        '{"output": [1]}',
        '{"input": "x"}',
    ):
        recorded = {"openinference.span.kind": "LLM", "input.value": text, "output.value": text}
        call = only(otlp(tmp_path, span(1, recorded)))
        assert (call.output, body(call)["messages"]) == (text, [{"role": "user", "content": text}])


def test_other_operations_are_not_imported_as_lm_calls(tmp_path: Path) -> None:
    others = [
        span(
            number,
            {
                "gen_ai.operation.name": name,
                "gen_ai.request.model": "m",
                "gen_ai.usage.input_tokens": 9,
                "gen_ai.usage.output_tokens": 0,
            },
            parent=1,
        )
        for number, name in enumerate(("embeddings", "create_agent", "invoke_agent", "retrieval"), 10)
    ]
    others.append(
        span(
            20,
            {"openinference.span.kind": "EMBEDDING", "gen_ai.request.model": "m", "gen_ai.usage.output_tokens": 1},
            parent=1,
        )
    )
    (run,), _ = otlp(tmp_path, span(1), *others, span(2, chat(), parent=1))
    assert [t.request["span"] for t in run.transitions] == [f"{2:016x}"]


def test_older_spans_without_an_operation_name_are_recognised_by_their_token_usage(tmp_path: Path) -> None:
    call = only(
        otlp(
            tmp_path,
            span(1, {"gen_ai.system": "openai", "gen_ai.request.model": "m", "gen_ai.usage.completion_tokens": 3}),
        )
    )
    assert (call.model, call.completion_tokens) == ("m", 3)
    with pytest.raises(DataError, match=r"no .*LM call"):
        otlp(
            tmp_path, span(1, {"gen_ai.system": "openai", "gen_ai.request.model": "m"})
        )  # a chain that names its model


def test_otlp_values_of_every_type_and_spelling_are_read(tmp_path: Path) -> None:
    written = [
        {"key": "gen_ai.operation.name", "value": {"string_value": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": 5}},
        {"key": "gen_ai.usage.output_tokens", "value": {"int_value": "6"}},
        {"key": "gen_ai.request.temperature", "value": {"doubleValue": 1}},
        {"key": "gen_ai.request.top_p", "value": {"doubleValue": "NaN"}}, {"key": "x", "value": {"bytesValue": "aGk="}},
        {"key": "y", "value": {}},
        {"key": "gen_ai.request.seed", "value": {"intValue": "9007199254740993"}}, {"key": "z", "value": None},
        "not an attribute",
    ]  # fmt: skip
    document = {
        "resource_spans": [{"resource": {"attributes": []}, "scope_spans": [{"spans": [{
            "trace_id": base64.b64encode(bytes(15) + b"\1").decode(),
            "span_id": base64.b64encode(bytes(7) + b"\2").decode(),
            "start_time_unix_nano": T0 * 10**9, "end_time_unix_nano": (T0 + 1) * 10**9, "attributes": written,
        }]}]}]
    }  # fmt: skip
    (run,), _ = read("otlp", lines(tmp_path / "x.jsonl", document))
    (call,) = run.transitions
    assert (run.metadata["trace_id"], call.request["span"]) == (f"{1:032x}", f"{2:016x}")
    assert (call.prompt_tokens, call.completion_tokens, body(call)["temperature"], body(call)["seed"]) == (
        5,
        6,
        1,
        9007199254740993,
    )
    assert math.isnan(body(call)["top_p"])
    assert (call.started_at, call.latency_ms) == (T0, 1000.0)


@pytest.mark.parametrize("bad", ["NaN", "-1", "abc", "1e400", str(2**31), True, None, [1], {"a": 1}, "9" * 5000])
def test_a_missing_count_is_unknown_and_never_zero(tmp_path: Path, bad: Any) -> None:
    written = [
        *attributes({"gen_ai.operation.name": "chat"}),
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": bad}},
    ]
    call = only(otlp(tmp_path, {**span(1), "attributes": written}))
    assert (call.prompt_tokens, call.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    "bad", [{"arrayValue": {"values": [{"stringValue": "chat"}]}}, {"kvlistValue": {"values": []}}, {"intValue": "5"}]
)
def test_an_operation_name_that_is_not_text_is_ignored(tmp_path: Path, bad: Any) -> None:
    written = [
        {"key": "gen_ai.operation.name", "value": bad},
        *attributes({"gen_ai.request.model": "m", "gen_ai.system": "openai"}),
    ]
    (run,), _ = otlp(tmp_path, {**span(1), "attributes": written}, span(2, chat("a"), parent=1, at=1))
    assert run.transitions[-1].output == "a"


def test_a_document_lines_and_an_array_give_the_same_rollouts(tmp_path: Path) -> None:
    spans = [span(1), span(2, chat("a"), parent=1, at=1), span(3, chat("b"), parent=1, at=2)]
    forms = {
        "document": json.dumps(request(*spans), indent=2), "one line": json.dumps(request(*spans)),
        "lines": "\n".join(json.dumps(request(item)) for item in spans),
        "array": json.dumps([request(item) for item in spans], indent=1),
        "array in lines": "[\n" + ",\n".join(json.dumps(request(item)) for item in spans) + "\n]\n",
        "array of one": "[\n" + json.dumps(request(*spans)) + "\n]\n",
        "documents": "\n".join(json.dumps(request(item), indent=2) for item in spans),
        "bom": "\ufeff" + "\n".join(json.dumps(request(item)) for item in spans),
        "blank lines": "\n\r\n" + "\n\n".join(json.dumps(request(item)) for item in spans) + "\n \n",
    }  # fmt: skip
    for name, text in forms.items():
        (path := tmp_path / "x.json").write_text(text, encoding="utf-8")
        (run,), skipped = read("otlp", path)
        assert ([t.output for t in run.transitions], skipped) == (["a", "b"], []), name
