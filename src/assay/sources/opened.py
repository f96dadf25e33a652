"""Records the files that a module opens for reading while it loads, and a program while it runs.

The artifact needs them as well. Uses Python's audit events `open` and `sqlite3.connect`: files that other C code opens
by itself (model files, columnar data) are not seen. Files that the clients of language models and assay itself open
inside a run are not the program's, and neither are those that were opened for writing.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from assay.support.package import FOLDER, OWN_FOLDERS

_KEYS = frozenset(
    {".pem", ".key", ".p8", ".p12", ".pfx", ".ppk", ".jks", ".keystore", ".kdbx", ".gpg", ".ovpn", ".token", ".env"}
)
_SECRET = (  # in names without their separators
    "secret", "credential", "password", "passwd", "idrsa", "idecdsa", "ided25519", "apikey", "accesskey", "privatekey",
    "sshkey", "serviceaccount", "accesstoken", "authtoken", "kubeconfig", "netrc",
)  # fmt: skip
_CLIENTS = tuple(
    os.path.join("", *parts)
    for parts in (
        (str(FOLDER), "models", ""), (str(FOLDER), "traces", ""), (str(FOLDER), "sources", "artifact_"),
        ("dspy", "clients", ""), ("litellm", ""),
    )
)  # fmt: skip
_LIBRARIES = (
    *(f"{folder}{os.sep}" for folder in OWN_FOLDERS),
    *(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")),
    "<",
)
_watching: ContextVar[str | None] = ContextVar("assay_watching", default=None)
_opened: dict[str, dict[Path, str]] = {}  # key -> absolute path -> the path as it was written
_written: set[Path] = set()
_connected: dict[Path, tuple[int, ...]] = {}  # SQLite's databases: what they were when they were first opened
_hooked = False


@contextmanager
def watching(key: str) -> Iterator[None]:
    """Inside, opened files are recorded under `key`: a module's path, or a program's name in the working directory. The
    innermost key counts."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_noticed)  # cannot be removed; returns at once while nothing is watched
    token = _watching.set(os.path.abspath(key))
    try:
        yield
    finally:
        _watching.reset(token)


def _noticed(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "sqlite3.connect") or _watching.get() is None:
        return
    if not isinstance(path := arguments[0], str | bytes | os.PathLike):
        return
    file: str | None = os.fsdecode(path)
    if event == "sqlite3.connect":
        if (file := databases_file(os.fsdecode(path))) is not None:
            _connected.setdefault(Path(os.path.abspath(file)), _state(file))
    elif _writes(*arguments[1:]):
        _written.add(Path(os.path.abspath(os.fsdecode(path))))
        return
    if file and not is_of_client():
        notice(file)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def databases_file(database: str) -> str | None:
    """File of a SQLite database by the name it is opened with, which may be a URI; None for one in memory."""
    name = database.removeprefix("file:").partition("?")[0] if database.startswith("file:") else database
    return None if name in ("", ":memory:") or "mode=memory" in database else name


def is_of_client() -> bool:
    """Whether a language model's client or assay's own records open a file now, called by the program or not."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(client in file for client in _CLIENTS):
            return True
        if "site-packages" not in file and not file.startswith(_LIBRARIES):
            return False  # the user's own code
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_written(file: Path) -> bool:
    """Whether this process opened a file for writing while it watched a program, or a database changed since."""
    return file in _written or (file in _connected and _connected[file] != _state(file))


def _state(database: str | Path) -> tuple[int, ...]:
    """Time and size of a database, and size of its log, which readers may create empty; zeros for what is missing."""
    with suppress(OSError):
        found, log = os.stat(database), Path(f"{database}-wal")
        return found.st_mtime_ns, found.st_size, log.stat().st_size if log.is_file() else 0
    return 0, 0, 0


def notice(path: str | Path) -> None:
    """Record a file under the current key, if there is one."""
    if (key := _watching.get()) is not None:
        files, file = _opened.setdefault(key, {}), Path(os.path.abspath(path))
        if file not in files or not os.path.isabs(path):
            files[file] = str(path)


def opened_for(key: str) -> dict[Path, str]:
    """Files that were opened under a key, not written by this process, and still exist, with the paths as they were
    written, in the order of opening."""
    return {
        file: path
        for file, path in list(_opened.get(os.path.abspath(key), {}).items())
        if not is_written(file) and file.is_file()
    }


def forget(key: str) -> None:
    """Forget what was opened under a key: the program is built anew."""
    for file in _opened.pop(os.path.abspath(key), {}):
        _connected.pop(file, None)


def unfit(inside: Path) -> str | None:
    """Reason why a file of a program's folder is private and not copied into an artifact; None if it may be.

    Args:
        inside: its path in the folder.
    """
    *folders, name = [re.sub(r"[\W_]", "", part.lower()) for part in inside.parts]
    if any(part.startswith(".") for part in inside.parts):
        return "hidden files are not copied"
    named = any(word in name or any(folder in (word, f"{word}s") for folder in folders) for word in _SECRET)
    if named or inside.suffix.lower() in _KEYS or inside.stem.lower() == "token":
        return "its name suggests a secret"
    return None
