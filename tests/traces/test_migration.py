"""Upgrades of stores: from every schema that was ever written, by threads and processes at once, killed in between."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from assay.errors import StoreError
from assay.traces import Rollout, Store
from assay.traces.store.counts import file_stats
from assay.traces.store.location import REVISION
from assay.traces.store.migration import upgrade
from assay.traces.store.tables import metadata, revisions

OLD = sorted(
    (Path(__file__).parent / "data" / "stores").glob("*.sql")
)  # what each version before revisions wrote, from the history

ONLY_POSTGRES = ("rollouts_by_prefix", "passages_by_words", "facts_by_words")  # indexes


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


def _write(engine: sa.Engine, script: Path) -> None:
    with engine.begin() as connection:
        for statement in script.read_text().rstrip().split("\n"):
            connection.exec_driver_sql(statement)


def _differences(engine: sa.Engine) -> list[Any]:
    """Between the tables in the database and those of the code, as Alembic sees them; SQLite does not enforce types."""
    options = {"version_table": "none", "compare_type": engine.dialect.name == "postgresql"}
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    return (
        [difference for difference in differences if getattr(difference[1], "name", "") not in ONLY_POSTGRES]
        if engine.dialect.name == "sqlite"
        else differences
    )


def _stamp(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return connection.execute(sa.select(revisions.c.version_num)).scalar()


@pytest.mark.parametrize("script", OLD, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_store_of_every_earlier_schema_is_upgraded_and_keeps_its_rows(engine: sa.Engine, script: Path) -> None:
    _write(engine, script)
    with Store(_url(engine)) as store:
        assert store.rollout("r1").inputs == {"q": "a"}
        assert [t.model for t in store.rollout("r1").transitions] == ["x"]
        store.put_rollout(Rollout(id="r2", seed=2**40, task_id="t" * 500))  # wider than the first columns were
        store.flush()
        assert {rollout.id for rollout in store.rollouts()} == {"r1", "r2"}
        assert store.artifacts_of("abc") == (
            [] if script.stem in ("schema_1", "schema_1_early_tools", "schema_2") else ["x"]
        )
    with engine.connect() as connection:
        meta = {row[0]: row[1] for row in connection.execute(sa.text('SELECT "key", value FROM meta'))}
    assert meta == {"salt": "pepper", "schema": "6"}  # versions without revisions refuse more than 5
    assert _differences(engine) == []
    assert _stamp(engine) == REVISION


@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_a_store_of_every_earlier_revision_is_upgraded_and_keeps_its_rows(engine: sa.Engine, revision: str) -> None:
    _write(engine, OLD[-1])
    with engine.begin() as connection:
        upgrade(connection, revision)
    assert _stamp(engine) == revision
    with Store(_url(engine)) as store:
        rollout = store.rollout("r1")
        assert (rollout.inputs, [(t.model, t.agent) for t in rollout.transitions]) == ({"q": "a"}, [("x", "")])
    assert _differences(engine) == []
    assert _stamp(engine) == REVISION


def test_a_new_store_has_the_same_tables_as_an_upgraded_one(engine: sa.Engine) -> None:
    with Store(_url(engine)):
        pass
    assert _differences(engine) == []
    assert _stamp(engine) == REVISION
    _empty(engine)
    with engine.begin() as connection:
        upgrade(connection)
    assert _differences(engine) == []
    assert _stamp(engine) == REVISION


def test_a_store_of_a_newer_revision_is_refused(engine: sa.Engine) -> None:
    Store(_url(engine)).close()
    with engine.begin() as connection:
        connection.execute(sa.update(revisions).values(version_num="0099"))
    with pytest.raises(
        StoreError, match=f"the store has revision 0099, this version of assay knows up to {REVISION}: update assay"
    ):
        Store(_url(engine))
    assert _stamp(engine) == "0099"
    if engine.dialect.name == "sqlite":
        assert file_stats(Path(str(engine.url.database))) is None


def test_a_study_in_the_same_database_keeps_its_own_revision(engine: sa.Engine) -> None:
    import optuna

    study = optuna.create_study(storage=_url(engine), study_name="s")
    with Store(_url(engine)) as store:
        assert store.stats()["rollouts"] == 0
    study.tell(study.ask(), 1.0)
    assert optuna.load_study(storage=_url(engine), study_name="s").best_value == 1.0
    assert _stamp(engine) == REVISION


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
@pytest.mark.parametrize("script", [None, OLD[0]], ids=["new", "old"])
def test_processes_that_open_a_store_at_once_all_succeed(engine: sa.Engine, script: Path | None) -> None:
    if script:
        _write(engine, script)
    assert _open_at_once(engine, 6) == [(0, "1" if script else "0", "")] * 6
    assert _differences(engine) == []
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


def test_threads_upgrade_several_stores_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    paths = [tmp_path / f"{number}.db" for number in range(6)]
    for path in paths:
        engine = sa.create_engine(f"sqlite:///{path}")
        _write(engine, OLD[0])
        engine.dispose()

    def opened(path: Path) -> int:
        with Store(path) as store:
            return int(store.stats()["rollouts"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(opened, paths)) == [1] * 6


KILLED = """
import os, signal, sys
import sqlalchemy as sa
from assay.traces import Store

