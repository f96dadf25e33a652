"""Location of the store: its URL by argument, environment or default. Does not open it or import a driver."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def store_url(where: str | Path | None = None) -> str:
    """The database URL: the argument, else `default_store`, else `ASSAY_STORE`, else `.assay/assay.db` in the working
    folder."""
    chosen = str(where or _default or os.environ.get("ASSAY_STORE") or Path(".assay") / "assay.db")
    if "://" not in chosen:
        return f"sqlite:///{chosen}"
    return chosen.replace("postgresql://", "postgresql+psycopg://", 1)


def store_file(where: str | Path | None = None) -> Path | None:
    """The file of a SQLite store. None for other databases."""
    url = store_url(where)
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
