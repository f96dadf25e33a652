"""Data files as other tools write them: each is read, or refused with an error that names it."""

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from assay.datasets import iter_rows, load_tasks
from assay.errors import DataError
from assay.judges import load_labels

ROWS = [{"question": f"q{at}", "answer": str(at)} for at in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = "question,answer\n" + "".join(f"q{at},{at}\n" for at in range(3))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(str(path))]


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "question , answer\nq0, 0\nq1, 1\nq2, 2\n"),
        ("a.csv", 'question, answer\n"q0", "0"\n"q1", "1"\n"q2", "2"\n'),
        ("a.csv", "\ufeffquestion,answer\nq0,0\nq1,1\nq2,2\n"),
        ("a.csv", "question,answer,,\nq0,0,,\nq1,1,,\nq2,2,,\n"),
        ("a.csv", "question,answer\nq0,0,,\nq1,1\nq2,2,\n,\n,,,\n"),
        ("a.csv", ",question,answer\n0,q0,0\n1,q1,1\n2,q2,2\n"),
        ("a.csv", "sep=;\nquestion;answer\nq0;0\nq1;1\nq2;2\n"),
        ("a.csv", "\n\nquestion,answer\n\nq0,0\nq1,1\nq2,2\n"),
        ("a.csv", TABLE.replace("\n", "\r")),
        ("a.csv", TABLE.replace("\n", "\r\n")),
        ("a.tsv", TABLE.replace(",", "\t")),
        ("A.CSV", TABLE.replace(",", ";")),
        ("a.csv", TABLE.replace(",", "|")),
        ("a.jsonl", LINES),
        ("a.ndjson", LINES.replace("\n", "\r")),
        ("a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n\r\n")),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS)),
        ("a.jsonl", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.jsonl", json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps({"version": "1.1", "tags": ["a"], "data": ROWS}, indent=2)),
        ("a.json", json.dumps({"version": "1.1", "data": ROWS})),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_text_file_is_read_in_the_forms_that_tools_write(
    tmp_path: Path, name: str, content: str, encoding: str
) -> None:
    (tmp_path / name).write_bytes(content.removeprefix("\ufeff" * (encoding == "utf-16")).encode(encoding))
    assert rows_of(tmp_path / name) == ROWS


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", LINES), ("a.csv", TABLE), ("a.json", json.dumps(ROWS))])
@pytest.mark.parametrize(
    ("ending", "packed"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)]
)
def test_a_compressed_file_is_read_by_either_name(
    tmp_path: Path, name: str, content: str, ending: str, packed: Callable[[bytes], bytes]
) -> None:
    for path in (tmp_path / f"{name}.{ending}", tmp_path / name):
        path.write_bytes(packed(content.encode()))
        assert rows_of(path) == ROWS


def test_a_truncated_archive_is_refused_by_name(tmp_path: Path) -> None:
    for ending, packed in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)):
        path = tmp_path / f"a.jsonl.{ending}"
        path.write_bytes(packed(LINES.encode())[:-9])
        with pytest.raises(DataError, match=rf"a\.jsonl\.{ending}"):
            rows_of(path)


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "tasks.parquet"
    folder.mkdir()
    for at, row in enumerate(ROWS):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / f"part-{at}.parquet")
    assert rows_of(folder) == ROWS


def test_line_ends_and_separators_inside_of_quotes_are_kept(tmp_path: Path) -> None:
    text = 'one, \r\ntwo; "three"\n\nfour\rfive'
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], [text, "1"]])
    assert rows_of(tmp_path / "a.csv") == [{"question": text, "answer": "1"}]


