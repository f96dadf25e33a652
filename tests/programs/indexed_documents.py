"""A folder of documents, an index of it on both databases, and its rows."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assay.programs import DocumentIndex
from assay.support.addresses import DatabaseAddress
from assay.traces.store.connection import open_engine
from assay.traces.store.tables import metadata


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store."""
    if request.param == "sqlite":
        yield str(tmp_path / "s.db")
        return
    address = request.getfixturevalue("postgres_url").replace("postgresql://", "postgresql+psycopg://")
    engine = sa.create_engine(address)
    metadata.drop_all(engine)
    yield address
    metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    place = tmp_path / "docs"
    (place / "sub").mkdir(parents=True)
    (place / "pump.md").write_text("# Pumps\n\nThe pumps of Marlow station lift 420 litres a second.\n")
    (place / "sub" / "gate.txt").write_text("The gate of Hollin lock is opened by a hand wheel.\n")
    old = time.time() - 60
    for file in place.rglob("*.*"):
        os.utime(file, (old, old))
    return place


def rows(url: str) -> tuple[int, ...]:
    """Rows of documents and passages."""
    engine = open_engine(DatabaseAddress.of(url))
    with engine.connect() as connection:
        sizes = tuple(
            connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in ("documents", "passages", "passage_vectors")
        )
    engine.dispose()
    return sizes


def sources(url: str, query: str, **options: Any) -> list[str]:
    return [passage.source for passage in DocumentIndex(url, **options).search(query)]