def die(conn, cursor, statement, *_):
    if "DROP INDEX" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

sa.event.listen(sa.Engine, "before_cursor_execute", die)
Store(sys.argv[1])
"""


def test_an_upgrade_that_is_killed_leaves_the_store_as_it_was(engine: sa.Engine) -> None:
    _write(engine, OLD[0])
    before = sa.MetaData()
    before.reflect(engine)
    killed = subprocess.run([sys.executable, "-c", KILLED, _url(engine)], check=False)
    assert killed.returncode == -signal.SIGKILL
    after = sa.MetaData()
    after.reflect(engine)
    assert after.tables.keys() == before.tables.keys()
    assert [c.name for c in after.tables["rollouts"].columns] == [c.name for c in before.tables["rollouts"].columns]
    with Store(_url(engine)) as store:
        assert store.rollout("r1").inputs == {"q": "a"}
    assert _differences(engine) == []


def test_a_store_that_is_up_to_date_opens_without_alembic(tmp_path: Path) -> None:
    code = "import sys; from assay.traces import Store; Store(sys.argv[1]).close(); print('alembic' in sys.modules)"
    for _ in range(2):  # neither does a new one need it
        assert (
            subprocess.run(
                [sys.executable, "-c", code, str(tmp_path / "s.db")], capture_output=True, text=True, check=True
            ).stdout
            == "False\n"
        )


def test_a_store_that_is_up_to_date_is_opened_by_one_query(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    statements: list[str] = []

    def listener(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", listener)
    try:
        Store(tmp_path / "s.db").close()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    assert len(statements) == 1


def test_the_newest_revision_is_the_one_that_the_code_names() -> None:
    from alembic.script import ScriptDirectory

    import assay.traces.store.migrations

    script = ScriptDirectory(str(Path(str(assay.traces.store.migrations.__file__)).parent))
    assert script.get_heads() == [REVISION]


def test_connections_of_the_pool_begin_transactions(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store, store.engine.connect() as connection:
        assert connection.connection.dbapi_connection.isolation_level == ""  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_folder_with_special_characters_is_supported(tmp_path: Path) -> None:
    """Alembic reads its settings with `%` as a sign of interpolation; the package may be installed anywhere."""
    import assay

    package = tmp_path / "100 % söme" / "assay"
    shutil.copytree(Path(assay.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    engine = sa.create_engine(f"sqlite:///{tmp_path / 's.db'}")
    _write(engine, OLD[0])
    code = "import sys; from assay.traces import Store; Store(sys.argv[1]).close()"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s.db")],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        check=True,
    )
    with sqlite3.connect(tmp_path / "s.db") as db:
        assert db.execute("SELECT version_num FROM store_revision").fetchall() == [(REVISION,)]
