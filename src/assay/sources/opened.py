"""Files that code of users opens: recorded while a module loads and a program runs, and found next to an artifact.

An artifact runs in any folder. Where the working directory has no file or folder that its code names, such as
`open("facts.txt")`, the one of the artifact's `source` is used. This holds for reading, for code of artifacts, and for
the functions of Python below; other C code that opens files by itself is not changed.
"""

import builtins
import functools
import io
import os
import re
import sqlite3
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
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


_homes: dict[str, Path] = {}  # prefix of the modules' names -> folder `source` of their artifact
_senders: dict[Path, set[str]] = {}  # folder of another machine's files -> paths there that were asked for in vain
_MOST_MISSED = 10_000
_installed = False
_lstat, _open, _access = os.lstat, os.open, os.access  # as they are before `_install`


def find_files_of(prefix: str, home: Path) -> None:
    """Code of the modules whose names start with `prefix` finds the files of `home` by relative paths."""
    _install()
    _homes[prefix] = home


def find_files_of_sender(home: Path) -> set[str]:
    """All code finds the files of another machine, which are below `home` at their paths there.

    Returns:
        Paths on the other machine that were asked for and that `home` does not have; more are added later.
    """
    _install()
    return _senders.setdefault(home, set())


def of_sender(path: str | Path) -> Path:
    """The file or folder of another machine that stands for an absolute path; the path itself if there is none."""
    path = Path(path)
    if path.is_absolute():
        for home in _senders:
            place = home / path.relative_to(path.anchor)
            with suppress(OSError):
                _lstat(place)
                return place
    return path


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    builtins.open = io.open = _or_beside(builtins.open, builtins)
    for name in ("open", "stat", "lstat", "listdir", "scandir"):
        function = getattr(os, name)
        setattr(os, name, extended := _or_beside(function, os))
        for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if function in group:
                group.add(extended)
    os.access = _accessible
    for group in (os.supports_dir_fd, os.supports_effective_ids, os.supports_follow_symlinks):
        if _access in group:
            group.add(_accessible)
    sqlite3.connect = _connecting(sqlite3.connect)


def _or_beside(function: Callable[..., Any], group: ModuleType) -> Callable[..., Any]:
    """A function of a module, for paths of artifacts too."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except FileNotFoundError:
            key = next((name for name in ("file", "path") if name in options), "")
            mode = options.get("mode", arguments[1] if len(arguments) > 1 else "r")
            flags = options.get("flags", arguments[1] if len(arguments) > 1 else 0) if function is _open else None
            writes = _writes(mode, flags)
            file = _beside(arguments[0] if arguments else options.get(key))
            if writes or options.get("dir_fd") is not None or file is None:
                raise
        return function(file, *arguments[1:], **options) if arguments else function(**{**options, key: file})

    called.__module__ = group.__name__  # where pickle finds it
    return called


@functools.wraps(_access)
def _accessible(path: Any, mode: int, *, dir_fd: int | None = None, **options: Any) -> bool:
    """`os.access`, which raises nothing for a file that does not exist."""
    if _access(path, mode, dir_fd=dir_fd, **options):
        return True
    if dir_fd is not None or _access(path, os.F_OK, **options):
        return False
    file = _beside(path)
    return file is not None and _access(file, mode, **options)


_accessible.__module__ = os.__name__  # where pickle finds it


def _connecting(connect: Callable[..., Any]) -> Callable[..., Any]:
    """SQLite creates a database that does not exist."""

    @functools.wraps(connect)
    def connected(database: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(database, str | bytes | os.PathLike):
            name = databases_file(text := os.fsdecode(database))
            if name is not None and not _access(name, os.F_OK) and (file := _beside(name)) is not None:
                database = text.replace(name, file, 1)
        return connect(database, *arguments, **options)

    return connected


def _beside(path: Any) -> Any:
    """The file or folder that stands for a path; None if there is none. An artifact's for a relative path that its code
    asks for, another machine's for an absolute one."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    if os.path.isabs(name := os.fsdecode(path)):
        file = str(of_sender(name))
        if file == name:
            _note_missed(name)
            return None
        return os.fsencode(file) if isinstance(path, bytes) else file
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        home = next((home for prefix, home in tuple(_homes.items()) if module.startswith(prefix)), None)
        if home is not None:
            file = os.path.normpath(home / name)
            if not file.startswith(f"{home}{os.sep}") or not Path(file).exists():
                break
            return os.fsencode(file) if isinstance(path, bytes) else file
        frame = frame.f_back  # type: ignore[assignment]
    _note_missed(os.path.abspath(name))
    return None


def _note_missed(path: str) -> None:
    """Notes a path that does not exist, as it is on the machine that sent the files."""
    if not _senders or is_of_client():
        return
    for home, missed in _senders.items():
        if len(missed) < _MOST_MISSED:
            inside = path.startswith(f"{home}{os.sep}")
            missed.add(os.path.join(os.sep, os.path.relpath(path, home)) if inside else path)
