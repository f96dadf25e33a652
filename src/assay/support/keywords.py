"""Keywords of the Python functions: checked by the declarations of the settings classes, with the nearest name for a
typo."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from assay.errors import ConfigError
from assay.support.meant import keyword_hint
from assay.support.settings import Declared, Setting, check_value, members_of_type, settings_of

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SIMPLE = (bool, int, float, str, Path, NoneType)


def takes(*kinds: type[Any], without: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Decorator for a public function: it checks the arguments, and refuses other keywords.

    A keyword of the function that is a field of one of the settings classes is checked by the field's declaration.
    Where the function has `**options`, its signature also lists each other field, with type and default. Arguments of
    simple types, such as `resume: bool`, are checked by their types: a text in place of a bool would count as
    True. So are those whose types are dataclasses. Any other keyword is a `TypeError` that names the nearest one. For a
    class, decorate its `__init__`.

    Args:
        kinds: settings classes. Named fields (see `Declared.named`) are not listed: each is an argument of its own.
        without: fields that are not listed either.
    """
    settings = {name: setting for kind in kinds for name, setting in settings_of(kind).items()}

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed = [
            _parameter(setting)
            for name, setting in settings.items()
            if len(own) < len(signature.parameters)
            and not (setting.declared.named or name in without or name in signature.parameters)
        ]
        full = signature.replace(parameters=[*own, *listed])
        names, checked = set(full.parameters) - {"self"}, {**_simple(own), **_declared(own, settings)}
        positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if len(args) > len(positional):
                raise TypeError(_too_many(called, len(args), positional, names))
            if unknown := sorted(keywords.keys() - names):
                raise TypeError(_unexpected(called, unknown, keywords, names))
            for name, value in signature.bind_partial(*args, **keywords).arguments.items():
                if name in checked:
                    check_value(checked[name], value)
                if name == "progress" and not (value is None or callable(getattr(value, "say", None))):
                    raise ConfigError(f"progress={value!r} must be an assay.evaluation.Progress or None")
            return function(*args, **keywords)

        call.__signature__ = full  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _simple(parameters: Sequence[inspect.Parameter]) -> dict[str, Setting]:
    """The parameters whose annotations are bool, a number, text, a path, a dataclass, None or a union of these."""
    return {
        parameter.name: Setting(parameter.name, parameter.annotation, parameter.default, Declared())
        for parameter in parameters
        if all(kind in _SIMPLE or is_dataclass(kind) for kind in members_of_type(parameter.annotation))
    }


def _declared(parameters: Sequence[inspect.Parameter], settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The parameters that are fields of settings classes. Not those that may be an object, whose type is its own."""
    return {
        parameter.name: settings[parameter.name]
        for parameter in parameters
        if parameter.name in settings and not settings[parameter.name].declared.named
        if set(members_of_type(parameter.annotation)) <= set(members_of_type(settings[parameter.name].type))
    }


def _parameter(setting: Setting) -> inspect.Parameter:
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=setting.type)


def _too_many(function: str, number: int, positional: Sequence[str], names: set[str]) -> str:
    """Message about arguments without their names, such as `evaluate(program, rubric, data)`."""
    usual = [name for name in ("rubric", "data", "labels", "store") if name in names.difference(positional)]
    hint = f": {', '.join(f'{name}=…' for name in usual)}" if usual else ""
    taken = f"only {', '.join(positional)}" if positional else "no argument"
    return f"{function}() takes {taken} without a name, and got {number} such arguments. Name the others{hint}"


def _unexpected(function: str, unknown: Sequence[str], keywords: Mapping[str, Any], names: set[str]) -> str:
    if "size" in unknown and "sizes" in names:
        return (
            f"{function}() has no size of a single split: give sizes={{'val': {keywords['size']!r}}}, with the split's "
            "name"
        )
    right = {name: keyword_hint(name, names) for name in unknown}
    hints = ", ".join(f"{text} instead of {name!r}" for name, text in right.items() if text)
    return f"{function}() got unexpected keywords: {', '.join(unknown)}." + (
        f" Did you mean {hints}?" if hints else f" It takes {', '.join(sorted(names))}."
    )
