"""Addresses of databases, as users write them."""

from pathlib import Path

import psycopg.conninfo
import pytest
import sqlalchemy as sa

from assay.errors import ConfigError
from assay.support.addresses import DatabaseAddress

FILES = {
    "x.db": "x.db",
    "sqlite:///x.db": "x.db",
    "sqlite:////tmp/x.db": "/tmp/x.db",
    "what?.db": "what?.db",
    "a b#c%41.db": "a b#c%41.db",
    "folder=host=3/x.db": "folder=host=3/x.db",
}
SERVERS = {  # with what libpq is to get
    "postgresql://ann:pw@db/runs": {"user": "ann", "password": "pw", "host": "db", "dbname": "runs"},
    "postgres://db:5433/runs": {"host": "db", "port": "5433", "dbname": "runs"},
    "PostgreSQL+psycopg://ann@[::1]:5/runs": {"user": "ann", "host": "::1", "port": "5", "dbname": "runs"},
    "postgresql://ann:p%40s/s#s?x=1@db/runs": {
        "user": "ann", "password": "p@s/s#s?x=1", "host": "db", "dbname": "runs",
    },
    "postgresql://ann:pw@one:1,two,[::1]:3/runs?target_session_attrs=read-write": {
        "user": "ann", "password": "pw", "host": "one,two,::1", "port": "1,,3", "dbname": "runs",
        "target_session_attrs": "read-write",
    },
    "postgresql:///runs?host=/run/postgresql&user=ann&password=pw": {
        "user": "ann", "password": "pw", "host": "/run/postgresql", "dbname": "runs",
    },
    "postgresql://ann:pw@%2Frun%2Fpostgresql/runs": {
        "user": "ann", "password": "pw", "host": "/run/postgresql", "dbname": "runs",
    },
    "postgresql://%2Frun,two:2/runs": {"host": "/run,two", "port": ",2", "dbname": "runs"},
    "postgresql://db/runs?user=bob&password=p+w%2B&user=ann": {
        "user": "ann", "password": "p+w+", "host": "db", "dbname": "runs",
    },
}  # fmt: skip
REFUSED = [
    "", ":memory:", "sqlite://", "sqlite://x.db", "sqlite:///x.db?mode=ro", "sqlite+aiosqlite:///x.db", "file:x.db",
    "mysql://ann:pa55@db/runs", "postgresql+asyncpg://ann:pa55@db/runs", "postgresql+psycopg2://ann:pa55@db/runs",
    "journal:///x.log", "redis://db", "https://db/x", "://pa55", "postgresql:pa55", "host=db password=pa55",
    "dbname=runs password=pa55", "postgresql://ann:p@pa55@db/runs", "postgresql://ann:pw@db:pa55/runs",
    "postgresql://ann:pw@d b/runs", "postgresql://db/runs?pa55",
    "ann:pa55@db/runs", "//ann:pa55@db/runs", "user=ann password=pa55", "password=pa55 port=1",
    "postgresql://ann%3Apa55@db/runs", "postgresql://db/runs?user=ann&password=p@pa55",
    "postgresql://db/runs?user=ann&password=pa55@", "postgresql://db:5432/runs?password=p@pa55",
    "postgresql://ann:/pa55", "postgresql://ann:pw@db:/pa55", "postgresql://db/ann:pa55", "postgresql://one:1,ann:/pa55",
    "postgresql://db/runs?password=p&pa55=&user=ann", "postgresql://db/runs?user=ann&password=p&s=pa55",
    "postgresql://ann:%00pa55@db/runs", "PGPASSWORD=pa55 psql", "Server=db;User Id=ann;Password=pa55;",
]  # fmt: skip


@pytest.mark.parametrize("text", FILES)
def test_the_file_of_an_address(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = DatabaseAddress.of(text)
    assert (address.shown, address.file, address.secret) == (FILES[text], Path(FILES[text]), False)
    assert DatabaseAddress.of(address.url).url == address.url
    if not text.endswith("/x.db") or "://" in text:
        with sa.create_engine(DatabaseAddress.of(text.replace("/tmp", str(tmp_path))).url).begin() as connection:
            connection.exec_driver_sql("CREATE TABLE t (x)")
        assert [Path(FILES[text]).name] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("text", SERVERS)
def test_the_server_of_an_address(text: str) -> None:
    address = DatabaseAddress.of(text)
    assert psycopg.conninfo.conninfo_to_dict(address.conninfo) == SERVERS[text]
    engine = sa.create_engine(address.url)
    (arguments, options), wanted = engine.dialect.create_connect_args(engine.url), SERVERS[text]
    assert not arguments
    assert {name: str(value) for name, value in options.items() if name != "context"} == wanted
    assert address.secret == ("password" in wanted)
    assert DatabaseAddress.of(address.url).url == address.url
    without = psycopg.conninfo.conninfo_to_dict(address.shown)
    assert without == {name: value for name, value in wanted.items() if name != "password"}


@pytest.mark.parametrize("text", REFUSED)
def test_other_addresses_are_refused_without_a_part_of_a_password(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DatabaseAddress.of(text, "store")
    assert str(refused.value).startswith("store: ")
    assert "pa55" not in str(refused.value)


@pytest.mark.parametrize(
    "secret", ["Password=pa55", "pwd=pa55", "scram_client_key=pa55", "oauth_client_secret=pa55",
               "options=-c%20app.password%3Dpa55", "user=ann;password=pa55"],
)  # fmt: skip
def test_secrets_among_the_parameters_are_not_shown(secret: str) -> None:
    address = DatabaseAddress.of(f"postgresql://db/runs?{secret}&sslkey=key.pem")
    assert (address.shown, address.secret) == ("postgresql://db/runs?sslkey=key.pem", True)
    assert "pa55" in address.url
