"""Tables of stores: created by threads and processes at once; a store of another version is refused and unchanged."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from assay.cli.main import group
from assay.errors import StoreError
from assay.traces import Store
from assay.traces.store.counts import file_stats
from assay.traces.store.location import REVISION
from assay.traces.store.tables import metadata, revisions


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    """An empty database."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url").replace("postgresql://", "postgresql+psycopg://")
    engine = sa.create_engine(url)
    _empty(engine)
    yield engine
    _empty(engine)
    engine.dispose()


def _empty(engine: sa.Engine) -> None:
    existing = sa.MetaData()
    existing.reflect(engine)
    existing.drop_all(engine)


def _url(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def _stamp(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return connection.execute(sa.select(revisions.c.version_num)).scalar()


def test_a_new_store_has_its_tables_and_their_revision(engine: sa.Engine) -> None:
    Store(_url(engine)).close()
    assert metadata.tables.keys() == set(sa.inspect(engine).get_table_names())
    assert _stamp(engine) == REVISION


FORMER = {  # statements that leave a store as another version has it
    "an older revision": ["UPDATE store_revision SET version_num = '0007'"],
    "a revision without a row": ["DELETE FROM store_revision"],
    "no revision": ["DROP TABLE store_revision"],
    "one table alone": [f"DROP TABLE {name}" for name in sorted(metadata.tables.keys() - {"runs"})],
}


@pytest.mark.parametrize("statements", FORMER.values(), ids=FORMER)
def test_a_store_of_another_version_is_refused_and_left_as_it_is(engine: sa.Engine, statements: list[str]) -> None:
    Store(_url(engine)).close()
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    before = sa.inspect(engine).get_table_names()
    for _ in range(2):
        with pytest.raises(StoreError):
            Store(_url(engine))
    assert sa.inspect(engine).get_table_names() == before
    if engine.dialect.name == "sqlite":
        assert file_stats(Path(str(engine.url.database))) is None


COMMANDS = [
    ["traces", "stats"],
    ["traces", "list"],
    ["runs", "list"],
    ["registry", "list"],
    ["index", "."],
    ["export", "sft", "--out", "rows"],
    ["evaluate", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=40", "--model", "openai/none"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_each_command_refuses_a_store_of_another_version_and_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Store("old.db").close()
    with closing(sqlite3.connect("old.db")) as db:
        db.execute("UPDATE store_revision SET version_num = '0001'")
        db.commit()
    error = CliRunner().invoke(group, [*command, "--store", "old.db"]).exception
    assert isinstance(error, StoreError)
    assert error.exit_code == 1
    assert "old.db" in str(error)
    assert "name another store" in str(error).lower()


OPENS = """
import sys, time
from assay.traces import Store
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
with Store(sys.argv[1]) as store:
    print(store.stats()["rollouts"])
"""


def _open_at_once(engine: sa.Engine, count: int) -> list[tuple[int, str, str]]:
    start = str(time.time() + 4)
    opened = [
        subprocess.Popen(
            [sys.executable, "-c", OPENS, _url(engine), start],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    outputs = [process.communicate(timeout=120) for process in opened]
    return [(process.returncode, out.strip(), err[-500:]) for process, (out, err) in zip(opened, outputs, strict=True)]


@pytest.mark.slow
def test_processes_that_create_a_store_at_once_all_succeed(engine: sa.Engine) -> None:
    assert _open_at_once(engine, 6) == [(0, "0", "")] * 6
    assert _stamp(engine) == REVISION


def test_a_new_file_that_is_locked_during_the_journal_change_is_retried(tmp_path: Path) -> None:
    """SQLite ignores the time limit for this lock: without retries 6 of 480 simultaneous openings failed."""
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE of_another_process (n)")
    other.execute("BEGIN IMMEDIATE")
    freed = threading.Timer(0.3, other.rollback)
    freed.start()
    with Store(tmp_path / "s.db") as store:
        freed.join()
        other.close()
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_threads_that_create_a_store_at_once_all_succeed(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def opened(_: int) -> int:
        with Store(tmp_path / "s.db") as store:
            return int(store.stats()["rollouts"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(opened, range(6))) == [0] * 6


KILLED = """
import os, signal, sys
import sqlalchemy as sa
from assay.traces import Store

def die(conn, cursor, statement, *_):
    if "INSERT INTO store_revision" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

sa.event.listen(sa.Engine, "before_cursor_execute", die)
Store(sys.argv[1])
"""


@pytest.mark.chaos
def test_a_creation_that_is_killed_leaves_an_empty_database(engine: sa.Engine) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, _url(engine)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sa.inspect(engine).get_table_names() == []
    with Store(_url(engine)) as store:
        assert store.stats()["rollouts"] == 0


def test_connections_of_the_pool_begin_transactions(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store, store.engine.connect() as connection:
        assert connection.connection.dbapi_connection.isolation_level == ""  # type: ignore[union-attr]
