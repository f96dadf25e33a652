"""Where the store is: its URL, by argument, environment or default. Opens nothing and imports no database."""

import os
from pathlib import Path

__all__ = ["SCHEMA_VERSION", "store_file", "store_url"]

# Raised by one with every change. A column that older stores lack is added when they are opened: it is nullable, or has a server_default.
SCHEMA_VERSION = 5


def store_url(where: str | Path | None = None) -> str:
    """The database URL: the argument, else `ASSAY_STORE`, else `.assay/assay.db` in the working folder."""
    chosen = str(where or os.environ.get("ASSAY_STORE") or Path(".assay") / "assay.db")
    if "://" not in chosen:
        return f"sqlite:///{chosen}"
    return chosen.replace("postgresql://", "postgresql+psycopg://", 1)


def store_file(where: str | Path | None = None) -> Path | None:
    """The file of a SQLite store; None for a database elsewhere."""
    url = store_url(where)
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
