"""Untrusted Parquet files: the decoded size is bounded, and plausible data is read unchanged."""

import datetime
import decimal
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from assay.datasets.sources import iter_rows
from assay.errors import DataError

READ = (
    "import sys\nfrom assay.datasets.sources import iter_rows\ntry:\n"
    "    print(sum(1 for _ in iter_rows(sys.argv[1])))\n"
) + (
    "except Exception as error:\n    print(type(error).__name__, error)\n"
    "print(next(int(line.split()[1]) // 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')))"
)


def read_in_subprocess(path: Path) -> tuple[str, int]:
    """Output of a process that reads the file, and its peak memory in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    output, peak = done.stdout.rsplit("\n", 2)[:2]
    return output, int(peak)


def write(path: Path, table: pyarrow.Table, **options: object) -> Path:
    pyarrow.parquet.write_table(table, path, compression="zstd", write_statistics=False, **options)
    return path


def test_a_file_that_repeats_one_string_uses_bounded_memory(tmp_path: Path) -> None:
    text = "a" * (4 << 20)
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024), pyarrow.array([text]))
    table = pyarrow.table({"question": repeated, "answer": ["1"] * 1024})
    path = write(tmp_path / "bomb.parquet", table, dictionary_pagesize_limit=8 << 20, store_schema=False)
    assert path.stat().st_size < 2000
    output, peak = read_in_subprocess(path)
    assert output.startswith("DataError")
    assert peak < 700


@pytest.mark.slow
def test_a_list_of_millions_in_one_row_is_refused(tmp_path: Path) -> None:
    element = pyarrow.array(["x" * 100]).take(pyarrow.array([0] * 5_000_000))
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 5_000_000]), element)
    output, peak = read_in_subprocess(write(tmp_path / "list.parquet", pyarrow.table({"messages": lists})))
    assert "a row has" in output
    assert peak < 700


@pytest.mark.parametrize("rows", [5_000_000, 40_000_000])
def test_an_implausible_number_of_rows_is_refused_before_any_is_read(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "rows.parquet", pyarrow.table({"question": pyarrow.repeat(True, rows)}))
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=f"declares {rows:,} rows"):
        next(iter_rows(str(path)))


def test_a_row_larger_than_16_mib_is_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = write(
        tmp_path / "row.parquet", pyarrow.table({"question": ["short", rng.randbytes(17 << 20).hex()[: 17 << 20]]})
    )
    rows = iter_rows(str(path))
    with pytest.raises(DataError, match="the limit is 16 MiB"):
        list(rows)


def test_every_column_type_is_read_unchanged(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "large": pyarrow.array(["x", "y", None], pyarrow.large_string()),
            "bytes": pyarrow.array([b"1", None, b"3"]),
            "messages": [[{"role": "user", "content": "hi"}], [], None],
            "struct": pyarrow.array([{"k": "v"}, None, {"k": None}]),
            "decimal": pyarrow.array([decimal.Decimal("1.5")] * 3),
            "map": pyarrow.array([[("a", "b")], [], None], pyarrow.map_(pyarrow.string(), pyarrow.string())),
            "category": pyarrow.array(["p", "q", "p"]).dictionary_encode(),
            "number": [1, 2, 3],
            "float": [1.5, None, 2.0],
            "time": [datetime.datetime(2020, 1, 1)] * 3,
            "pair": pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.int64(), 2)),
            "fixed": pyarrow.array([b"ab", b"cd", None], pyarrow.binary(2)),
            "deep": pyarrow.array([[["a"], ["b"]], [], None]),
        }
    )
    path = write(tmp_path / "kinds.parquet", table)
    assert repr([row for _, row in iter_rows(str(path))]) == repr(pyarrow.parquet.read_table(path).to_pylist())


def test_many_rows_with_one_long_prompt_are_read(tmp_path: Path) -> None:
    prompt = "You are a helpful assistant. " * 200
    table = pyarrow.table({"system": [prompt] * 20_000, "question": [f"q{i}" for i in range(20_000)]})
    path = write(tmp_path / "p.parquet", table)
    assert sum(1 for _ in iter_rows(str(path))) == 20_000
