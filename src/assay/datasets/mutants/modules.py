"""Source files that a `mutants:` spec names: a module or package by name, a file, a folder, or the standard library.

Nothing is imported: a package is found on the path, its modules are files below it.
"""

import importlib.machinery
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from assay.errors import DataError

__all__ = ["STANDARD_LIBRARY", "module_files"]

STANDARD_LIBRARY = "stdlib"
_MOST_BYTES = 500_000
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "site-packages", "pydoc_data"}


def module_files(name: str) -> list[tuple[str, Path]]:
    """(name for descriptions, file), sorted.

    Args:
        name: a module or package such as `textwrap` or `json`, `path/to/file.py`, a folder, or `stdlib`.
    Raises:
        DataError: there is no such file, or the module has no Python source.
    """
    if not name:
        raise DataError(
            "mutants: needs a module, a package, a file or a folder: mutants:textwrap, mutants:src/tools.py"
        )
    if name == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(sys.stdlib_module_names - {"antigravity", "this"})
        return [file for module in names for file in _below(root, module)]
    path = Path(name)
    if path.is_dir():
        return [(str(file.relative_to(path.parent)), file) for file in _files(path)]
    if path.suffix == ".py" or "/" in name:
        if not path.is_file():
            raise DataError(f"mutants: no such file: {path}")
        return [(path.name, path)]
    return _by_name(name)


def _by_name(name: str) -> list[tuple[str, Path]]:
    """Files of a module or package. Only its place is looked up; importing a parent package would run it."""
    places: list[str] | None = sys.path
    spec = None
    for depth, _ in enumerate(name.split(".")):
        full = ".".join(name.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(full, places)
        if spec is None:
            raise DataError(
                f"mutants: there is no module {full!r} with Python source; name a module, a file or a folder"
            )
        places = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        return [(f"{name}/{file.relative_to(root)}", file) for file in _files(root)]
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise DataError(f"mutants: the module {name!r} has no Python source ({spec.origin}); name another one")
    return [(name, Path(spec.origin))]


def _below(root: Path, module: str) -> Iterator[tuple[str, Path]]:
    if (file := root / f"{module}.py").is_file():
        yield module, file
    elif (root / module).is_dir() and module not in _SKIPPED:
        yield from ((str(file.relative_to(root)), file) for file in _files(root / module))


def _files(root: Path) -> list[Path]:
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if not _SKIPPED & set(file.relative_to(root.parent).parts) and file.stat().st_size <= _MOST_BYTES
    ]
