"""Checks which objects a program name in an artifact may refer to, before anything is imported or instantiated.

Does not build programs: `assay.programs.restore_program` does.
"""

import inspect
import sys
from collections.abc import Collection
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ArtifactError
from assay.judges import Judge, ListwiseJudge
from assay.programs.loading import SHIPPED
from assay.sources.files import is_user_file


def check_name(name: str, *, travelling: Collection[str], home: Path) -> None:
    """Refuses names of code that is neither installed nor in the artifact. Imports nothing.

    Args:
        name: of a program or judge, as `package.module:NAME` or `file.py:NAME`.
        travelling: names whose source is in the artifact.
        home: the folder of that source; files below it are the artifact's own.
    Raises:
        ArtifactError: it is neither.
    """
    if name in SHIPPED or name in SHIPPED.values() or name in travelling:
        return
    module, colon, attribute = name.rpartition(":")
    if module.endswith(".py"):
        if Path(module).resolve().is_relative_to(home.resolve()):
            return
        raise ArtifactError(
            f"it names {name!r}, a file outside of it: an artifact runs its own source files and installed packages"
        )
    parts = module.split(".")
    if not colon or not attribute or not all(part.isidentifier() for part in parts):
        raise ArtifactError(f"it names {name!r}, which is neither a shipped program nor package.module:NAME")
    if module == "__main__":  # what the user runs, loaded already
        return
    if parts[0] in sys.stdlib_module_names:
        raise ArtifactError(
            f"it names {name!r} of the standard library: only dspy.Module and BaseAgent classes are built"
        )
    if "__main__" in parts:
        raise ArtifactError(f"it names {name!r}, which is a command: importing it could run it")
    if not _is_installed(parts):
        raise ArtifactError(
            f"it names {name!r}, and {module} is neither an installed package nor in the artifact: "
            "install it, or compile again"
        )


def _is_installed(parts: list[str]) -> bool:
    """Whether Python finds a module in an installed package. Searches for files and imports none of its parents."""
    places: list[str] | None = None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), places)
        if spec is None:
            return False
        if spec.origin is not None and is_user_file(Path(spec.origin)):
            return False  # a file of the working directory or of the user's own: it would have come with the artifact
        places = list(spec.submodule_search_locations or [])
    return spec is not None and spec.origin is not None


def check_program(name: str, target: Any, *, travels: bool, judge: bool) -> None:
    """Raises unless the target is a program: a `dspy.Module`, or a class of one or of an agent.

    Args:
        target: the object of this name.
        travels: its source is in the artifact, which was trusted; then it may also be a function,
            a method or a partial that is defined there.
        judge: it must be a judge.
    Raises:
        ArtifactError: it is not a program.
    """
    kinds = (Judge, ListwiseJudge) if judge else (dspy.Module,)
    kind = target if isinstance(target, type) else type(target)
    if issubclass(kind, kinds):
        return
    agent = isinstance(target, type) and all(
        callable(getattr(target, part, None)) for part in ("execute", "set_parameters")
    )
    factory = inspect.isfunction(target) or inspect.ismethod(target) or isinstance(target, partial)
    if not judge and (agent or (travels and factory)):
        return
    actual = f"the class {kind.__qualname__}" if isinstance(target, type) else f"a {kind.__name__}"
    expected = "a judge" if judge else "a dspy.Module, or a class of one or of a BaseAgent"
    raise ArtifactError(f"its program {name!r} is {actual}, not {expected}: nothing else is built from an artifact")
