"""Rows that a server does not take for a while, and where they are found again."""

import fcntl
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from assay.errors import StoreError
from assay.support.addresses import DatabaseAddress
from assay.traces import Rollout, Store
from tests.rigs.command_line import assay_command

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def as_owner(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(DatabaseAddress.of(url).conninfo, autocommit=True) as connection:
        yield connection


def left_behind(store: Store, count: int) -> None:
    """Puts rollouts into a store that does not take them, and closes it."""
    for number in range(count):
        store.put_rollout(Rollout(id=f"waits-{number}"))
    assert not store.written(1.5)
    with pytest.raises(Exception, match="wait in"):
        store.close(0.1)
    assert (store.left, store.dropped) == (count, 0)
    end = time.monotonic() + 30
    with store.spill.path.open("rb") as file:
        while time.monotonic() < end:  # the thread that writes may still have the file on a busy machine
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)
    raise TimeoutError(store.spill.path)


def cut_off(connection: psycopg.Connection, database: str) -> None:
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
        [database],
    )


def test_rows_wait_while_a_server_is_read_only(empty_postgres_url: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(DatabaseAddress.of(empty_postgres_url).conninfo)["dbname"]
    store = Store(empty_postgres_url)
    with as_owner(empty_postgres_url) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        cut_off(connection, str(name))
        left_behind(store, 3)
        told = assay_command("traces", "stats", "--store", empty_postgres_url, "--json")
        assert told.report["rows_waiting"] == 3
        assert "3 rows of other processes wait" in told.stderr
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
    told = assay_command("traces", "stats", "--store", empty_postgres_url, "--json")
    assert told.report["rollouts"] == 3
    assert "rows_waiting" not in told.report
    assert "3 rows that earlier processes could not write are in the store now" in told.stderr


@pytest.mark.parametrize("rights", ["INSERT, UPDATE ON rollouts", "USAGE ON SCHEMA public"])
def test_rows_wait_while_rights_are_away_and_are_found_by_another_address_and_password(
    empty_postgres_url: str, rights: str
) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(DatabaseAddress.of(empty_postgres_url).conninfo)
    Store(empty_postgres_url).close()
    role = f"writer_{secrets.token_hex(4)}"
    with as_owner(empty_postgres_url) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'first'")
        end = f"/{parts['dbname']}?host={parts['host']}"
        with pytest.raises(StoreError, match="permission denied"):
            Store(f"postgresql://{role}:first@{end}")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        connection.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
        connection.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        store = Store(f"postgresql://{role}:first@{end}")
        connection.execute(f"REVOKE {rights} FROM {role}")
        left_behind(store, 2)
        connection.execute(f"GRANT {rights} TO {role}")
        connection.execute(f"ALTER ROLE {role} PASSWORD 'second'")
        with Store(f"postgres://{role}:second@{end}/") as found:
            assert found.stats()["rollouts"] == 2
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")


def test_rows_of_a_file_are_found_by_another_name_of_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    store = Store("data/s[1].db")
    with sqlite3.connect("data/s[1].db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        left_behind(store, 2)
    other.close()
    Path("link.db").symlink_to("data/s[1].db")
    with Store("link.db") as found:
        assert found.stats()["rollouts"] == 2
