"""An empty store for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.traces import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "page.db") as opened:
        yield opened
