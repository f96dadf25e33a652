"""Files that code names by a path at which they are not: relative ones of artifacts, absolute ones of another machine.

An artifact runs in any folder. Where the working directory has no such file or folder as `open("facts.txt")` names, the
one of the artifact's `source` is used. A job that another machine sent has its files below a folder
(`assay.sources.shipping`): where this machine has no file of an absolute path, the one below the folder is used. Both
hold for reading, and for the functions of Python below; other C code that opens files by itself is not changed.
"""

import builtins
import functools
import io
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.sources.opened import databases_file, is_of_client

_homes: dict[str, Path] = {}  # prefix of the modules' names -> folder `source` of their artifact
_senders: dict[Path, set[str]] = {}  # folder of another machine's files -> paths there that were asked for in vain
_MOST_MISSED = 10_000
_installed = False
_lstat = os.lstat  # as it is before `_install`


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
    for name in ("stat", "lstat", "listdir", "scandir"):
        function = getattr(os, name)
        setattr(os, name, extended := _or_beside(function, os))
        for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if function in group:
                group.add(extended)
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
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            file = _beside(arguments[0] if arguments else options.get(key))
            if writes or options.get("dir_fd") is not None or file is None:
                raise
        return function(file, *arguments[1:], **options) if arguments else function(**{**options, key: file})

    called.__module__ = group.__name__  # where pickle finds it
    return called


def _connecting(connect: Callable[..., Any]) -> Callable[..., Any]:
    """SQLite creates a database that does not exist."""

    @functools.wraps(connect)
    def connected(database: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(database, str | bytes | os.PathLike):
            name = databases_file(text := os.fsdecode(database))
            if name is not None and not os.access(name, os.F_OK) and (file := _beside(name)) is not None:
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
