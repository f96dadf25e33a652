"""Imports of arbitrary values: every row is imported or skipped with the reason."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from importing_rows import attributes, lines, mark, mlflow_span, mlflow_trace, observation, otlp, read, span, tool

from assay.traces import Rollout
from assay.traces.importers import Skipped


def assert_imported_or_skipped(rollouts: list[Rollout], skipped: list[Skipped]) -> None:
    """No row is dropped silently: a read returns rollouts, or says where and why it skipped a row."""
    assert rollouts or skipped
    assert all(item.transitions or item.inputs or item.prediction for item in rollouts)
    assert all(item.where and item.reason for item in skipped)


FIELDS = (
    "role content parts type text id name tool_calls function arguments message messages choices input output kwargs "
    "args finish_reason usage tool lc toolUse call_id system value"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=4),
    max_leaves=12,
)


def langfuse_rows(values: Sequence[Any], name: Any, score: Any) -> list[dict[str, Any]]:
    """A generation with these values, a tool of this name, and a score."""
    row = observation(1, input=values[0], output=values[1], toolDefinitions=values[2], toolCalls=values[2])
    row |= {"usageDetails": values[3], "costDetails": values[3], "modelParameters": values[2]}
    return [row, {**row, "id": "p", "type": "TOOL", "name": name}, mark("s", score, "API", comment=name)]


def mlflow_row(values: Sequence[Any], prompt: Any, answer: Any, tools: Any, usage: Any) -> dict[str, Any]:
    span = mlflow_span(1, "LLM")
    span["attributes"] |= {"mlflow.spanInputs": values[0], "mlflow.spanOutputs": values[1]}
    span["attributes"] |= {"mlflow.chat.tokenUsage": usage}
    assessments = [{"assessment_name": prompt, "feedback": {"value": usage}}]
    row = mlflow_trace(span, prompt, tags=tools, trace_metadata=usage, assessments=assessments)
    return {**row, "data": {**row["data"], "request": prompt, "response": answer}}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(prompt=JSON, answer=JSON, tools=JSON, usage=JSON, plain=st.booleans())
def test_no_value_raises_an_error_in_any_prompt_format(
    tmp_path_factory: pytest.TempPathFactory, prompt: Any, answer: Any, tools: Any, usage: Any, plain: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    values = [part if plain else json.dumps(part) for part in (prompt, answer, tools, usage)]
    names = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "events")
    recorded = dict(zip(names, values, strict=True))
    events = [
        {"name": name, "attributes": {"content": values[0], "message": values[1]}}
        for name in ("gen_ai.user.message", "gen_ai.choice")
    ]
    kind = {"gen_ai.operation.name": "chat"}
    texts = {"input.value": values[0], "output.value": values[1]}
    for written in (
        {**recorded, **kind},
        [*({"key": key, "value": {"x": item}} for key, item in recorded.items()), *attributes(kind)],
        {**texts, "openinference.span.kind": "LLM", **kind},
        {"gen_ai.prompt.0": values[0], **kind},
    ):
        calls = [
            {**span(1), "attributes": written, "events": events},
            {**span(2), "attributes": {**tool("c"), **texts}},
        ]
        assert_imported_or_skipped(*otlp(folder, *calls))
    assert_imported_or_skipped(*read("langfuse", lines(folder / "l.jsonl", *langfuse_rows(values, prompt, usage))))
    row = mlflow_row(values, prompt, answer, tools, usage)
    assert_imported_or_skipped(*read("mlflow", lines(folder / "m.jsonl", row)))
