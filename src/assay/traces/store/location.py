"""Location of the store: its address by argument, environment or default. Does not open it or import a driver."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.support.addresses import DatabaseAddress

# A hash of the definitions in `tables.py`, without comments and white space: any change of a table makes another
# revision, and is known without importing SQLAlchemy.
REVISION = hashlib.sha256(
    re.sub(r"#.*|\s", "", Path(__file__).with_name("tables.py").read_text(encoding="utf-8")).encode()
).hexdigest()[:12]
_default: str | None = None  # not in the environment: child processes must not get a URL with a password


@contextmanager
def default_store(where: str) -> Iterator[None]:
    """Inside, `where` is the store wherever none is named, in all threads of this process."""
    global _default
    before, _default = _default, where
    try:
        yield
    finally:
        _default = before


def store_address(where: str | Path | None = None) -> DatabaseAddress:
    """The address of the store: the argument, else `default_store`, else `ASSAY_STORE`, else `.assay/assay.db` in the
    working folder.

    Raises:
        ConfigError: it is not an address of SQLite or PostgreSQL.
    """
    named, variable = where or _default, os.environ.get("ASSAY_STORE")
    text = str(named or variable or Path(".assay") / "assay.db")
    return DatabaseAddress.of(text, "store" if named or not variable else "ASSAY_STORE")


def home_of(where: str | Path | None = None) -> Path:
    """The folder of runs, cache and artifacts: that of the SQLite file, or `.assay` if the store is a server."""
    file = store_address(where).file
    return Path(".assay") if file is None else file.parent
