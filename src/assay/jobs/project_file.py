"""The project file: where it is, and which values it has given.

It gives the models of all roles to all commands; one that a command has no use for is not a mistake.
"""

from pathlib import Path
from typing import Any

FILE = "assay.toml"
_read_values: set[tuple[Path, str, str]] = set()  # file, name and `repr`


def remember(path: Path, name: str, value: Any) -> None:
    """Remembers a value of a project file, in the form of the file or of a settings object."""
    _read_values.add((path, name, repr(value)))


def is_of_project(name: str, value: Any) -> bool:
    """Whether the project file of the working directory, if it was read, has given this value of a setting."""
    return (path := find_project()) is not None and (path, name, repr(value)) in _read_values


def find_project(folder: str | Path = ".") -> Path | None:
    """The project file of a folder: in it, or in the nearest folder above it."""
    start = Path(folder).resolve()
    return next((place / FILE for place in (start, *start.parents) if (place / FILE).is_file()), None)
