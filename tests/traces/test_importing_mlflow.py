"""Imports of MLflow's traces, written by hand."""

import json
from pathlib import Path
from typing import Any

from importing_rows import ADD, body, lines, read


def mlflow_trace(spans: list[dict[str, Any]], **info: Any) -> dict[str, Any]:
    return {"info": {"trace_id": "tr-1", "state": "OK", **info}, "data": {"spans": spans}}


def mlflow_span(
    number: int, kind: str, inputs: Any = None, outputs: Any = None, *, parent: int = 0, **more: Any
) -> dict[str, Any]:
    recorded = {"mlflow.spanType": kind, "mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs, **more}
    return {
        "span_id": f"s{number}", "parent_span_id": f"s{parent}" if parent else None, "name": f"n{number}",
        "start_time_unix_nano": number * 10**9,
        "end_time_unix_nano": number * 10**9 + 1, "status": {"code": "STATUS_CODE_OK"},
        "attributes": {k: json.dumps(v) for k, v in recorded.items()},
    }  # fmt: skip


def test_an_unfinished_mlflow_trace_is_unscored_and_not_a_failure_of_the_agent(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", mlflow_trace([mlflow_span(1, "LLM", "a", "b")], state="IN_PROGRESS"))
    (run,), _ = read("mlflow", path)
    assert (run.status, run.error) == ("error", "the trace was not finished when it was exported")


def test_yes_and_no_of_mlflow_judges_are_scores_and_failures_are_not(tmp_path: Path) -> None:
    def feedback(name: str, value: Any, **more: Any) -> dict[str, Any]:
        return {"assessment_name": name, "source": {"source_type": "LLM_JUDGE"}, "feedback": {"value": value, **more}}

    broken = feedback("broken", None, error={"error_code": "E", "error_message": "judge is down"})
    assessments = [
        feedback("safe", "yes"),
        broken,
        {**feedback("old", "no"), "valid": False},
        {"assessment_name": "answer", "expectation": {"value": [1]}},
    ]
    (run,), skipped = read(
        "mlflow", lines(tmp_path / "x.jsonl", mlflow_trace([mlflow_span(1, "LLM", "a", "b")], assessments=assessments))
    )
    assert [(v.criterion, v.grade, v.label, v.reason) for v in run.verdicts] == [
        ("safe", 1.0, "yes", ""), ("broken", None, None, "imported as None judge is down"),
    ]  # fmt: skip
    assert (run.score, run.rubric, run.expected, skipped) == (1.0, "imported:safe", {"answer": [1]}, [])


def test_mlflow_traces_in_lists_pages_and_tables_are_read(tmp_path: Path) -> None:
    trace = mlflow_trace([mlflow_span(1, "CHAT_MODEL", {"messages": [{"role": "user", "content": "a"}]}, "b")])
    for document in (
        [trace],
        {"traces": [trace]},
        {"trace_id": "tr-1", "trace": json.dumps(trace)},
        {"info": json.dumps(trace["info"]), "data": json.dumps(trace["data"])},
    ):
        (path := tmp_path / "x.json").write_text(json.dumps(document))
        (run,), skipped = read("mlflow", path)
        assert (run.transitions[0].output, run.metadata["trace_id"], skipped) == ("b", "tr-1", [])
    (path := tmp_path / "x.json").write_text(
        json.dumps([trace, trace, {"info": {}, "data": {}}, {"x": 1}, {"traces": [4]}])
    )
    (run,), skipped = read("mlflow", path)
    assert [(skip.repeated, skip.reason) for skip in skipped] == [
        (True, "the trace 'trace' is in the file twice; the later one is imported"),
        (False, "an MLflow trace without an id"),
        (False, "not an MLflow trace: it has no 'info' and 'data'"),
        (False, "not an MLflow trace: it has no 'info' and 'data'"),
    ]  # fmt: skip


def test_messages_in_mlflow_2s_attribute_are_read_if_there_are_no_inputs(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (run,), _ = read(
        "mlflow",
        lines(
            tmp_path / "x.jsonl",
            mlflow_trace([mlflow_span(1, "CHAT_MODEL", None, "b", **{"mlflow.chat.messages": talk})]),
        ),
    )
    assert (body(run.transitions[0])["messages"], run.transitions[0].output) == (talk[:1], "b")


def test_mlflow_attributes_besides_the_inputs_are_read(tmp_path: Path) -> None:
    inputs, outputs = (
        {"messages": [{"role": "user", "content": "a"}]},
        {"choices": [{"message": {"content": "b"}}], "usage": {"prompt_tokens": 1}},
    )
    more = {"mlflow.chat.tools": [ADD], "mlflow.chat.tokenUsage": {"input_tokens": 7, "output_tokens": 2}}
    fine, failed = (
        mlflow_span(2, "CHAT_MODEL", inputs, outputs, parent=1, **more),
        mlflow_span(3, "CHAT_MODEL", inputs, parent=1),
    )
    fine["status"], failed["status"] = {"code": "STATUS_CODE_OK", "message": "fine"}, {"code": "STATUS_CODE_ERROR"}
    trace = mlflow_trace([mlflow_span(1, "AGENT"), fine, failed])
    trace["data"] |= {"request": '{"q": "a"}', "response": '"b"'}
    (run,), _ = read("mlflow", lines(tmp_path / "x.jsonl", trace))
    assert (run.inputs, run.prediction, run.status) == ({"q": "a"}, {"output": "b"}, "done")
    assert (
        body(run.transitions[0])["tools"],
        run.transitions[0].prompt_tokens,
        run.transitions[0].completion_tokens,
    ) == ([ADD], 7, 2)
    assert [t.error for t in run.transitions] == [None, "error"]


def test_a_conversation_without_an_answer_keeps_its_last_message(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}]
    span = mlflow_span(1, "CHAT_MODEL", None, None, **{"mlflow.chat.messages": talk})
    (run,), _ = read("mlflow", lines(tmp_path / "x.jsonl", mlflow_trace([span])))
    assert body(run.transitions[0])["messages"] == talk
