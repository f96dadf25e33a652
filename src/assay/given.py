"""What Python callers may give: programs and models as objects, settings as keywords."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import dspy

from assay.deployment.artifact import is_artifact, with_model_of
from assay.errors import ConfigError
from assay.models.lm import has_provider
from assay.programs.loading import full_name
from assay.programs.wrapping import as_module

__all__ = ["given_lm", "given_model", "given_program", "takes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def given_program(program: Any) -> Any:
    """A name, as text and with its class where it is a path; or a `dspy.Module`, a function or an agent made into one."""
    return full_name(str(program)) if isinstance(program, str | Path) else as_module(program)


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


def given_model(program: Any, lm: dspy.LM | None, options: Mapping[str, Any]) -> tuple[dspy.LM | None, dict[str, Any]]:
    """The model of a run, and the options with its name and address: what is given, else that of the artifact that runs, else what is set in DSPy.

    Raises:
        ConfigError: a name was given for the object; or nothing was given, and the artifact's model was an object that no name stands for.
    """
    found = {name: value for name, value in options.items() if value is not None}
    if lm is None and "model" not in found and isinstance(program, str) and is_artifact(program):
        found = with_model_of(program, found)
        if not has_provider(found["model"]):
            raise ConfigError(
                f"{program} was made with the model {found['model']!r}, an object that no name stands for: give a model (lm=…, or model=NAME)",
                flag="--model NAME",
            )
    return given_lm(lm, found), found


def takes(*settings: Any, also: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Decorates a function whose `**options` are the fields of dataclasses: any other keyword is a `TypeError` that names the nearest right one.

    Args:
        also: further keywords that the function hands on.
    """

    def decorate(function: _Function) -> _Function:
        own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {*own, *also, *(item.name for one in settings for item in dataclasses.fields(one))}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if unknown := sorted(given.keys() - known):
                if "size" in unknown and "sizes" in known:
                    raise TypeError(
                        f"{function.__name__}() has no size of a single split: give sizes={{'val': {given['size']!r}}}, with the split's name"
                    )
                near = [(name, close[0]) for name in unknown if (close := difflib.get_close_matches(name, known, 1))]
                hints = ", ".join(f"{right!r} instead of {wrong!r}" for wrong, right in near)
                raise TypeError(
                    f"{function.__name__}() got unexpected keywords: {', '.join(unknown)}."
                    + (f" Did you mean {hints}?" if hints else f" It takes {', '.join(sorted(known))}.")
                )
            return function(*args, **given)

        return call  # type: ignore[return-value]

    return decorate
