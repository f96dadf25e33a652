"""Records the files that a module opens for reading while it loads, and a program while the preflight runs it.

The artifact needs them as well. Uses Python's audit event `open`: files that C code opens by itself (databases, model
files) are not seen.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

__all__ = ["notice", "opened_for", "unfit", "watching"]

_MOST_BYTES = 5_000_000  # bytes of one file
_DATABASES = frozenset({".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb", ".db-wal", ".db-shm", ".db-journal"})
_WEIGHTS = frozenset({".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".ckpt"})
_KEYS = frozenset({".pem", ".key", ".p12", ".pfx", ".token", ".env"})
_SECRET = ("secret", "credential", "password", "passwd", "id_rsa", "id_ed25519", "apikey", "api_key")
_watching: ContextVar[str | None] = ContextVar("assay_watching", default=None)
_opened: dict[str, dict[Path, None]] = {}
_hooked = False


@contextmanager
def watching(key: str) -> Iterator[None]:
    """Inside, opened files are recorded under `key`: a module's path, or a program's name. The innermost key counts."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_noticed)  # cannot be removed; returns at once while nothing is watched
    token = _watching.set(key)
    try:
        yield
    finally:
        _watching.reset(token)


def _noticed(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _watching.get() is None:
        return
    path, mode, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike) or (isinstance(mode, str) and set(mode) & set("wax+")):
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        return
    notice(os.fsdecode(path))


def notice(path: str | Path) -> None:
    """Record a file under the current key, if there is one."""
    if (key := _watching.get()) is not None:
        _opened.setdefault(key, {})[Path(os.path.abspath(path))] = None


def opened_for(key: str) -> list[Path]:
    """Files that were opened under a key and still exist, in the order of opening."""
    return [path for path in list(_opened.get(key, ())) if path.is_file()]


def unfit(path: Path, folder: Path) -> str | None:
    """Reason why a file of a program's folder is not copied into an artifact; None if it may be."""
    inside, name = path.relative_to(folder), path.name.lower()
    if any(part.startswith(".") for part in inside.parts):
        return "hidden files are not copied"
    if path.suffix.lower() in _KEYS or any(word in name for word in _SECRET) or path.stem.lower() == "token":
        return "its name suggests a secret"
    if path.suffix.lower() in _DATABASES:
        return "databases are not copied"
    if path.suffix.lower() in _WEIGHTS:
        return "weights are not copied"
    if (size := path.stat().st_size) > _MOST_BYTES:
        return f"it has {size / 1e6:.0f} MB; files above {_MOST_BYTES / 1e6:.0f} MB are not copied by default"
    return None
