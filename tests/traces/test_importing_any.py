"""Imports of arbitrary values: every row is imported or skipped with the reason."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from importing_rows import attributes, lines, otlp, read, span, tool

from assay.traces import Rollout
from assay.traces.importers import Skipped


def assert_imported_or_skipped(rollouts: list[Rollout], skipped: list[Skipped]) -> None:
    """No row is dropped silently: a read returns rollouts, or says where and why it skipped a row."""
    assert rollouts or skipped
    assert all(item.transitions or item.inputs or item.prediction for item in rollouts)
    assert all(item.where and item.reason for item in skipped)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "parts",
                    "type",
                    "text",
                    "id",
                    "name",
                    "tool_calls",
                    "function",
                    "arguments",
                    "message",
                    "messages",
                    "choices",
                    "input",
                    "output",
                    "kwargs",
                    "args",
                    "finish_reason",
                    "usage",
                    "tool",
                    "lc",
                    "toolUse",
                    "call_id",
                    "system",
                    "value",
                    "system",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def langfuse_rows(values: Sequence[Any], name: Any, score: Any) -> list[dict[str, Any]]:
    """A generation with these values, a tool of this name, and a score."""
    row = {
        "id": "o",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2025-01-01T00:00:00Z",
        "input": values[0],
        "output": values[1],
    }
    row |= {
        "toolDefinitions": values[2],
        "usageDetails": values[3],
        "costDetails": values[3],
        "modelParameters": values[2],
        "toolCalls": values[2],
    }
    scored = {
        "traceId": "t",
        "name": "s",
        "source": "API",
        "dataType": "NUMERIC",
        "value": score,
        "id": "s",
        "comment": name,
    }
    return [row, {**row, "id": "p", "type": "TOOL", "name": name}, scored]


def mlflow_row(values: Sequence[Any], prompt: Any, answer: Any, tools: Any, usage: Any) -> dict[str, Any]:
    spanned = {
        "span_id": "a",
        "attributes": {
            "mlflow.spanType": '"LLM"',
            "mlflow.spanInputs": values[0],
            "mlflow.spanOutputs": values[1],
            "mlflow.chat.tokenUsage": usage,
        },
    }
    info = {
        "trace_id": "t",
        "tags": tools,
        "trace_metadata": usage,
        "assessments": [{"assessment_name": prompt, "feedback": {"value": usage}}],
    }
    data = {"spans": [spanned, prompt], "request": prompt, "response": answer}
    return {"info": info, "data": data}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(prompt=JSON, answer=JSON, tools=JSON, usage=JSON, plain=st.booleans())
def test_no_value_raises_an_error_in_any_prompt_format(
    tmp_path_factory: pytest.TempPathFactory, prompt: Any, answer: Any, tools: Any, usage: Any, plain: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    values = [part if plain else json.dumps(part) for part in (prompt, answer, tools, usage)]
    recorded = dict(
        zip(
            ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "events"),
            values,
            strict=True,
        )
    )
    inner = [{"key": key, "value": {"x": item}} for key, item in recorded.items()]
    events = [
        {"name": name, "attributes": {"content": values[0], "message": values[1]}}
        for name in ("gen_ai.user.message", "gen_ai.choice")
    ]
    for attributes_ in (
        recorded,
        inner,
        {"input.value": values[0], "output.value": values[1], "openinference.span.kind": "LLM"},
        {"gen_ai.prompt.0": values[0]},
    ):
        more = (
            attributes({"gen_ai.operation.name": "chat"})
            if isinstance(attributes_, list)
            else {"gen_ai.operation.name": "chat"}
        )
        both = [*attributes_, *more] if isinstance(attributes_, list) else {**attributes_, **more}
        assert_imported_or_skipped(
            *otlp(
                folder,
                {**span(1), "attributes": both, "events": events},
                {**span(2), "attributes": {**tool("c"), "input.value": values[0], "output.value": values[1]}},
            )
        )
    assert_imported_or_skipped(*read("langfuse", lines(folder / "l.jsonl", *langfuse_rows(values, prompt, usage))))
    row = mlflow_row(values, prompt, answer, tools, usage)
    assert_imported_or_skipped(*read("mlflow", lines(folder / "m.jsonl", row)))
