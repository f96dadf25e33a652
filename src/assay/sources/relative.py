"""Files that the code of an artifact names relative to the working directory, such as `open("facts.txt")`.

An artifact runs in any folder. Where the working directory has no such file or folder, the one of the artifact's
`source` is used. This holds for reading, for code of artifacts, and for the functions of Python below; other C code
that opens files by itself is not changed.
"""

import builtins
import functools
import io
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.sources.opened import databases_file

_homes: dict[str, Path] = {}  # prefix of the modules' names -> folder `source` of their artifact


def find_files_of(prefix: str, home: Path) -> None:
    """Code of the modules whose names start with `prefix` finds the files of `home` by relative paths."""
    if not _homes:
        _install()
    _homes[prefix] = home


def _install() -> None:
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
    """The file or folder of the artifact whose code asks for a relative path; None if it has none."""
    if not isinstance(path, str | bytes | os.PathLike) or os.path.isabs(name := os.fsdecode(path)):
        return None
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        home = next((home for prefix, home in tuple(_homes.items()) if module.startswith(prefix)), None)
        if home is not None:
            file = os.path.normpath(home / name)
            if not file.startswith(f"{home}{os.sep}") or not Path(file).exists():
                return None
            return os.fsencode(file) if isinstance(path, bytes) else file
        frame = frame.f_back  # type: ignore[assignment]
    return None
