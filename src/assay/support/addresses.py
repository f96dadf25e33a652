"""Addresses of databases: a file of SQLite, or PostgreSQL servers. Does not open them or import a driver."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode

from assay.errors import ConfigError
from assay.support.scrubbing import add_secrets

_SUPPORTED = "Name a file of SQLite (FILE, sqlite:///FILE) or PostgreSQL (postgresql://USER:PASSWORD@HOST:PORT/NAME)"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]+)(?:\+([A-Za-z0-9_-]+))?:(//)?")
_OTHER_FORMS = re.compile(
    r"(postgres|postgresql|sqlite|mysql|file):"  # a URL without slashes
    r"|(.*\s)?(host|hostaddr|port|dbname|user|password|passfile|service)\s*="  # parameters of libpq
    r"|(?![A-Za-z]:[\\/]).*:.*@"  # a login without a scheme
    r"|.*(pass(?!file)|pwd|secret|token)\w*\s*=",  # parameters of another program
    re.I | re.S,
)
_SERVER = re.compile(r"(?:(?P<who>[^@]*)@)?(?P<hosts>[^/?@]*)(?:/(?P<name>[^?@:]*))?(?:\?(?P<query>[^@]*))?", re.S)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.~%-]*)(?::([0-9]+))?")  # a colon alone may end a login
_SECRET = re.compile(r"pass(?!file)|pwd|secret|_key|token", re.I)  # in the name of a parameter
_SETS_SECRET = re.compile(r"(pass|pwd|secret|token)\w*\s*=", re.I)  # in its value, as in options
_KNOWN = re.compile(  # parameters of libpq
    r"host(addr)?|port|dbname|user|service|client_encoding|options|(fallback_)?application_name|passfile|replication"
    r"|connect_timeout|tcp_user_timeout|target_session_attrs|load_balance_hosts|channel_binding|require(peer|_auth)"
    r"|(keepalives|ssl|gss|oauth_|m(in|ax)_protocol)\w*|krbsrvname"
)


@dataclass(frozen=True)
class DatabaseAddress:
    """Where a database is.

    Attributes:
        shown: for messages, reports and stored settings: the file, or the URL of the server without its password.
        url: as SQLAlchemy reads it.
        conninfo: of a server, as libpq reads it; empty for a file.
        file: of SQLite; None for a server.
        secret: whether `url` has a password.
    """

    shown: str
    url: str
    conninfo: str = ""
    file: Path | None = None
    secret: bool = False

    @classmethod
    def of(cls, text: str, field: str = "") -> "DatabaseAddress":
        """Reads an address: the name of a file, or a URL. No message shows a part of what it could not read.

        Args:
            field: the setting that has it, for messages.
        Raises:
            ConfigError: it is neither, or of another kind of database.
        """
        scheme = _SCHEME.match(text)
        try:
            if scheme is None or not scheme[3]:
                return _file(text)
            kind, driver, rest = scheme[1].lower(), scheme[2], text[scheme.end() :]
            if kind not in ("sqlite", "postgresql", "postgres"):
                raise ConfigError(f"{kind}:// is no database that assay uses", hint=_SUPPORTED)
            if driver is not None and (kind, driver) not in (("postgresql", "psycopg"), ("postgres", "psycopg")):
                raise ConfigError(f"the driver {driver} is not used", hint=f"Leave it out: {kind}://…")
            return _file_of_url(rest) if kind == "sqlite" else _server(rest)
        except ConfigError as error:
            error.field = field
            raise

    def __str__(self) -> str:
        return self.shown if self.file is None else f"the SQLite file {self.shown}"

    @property
    def exists(self) -> bool:
        """Whether the file exists. A server counts as existing."""
        return self.file is None or self.file.is_file()


def _file(name: str) -> DatabaseAddress:
    if "://" in name or _OTHER_FORMS.match(name):
        raise ConfigError("it is neither a file's name nor a URL", hint=_SUPPORTED)
    if name in ("", ":memory:"):
        raise ConfigError("a database in memory ends with its process", hint="Name a file")
    return DatabaseAddress(shown=name, url=_url_of(name), file=Path(name))


def _url_of(name: str) -> str:
    if not {"?", "%"} & set(name):
        return f"sqlite:///{name}"
    import sqlalchemy as sa

    url = sa.URL.create("sqlite", database=name).render_as_string()
    if sa.make_url(url).database != name:
        raise ConfigError("SQLAlchemy 2.0 reads no ? in a file's name", hint="Install version 2.1, or rename the file")
    return url


def _file_of_url(rest: str) -> DatabaseAddress:
    if not rest.startswith("/") or "?" in rest:
        raise ConfigError(
            "the URL of SQLite names no file, or has parameters",
            hint="Write sqlite:///FILE, or sqlite:////PATH/FILE from the root",
        )
    return _file(unquote(rest[1:]))


def _server(rest: str) -> DatabaseAddress:
    parts = _SERVER.fullmatch(rest)
    hosts = [_HOST.fullmatch(host) for host in parts["hosts"].split(",")] if parts else []
    who = (parts["who"] or "") if parts else ""
    try:  # as libpq, which takes a + as it is, and the last of two values
        text = (parts["query"] or "").replace("+", "%2B") if parts else ""
        query = list(dict(parse_qsl(text, keep_blank_values=True, strict_parsing=True)).items())
    except ValueError:
        query = None
    places = [tuple(map(unquote, host.groups(default=""))) for host in hosts if host is not None]
    # with an @ in the value of a parameter, what precedes it looks like a login
    is_login = not {"/", "?"} & set(who.partition(":")[0]) and not _SETS_SECRET.search(who)
    is_readable = is_login and query is not None and not _is_cut(query) and "%00" not in rest
    if parts is None or query is None or len(places) < len(hosts) or not is_readable:
        raise ConfigError(
            "the URL of PostgreSQL cannot be read",
            hint="In user and password, write characters other than letters and digits as % and their code: "
            "@ as %40, / as %2F, : as %3A, ? as %3F, & as %26. It is postgresql://USER:PASSWORD@HOST:PORT/NAME",
        )
    user, _, password = map(unquote, who.partition(":"))
    if ":" in user:
        raise ConfigError(
            "the user's name has a colon", hint="Write the : between user and password as it is, not as %3A"
        )
    hidden = [(name, value) for name, value in query if _SECRET.search(name) or _SETS_SECRET.search(value)]
    secrets = [password, *(value for _, value in hidden)]
    add_secrets(*secrets)
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    at, at_shown = "@" if login else "", "@" if user else ""
    end, public = f"/{parts['name'] or ''}", [parameter for parameter in query if parameter not in hidden]
    names, ports = (",".join(values) for values in zip(*places, strict=True))
    several = [("host", names.replace("[", "").replace("]", "")), *([("port", ports)] if ports else [])]
    # SQLAlchemy takes one host in the URL, as it is written; several, and a folder of sockets, as a parameter
    is_plain = len(places) == 1 and "%" not in parts["hosts"]
    places_text, parameters = (parts["hosts"], query) if is_plain else ("", [*several, *query])
    return DatabaseAddress(
        shown=f"postgresql://{quote(user, safe='')}{at_shown}{parts['hosts']}{end}{_as_query(public)}",
        url=f"postgresql+psycopg://{login}{at}{places_text}{end}{_as_query(parameters)}",
        conninfo=f"postgresql://{login}{at}{parts['hosts']}{end}{_as_query(query)}",
        secret=any(secrets),
    )


def _is_cut(query: Sequence[tuple[str, str]]) -> bool:
    """Whether a parameter may be the rest of a password with an & in it."""
    names = dropwhile(lambda name: not _SECRET.search(name), (name for name, _ in query))
    return not all(_SECRET.search(name) or _KNOWN.fullmatch(name) for name in names)


def _as_query(parameters: Sequence[tuple[str, str]]) -> str:
    return f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