def test_what_pandas_writes_is_read(tmp_path: Path) -> None:
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "a.csv")
    frame.to_json(tmp_path / "a.json", orient="records")
    frame.to_json(tmp_path / "b.jsonl.gz", orient="records", lines=True)
    frame.to_parquet(tmp_path / "c.parquet")
    assert [rows_of(path) for path in sorted(tmp_path.iterdir())] == [ROWS] * 4


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.csv", b"question,answer,\nq,1,x\n", r"a\.csv:2"),
        ("a.csv", b"question , question\nq,1\n", r"a\.csv:1.*'question'"),
        ("a.csv", b'{"question": "q", "answer": "1"}\n', r"a\.csv:1"),
        ("a.csv", b'[\n{"question": "q", "answer": "1"}\n]\n', r"a\.csv:1"),
        ("a.csv", b"question,answer\nq\x00,1\n", r"a\.csv:2"),
        ("a.csv", TABLE.encode("utf-16-le"), r"a\.csv:1"),
        ("a.csv", "question,answer\ncafé,1\n".encode("latin-1"), r"a\.csv:2.*0xe9 at column 4"),
        ("a.csv", b'question,answer\n"q,1\n', r"a\.csv:2"),
        ("a.csv", b"question,answer\n", r"a\.csv"),
        ("a.csv", b"", r"a\.csv"),
        ("a.csv", b"PK\x03\x04workbook", r"a\.csv"),
        ("a.csv", b"PAR1", r"a\.csv.*\.parquet"),
        ("a.jsonl", TABLE.encode(), r"a\.jsonl:1"),
        ("a.jsonl", b'{"question": "q", "question": "r"}\n', r"a\.jsonl:1.*'question'"),
        ("a.jsonl", b'{"inputs": {"a": 1, "a": 2}}\n', r"a\.jsonl:1.*'a'"),
        ("a.json", b'[{"question": "q"},\n {broken}]', r"a\.json:2"),
        ("a.json", b'[{"question": "q"}, 3]', r"a\.json:item 2"),
        ("a.json", b'{"train": [{"question": "q"}], "test": [{"question": "r"}]}', r"a\.json.*'train', 'test'"),
        ("a.json", b'{"question": {"0": "q"}, "answer": {"0": "1"}}', r"a\.json.*column"),
        ("a.json", b'{"question": ["q"], "answer": ["1"]}', r"a\.json.*column"),
        ("a.json", b"3", r"a\.json"),
        ("a.jsonl", b'{"question": "q"}\n{broken\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"question": "q"}\n[1]\n', r"a\.jsonl:2: expected a JSON object, found list"),
        (
            "a.jsonl",
            b'{"question": "q"}\n{"question": "caf\xe9"}\n',
            r"a\.jsonl:2: not UTF-8 \(byte 0xe9 at column 18\)",
        ),
        ("a.jsonl", b'{"question": NaN}\n', r"a\.jsonl:1: not JSON \(NaN"),
        ("a.jsonl", b'{"question": "q", "x": [1e999]}\n', r"a\.jsonl:1: not JSON \(1e999 is out of range"),
        ("a.jsonl", b'{"question": "\\ud83d"}\n', r"a\.jsonl:1: unpaired surrogate"),
        ("a.jsonl", b'{"inputs": 3}\n', r"a\.jsonl:1: inputs='3' must be an object with the task's inputs"),
        ("a.jsonl", b'{"answer": "4"}\n', r"a\.jsonl:1: every input is empty"),
        ("a.jsonl", b"", "has no tasks"),
        ("a.csv", b"question,answer\nq,1,2\n", r"a\.csv:2: more fields"),
        ("a.csv", b"question,answer\nq\n", r"a\.csv:2: fewer fields"),
        ("a.parquet", b"no parquet", "not a Parquet file"),
        ("a.txt", b"", "cannot tell what"),
        ("a.xlsx", b"PK\x03\x04", r"a\.xlsx"),
    ],
)
def test_a_file_that_is_not_read_is_named_with_the_place(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=place):
        load_tasks(str(tmp_path / name))
    with pytest.raises(DataError, match=str(tmp_path)):  # a folder
        load_tasks(str(tmp_path))


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["q"], ["r"]], names=["question", "question"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet.*'question'"):
        load_tasks(str(tmp_path / "a.parquet"))


def test_labels_are_read_from_the_same_files(tmp_path: Path) -> None:
    rows = [{"output": f"text {at}", "label": "yes"} for at in range(3)]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert len(load_labels(str(tmp_path / "a.json.gz"), labels=["no", "yes"])) == 3
