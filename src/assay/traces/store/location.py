"""Location of the store: its URL by argument, environment or default. Does not open it or import a driver."""

import os
from pathlib import Path

__all__ = ["REVISION", "store_file", "store_url"]

REVISION = "0006"  # the newest in `migrations/versions`; read without importing Alembic


def store_url(where: str | Path | None = None) -> str:
    """The database URL: the argument, else `ASSAY_STORE`, else `.assay/assay.db` in the working folder."""
    chosen = str(where or os.environ.get("ASSAY_STORE") or Path(".assay") / "assay.db")
    if "://" not in chosen:
        return f"sqlite:///{chosen}"
    return chosen.replace("postgresql://", "postgresql+psycopg://", 1)


def store_file(where: str | Path | None = None) -> Path | None:
    """The file of a SQLite store. None for other databases."""
    url = store_url(where)
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
