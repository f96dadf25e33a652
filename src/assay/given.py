"""What Python callers may give: programs and models as objects."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.programs.wrapping import as_module

__all__ = ["given_lm", "given_program"]


def given_program(program: Any) -> Any:
    """A name, as text where it is a path; or a `dspy.Module`, a function or an agent made into one."""
    if isinstance(program, str):
        return program
    return str(program) if isinstance(program, Path) else as_module(program)


def given_lm(lm: dspy.LM | None, options: MutableMapping[str, Any]) -> dspy.LM | None:
    """The model to use: the one given, none where one is named, else the one that is set in DSPy.

    Raises:
        ConfigError: a name was given for the object.
    """
    if lm is not None and not isinstance(lm, dspy.LM):
        raise ConfigError(f"lm={lm!r} must be a dspy.LM, such as assay.get_lm(NAME); a name goes into model=NAME")
    if lm is not None or options.get("model") is not None:
        return lm
    return dspy.settings.lm
