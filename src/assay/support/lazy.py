"""Public names of a package that load on first use (PEP 562): importing one name does not import the whole package."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from assay.support.dspy_versions import loaded


def attach(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package's `__init__`.

    Args:
        package: its `__name__`.
        modules: module, relative to the package or beginning with `assay.` -> names of its public objects, separated by
            spaces.
    """
    where = {
        name: module if module.startswith("assay.") else f"{package}.{module}"
        for module, names in modules.items()
        for name in names.split()
    }

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(loaded(where[name]), name)
        setattr(sys.modules[package], name, value)  # later accesses do not call this function
        return value

    return get, lambda: sorted(where)
