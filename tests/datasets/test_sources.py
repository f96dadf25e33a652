"""Rows of CSV files."""

import csv
from pathlib import Path

import pytest

from assay.datasets.sources import iter_rows


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_column_separator_is_found_in_the_header(tmp_path: Path, separator: str) -> None:
    rows = [["text", "intent"], [f"a{separator}b, c; d", "bug"]]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    assert [row for _, row in iter_rows(str(tmp_path / "data.csv"))] == [
        {"text": f"a{separator}b, c; d", "intent": "bug"}
    ]
