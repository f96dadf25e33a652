"""Errors of imports in the user's words: without the private names of modules, and with the nearest name that exists.

Imports nothing that was not imported before.
"""

import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

from assay.sources.modules import PREFIX, NoSuchFile
from assay.support.names import nearest

_PRIVATE = re.compile(rf"{PREFIX}[0-9a-f]{{8}}(?:_\d+)?\.")

_MOST_NAMES = 20  # of a module, in a message


def public(text: str) -> str:
    """A text without the private packages of modules from files: `assay_source_1a2b3c4d.mine` becomes `mine`."""
    return _PRIVATE.sub("", text)


def why_not_imported(name: str, error: Exception, *, folder: Path | None = None) -> str:
    """The end of a message about `file.py:NAME` or `package.module:NAME` that could not be imported.

    Args:
        error: what `assay.sources.modules.attribute_of` raised.
        folder: folder that file names are relative to; None: the working directory.
    """
    place, _, attribute = name.rpartition(":")
    text = f"cannot be imported: {type(error).__name__}: {public(str(error))}"
    if isinstance(error, NoSuchFile):
        path = (folder or Path()) / place
        files = [file.name for file in path.parent.glob("*.py")]
        near = nearest(path.name, files)
        return f"does not exist: no such file: {path}{_hint(near and f'{Path(place).with_name(near)}:{attribute}')}"
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.name in attribute.split("."):
        names = [key for key, value in vars(error.obj).items() if callable(value) and not key.startswith("_")]
        near = nearest(error.name, names)
        hint = _hint(f"{place}:{near}") if near else f"; it has {', '.join(names[:_MOST_NAMES]) or 'no functions'}"
        return f"does not exist: {place} has no {error.name!r}{hint}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None and place.startswith(public(error.name)):
        return f"{text}{_hint((near := _near_module(place)) and f'{near}:{attribute}')}"
    return text


def _hint(near: str | None) -> str:
    return f". Did you mean {near!r}?" if near else ""


def _near_module(place: str) -> str | None:
    """A module next to one that does not exist, with a similar name."""
    package, _, last = place.rpartition(".")
    if package and package not in sys.modules:
        return None
    folders = sys.modules[package].__path__ if package else [str(Path.cwd())]
    near = nearest(last, [module.name for module in pkgutil.iter_modules(folders)])
    return near and (f"{package}.{near}" if package else near)
