"""What loads on first use: public names of a package (PEP 562), and DSPy, of which the version is checked then.

Importing one name does not import the whole package.
"""

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from assay.errors import ConfigError

_OLDEST, _UNTESTED, _REFUSED = (3, 4, 1), (3, 5), (3, 6)
RESTS_ON_STUB = (
    "XML as the prompt format of programs that set none",
    "models with `generate` and without `messages=`",
    "prompts that are objects",
    "`dspy.ReAct` in its new form",
    "the patches of its optimizers",
)
"""What is known of DSPy 3.5 from announcements alone: `tests/stub_dspy35.py` has their shapes."""


class UntestedDSPy(UserWarning):
    """assay was not run with this version of DSPy."""


def check_version(installed: str) -> None:
    """Warns of DSPy 3.5, refuses versions out of the range. Pre-releases of 3.5 and 3.6 count as the release.

    Raises:
        ConfigError: the version is older than 3.4.1, 3.6 or newer, or no version.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(.*)", installed)
    release = tuple(int(number or 0) for number in match.groups()[:3]) if match else ()
    early = match is not None and release == _OLDEST and re.match(r"[._-]?(a|b|c|rc|pre|dev)", match[4])
    if early or not _OLDEST <= release < _REFUSED:
        raise ConfigError(
            f"DSPy {installed} is not supported: install one of 3.4.1 to 3.5, `pip install 'dspy>=3.4.1,<3.6'`"
        )
    if release >= _UNTESTED:
        warnings.warn(
            f"assay was not run with DSPy {installed}. These parts were tested with a stub of its announced shapes: "
            f"{', '.join(RESTS_ON_STUB)}. Tested with DSPy itself: 3.4.1",
            UntestedDSPy,
            stacklevel=3,
        )


def version_of(dspy: ModuleType) -> str:
    """The version that a module says it has."""
    return str(getattr(dspy, "__version__", "without a version"))


def check_loaded() -> None:
    """Refuses the version of DSPy that is loaded, if one is; see `check_version`."""
    if (dspy := sys.modules.get("dspy")) is not None:
        check_version(version_of(dspy))


def loaded(module: str) -> Any:
    """A module of assay. If it cannot be loaded because of the version of DSPy, the error says so.

    Raises:
        ConfigError: the version is out of the range.
    """
    try:
        return import_module(module)
    except (AttributeError, ImportError):
        check_loaded()
        raise


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
