"""Imports of broken, hostile and large files."""

import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from importing_rows import DATA, chat, lines, otlp, read, request, span

from assay.errors import DataError
from assay.traces import Rollout
from assay.traces.importers import files as importing_files, read_otlp


def test_the_later_one_of_duplicate_spans_is_imported(tmp_path: Path) -> None:
    result = read("otlp", lines(tmp_path / "x.jsonl", request(span(1, chat("first"))), request(span(1, chat("last")))))
    (run,), (again,) = result
    assert [t.output for t in run.transitions] == ["last"]
    assert (again.repeated, again.where, again.trace) == (True, f"{tmp_path / 'x.jsonl'}:2", f"{1:032x}")


def test_broken_rows_are_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    nameless = {**span(5, chat()), "traceId": "0" * 32}
    path = lines(
        tmp_path / "x.jsonl", '{"resourceSpa\n', request(span(1, chat("a"))), "[1, null]\n", "17\n",
        '{"resourceMetrics": []}\n',
        json.dumps({"info": {}, "data": {}}) + "\n", request(nameless), request(span(1, trace=3)),
        request(span(1, chat("b"), trace=2)),
        '{"resourceSpans": {"a": 1}}\n', '{"resourceSpans": [{"scopeSpans": [{"spans": [3, {"traceId": 7}]}]}]}\n',
        json.dumps({"traceId": "5b", "spanId": "1", "name": "chat"}) + "\n",
        '{"resourceSpans": [{"scopeSpans": [{"sp',
    )  # fmt: skip
    rollouts, skipped = read("otlp", path)
    assert [run.transitions[0].output for run in rollouts] == ["a", "b"]
    reasons = {skip.where.removeprefix(f"{path}:"): skip.reason for skip in skipped}
    assert reasons["1"].startswith("not JSON: ")
    assert (reasons["3[0]"], reasons["3[1]"], reasons["4"]) == tuple(
        f"expected an object, found {kind}" for kind in ("int", "NoneType", "int")
    )
    assert reasons["5"] == "no spans: its fields are 'resourceMetrics'"
    assert reasons["6"] == "a row of mlflow, not of otlp"
    assert reasons["7"] == "the span 'span 5' has no trace id"
    assert reasons["8"] == "no LM call among its 1 spans"
    assert reasons["10"] == "no spans: its fields are 'resourceSpans'"
    assert reasons["11"] == "the span '' has no trace id"
    assert reasons["12"].endswith("a line is an OTLP request, an object with 'resourceSpans'")
    assert reasons["13"].startswith("not JSON: ")
    assert len(skipped) == 12


def test_hostile_texts_are_read(tmp_path: Path) -> None:
    odd = {**span(1, chat("a\ud800b\0c")), "traceId": "trace-\ud801\0"}
    row = json.dumps(request(odd)).replace("hello", "\\udfff\\u0000")
    (path := tmp_path / "x.jsonl").write_bytes(row.encode() + b"\n" + b"\xff\xfe bad bytes\n" + b"\0" * 100 + b"\n")
    (run,), skipped = read("otlp", path)
    assert run.transitions[0].output == "a\ud800b\0c"
    assert skipped[0].reason == "not UTF-8 at byte 0"
    assert len(skipped) == 2


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "only white space"),
        (b'{"resourceSpans": [{"scopeSpans"', r"x\.json:1: neither JSON lines nor a JSON document"),
        (b'{\n "resourceSpans": [\n  {,\n', r"x\.json:3: neither JSON lines nor a JSON document"),
        (b"hello\nworld\n", r"x\.json:1: neither"),
        (b"\x1f\x8b\x08\x00", r"compressed \(gzip\)"),
        (b"\x28\xb5\x2f\xfd\x00", r"compressed \(zstd\)"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b'{"resourceSpans": []}', "has no otlp LM call in 0 traces; .*x.json:1: no spans"),
        (
            json.dumps(request(span(1, {"gen_ai.operation.name": "embeddings"}))).encode(),
            "has no otlp LM call in 1 traces; .*among its 1 spans",
        ),
    ],
)
def test_a_file_without_traces_is_refused_with_the_reason(tmp_path: Path, written: bytes, message: str) -> None:
    (path := tmp_path / "x.json").write_bytes(written)
    with pytest.raises(DataError, match=message):
        read("otlp", path)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("otlp", "none.json", "no such file"),
        ("otlp", "", "is a folder: name one file"),
        (
            "otlp",
            "mlflow_3.jsonl",
            r"mlflow_3\.jsonl:1 is not otlp; it looks like mlflow\. Use: assay traces import mlflow ",
        ),
        ("mlflow", "otlp_openai_v2.jsonl", "is not mlflow; it looks like otlp"),
        ("langfuse", "mlflow_2.json", "is not langfuse; it looks like mlflow"),
        ("langfuse", "otlp_langfuse_sdk.jsonl", "is not langfuse; it looks like otlp"),
        ("langfuse", "otlp_openai_v2.pb", r"otlp_openai_v2\.pb is not JSON"),
    ],
)
def test_a_path_without_a_file_of_the_kind_is_refused(kind: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(kind, DATA / name)


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_trace(tmp_path: Path) -> None:
    path, text = tmp_path / "x.jsonl", "x" * 10_000
    with path.open("w") as file:
        for number in range(600):  # 12 MB, each trace's two spans at the two ends of the file
            file.write(json.dumps(request(span(1, chat(text), trace=number + 1))) + "\n")
        for number in range(600):
            file.write(json.dumps(request(span(2, chat(text), trace=number + 1))) + "\n")
    tracemalloc.start()
    try:
        assert sum(len(run.transitions) for run in read_otlp(path) if isinstance(run, Rollout)) == 1200
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_only_lines_and_traces_that_are_too_large_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing_files, "MAX_LINE_BYTES", 5_000)
    monkeypatch.setattr(importing_files, "MAX_TRACE_BYTES", 3_000)
    rows = [
        request(span(1, chat("x" * 20_000))),
        request(span(1, chat("a"), trace=2)),
        *(request(span(n, chat("y" * 500), trace=3)) for n in range(1, 9)),
    ]
    (run,), skipped = read("otlp", lines(tmp_path / "x.jsonl", *rows, request(span(1, chat("b"), trace=2))))
    assert run.transitions[0].output == "b"
    assert [skip.reason.split(":")[0] for skip in skipped if not skip.repeated] == [
        "not JSON",
        "the trace is larger than 0 MiB",
    ]


def test_a_full_disk_during_sorting_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(*args: Any, **options: Any) -> sqlite3.Connection:
        database = connect(*args, **options)
        database.execute("PRAGMA max_page_count=8")
        return database

    monkeypatch.setattr(importing_files.sqlite3, "connect", small)
    with pytest.raises(DataError, match=r"cannot be sorted by trace: .*full.*SQLITE_TMPDIR"):
        otlp(tmp_path, *(span(n, chat("y" * 5_000)) for n in range(1, 50)))
