"""Files that a module opens for reading while it is loaded, and a program while a preflight runs it: its artifact needs them as well.

Noticed by Python's audit event `open`, so that files which C code opens by itself (databases, model files) are not seen.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

__all__ = ["notice", "opened_for", "unfit", "watching"]

_MOST_BYTES = 5_000_000  # of one file
_DATABASES = frozenset({".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb", ".db-wal", ".db-shm", ".db-journal"})
_WEIGHTS = frozenset({".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".ckpt"})
_KEYS = frozenset({".pem", ".key", ".p12", ".pfx", ".token", ".env"})
_SECRET = ("secret", "credential", "password", "passwd", "id_rsa", "id_ed25519", "apikey", "api_key")
_watching: ContextVar[str | None] = ContextVar("assay_watching", default=None)
_opened: dict[str, dict[Path, None]] = {}
_hooked = False


@contextmanager
def watching(key: str) -> Iterator[None]:
    """Notes files under a key while it is open: a module's path, or a program's name. The innermost one counts."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_noticed)  # cannot be removed: it returns at once where nothing is watched
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
    """Notes a file under the key that is open, if any."""
    if (key := _watching.get()) is not None:
        _opened.setdefault(key, {})[Path(os.path.abspath(path))] = None


def opened_for(key: str) -> list[Path]:
    """What was opened under a key and is a file still, in the order of opening."""
    return [path for path in list(_opened.get(key, ())) if path.is_file()]


def unfit(path: Path, folder: Path) -> str | None:
    """Why a file of a program's folder is not copied into an artifact; None where it may be."""
    inside, name = path.relative_to(folder), path.name.lower()
    if any(part.startswith(".") for part in inside.parts):
        return "hidden files are not copied"
    if path.suffix.lower() in _KEYS or any(word in name for word in _SECRET) or path.stem.lower() == "token":
        return "its name is that of a secret"
    if path.suffix.lower() in _DATABASES:
        return "databases are not copied"
    if path.suffix.lower() in _WEIGHTS:
        return "weights are not copied"
    if (size := path.stat().st_size) > _MOST_BYTES:
        return f"it has {size / 1e6:.0f} MB, and at most {_MOST_BYTES / 1e6:.0f} are copied unasked"
    return None
