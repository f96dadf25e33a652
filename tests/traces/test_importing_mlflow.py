"""Imports of MLflow's traces, written by hand."""

import json
from pathlib import Path

from importing_rows import body, lines, mlflow_span, mlflow_trace, read


def test_an_unfinished_mlflow_trace_is_unscored_and_not_a_failure_of_the_agent(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", mlflow_trace(mlflow_span(1, "LLM", "a", "b"), state="IN_PROGRESS"))
    (run,), _ = read("mlflow", path)
    assert (run.status, run.error) == ("error", "the trace was not finished when it was exported")


def test_mlflow_traces_in_lists_pages_and_tables_are_read(tmp_path: Path) -> None:
    trace = mlflow_trace(mlflow_span(1, "CHAT_MODEL", {"messages": [{"role": "user", "content": "a"}]}, "b"))
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


def test_a_conversation_without_an_answer_keeps_its_last_message(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}]
    span = mlflow_span(1, "CHAT_MODEL", None, None, **{"mlflow.chat.messages": talk})
    (run,), _ = read("mlflow", lines(tmp_path / "x.jsonl", mlflow_trace(span)))
    assert body(run.transitions[0])["messages"] == talk
