"""Values that a project file has given in this process.

A project file gives the models of all roles to all commands; one that a command has no use for is no mistake.
"""

from typing import Any

__all__ = ["is_of_project", "remember"]

_read_values: set[tuple[str, str]] = set()  # name and `repr`


def remember(name: str, value: Any) -> None:
    """Remembers the value of a setting, in the form of the file or of a settings object."""
    _read_values.add((name, repr(value)))


def is_of_project(name: str, value: Any) -> bool:
    """Whether a project file has given this value of a setting in this process."""
    return (name, repr(value)) in _read_values
