"""Arguments of the Python functions: programs and models as objects, settings as keywords."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import dspy

from assay.datasets.curriculum import PREFIX
from assay.datasets.memory import data_spec
from assay.deployment.artifact import is_artifact, with_model_of
from assay.errors import ConfigError
from assay.models.lm import has_provider
from assay.programs.foreign.agent import ForeignAgent
from assay.programs.loading import full_name
from assay.programs.wrapping import as_module, wrapped
from assay.rubrics import Rubric
from assay.runs.settings.shared import ProgramSettings
from assay.sources.modules import qualified_name
from assay.support.settings import Declared, Setting, check_value, members_of_type, nearest, settings_of

__all__ = ["program_settings", "resolve_lm", "resolve_model", "resolve_program", "takes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Settings = TypeVar("_Settings", bound=ProgramSettings)


def resolve_program(program: Any) -> Any:
    """The program as a name (with its class, if it is a path) or as a `dspy.Module` made of a function or agent."""
    return full_name(str(program)) if isinstance(program, str | Path) else as_module(program)


def resolve_lm(lm: dspy.LM | None, options: Mapping[str, Any]) -> dspy.LM | None:
    """The model object to use: `lm`; None if `options` names a model; otherwise the one set in DSPy.

    Raises:
        ConfigError: `lm` is not a `dspy.LM`.
    """
    if lm is not None and not isinstance(lm, dspy.LM):
        raise ConfigError(f"lm={lm!r} must be a dspy.LM, such as assay.get_lm(NAME); a name goes into model=NAME")
    if lm is not None or options.get("model") is not None:
        return lm
    return dspy.settings.lm


def resolve_model(
    program: Any, lm: dspy.LM | None, options: Mapping[str, Any]
) -> tuple[dspy.LM | None, dict[str, Any]]:
    """The model object of a run, and the options with the model's name and address.

    In this order: the model that is passed or named, that of the artifact, the one set in DSPy.

    Raises:
        ConfigError: `lm` is not a `dspy.LM`; or no model is named, and the artifact's model was an object without a
            name that can be loaded.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    if lm is None and "model" not in settings and isinstance(program, str) and is_artifact(program):
        settings = with_model_of(program, settings)
        if not has_provider(settings["model"]):
            raise ConfigError(
                f"{program} was made with the model {settings['model']!r}, an object that no name stands for: "
                "give a model (lm=…, or model=NAME)",
                flag="--model NAME",
            )
    return resolve_lm(lm, settings), settings


def program_settings(
    kind: type[_Settings],
    program: str | dspy.Module,
    rubric: str | Path | Rubric,
    data: Any,
    lm: dspy.LM | None,
    options: Mapping[str, Any],
) -> _Settings:
    """The settings of a job. Program, rubric and model may be objects; the settings hold their names.

    Args:
        data: None for that of the stages of a curriculum.
        options: the other settings by field name.
    """
    if data is None:
        if options.get("curriculum") is None:
            raise ConfigError(
                "data is missing: give the tasks, or a curriculum whose stages name them", flag="--data D"
            )
        data = f"{PREFIX}{options['curriculum']}"
    own_name = program.name if isinstance(program, ForeignAgent) else None
    name = program if isinstance(program, str) else own_name or qualified_name(wrapped(program))
    model = {} if lm is None else {"model": lm.model}
    measure = rubric.name if isinstance(rubric, Rubric) else str(rubric)
    return kind(program=name, rubric=measure, data=data_spec(data), **{**options, **model})


def takes(*kinds: type[Any], without: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Decorator for a function whose `**options` are settings.

    Its signature lists each setting with type and default. Any other keyword is a `TypeError` that names the nearest
    setting. The function's own arguments of simple types, such as `resume: bool`, are checked like settings: a text
    in place of a bool would be taken for True.

    Args:
        kinds: settings classes. Named fields (see `Declared.named`) are left out: each is an argument of its own.
        without: fields that are left out as well.
    """
    settings = {
        name: setting
        for kind in kinds
        for name, setting in settings_of(kind).items()
        if not setting.declared.named and name not in without
    }

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [_parameter(setting) for name, setting in settings.items() if name not in signature.parameters]
        full = signature.replace(parameters=[*named, *more])
        names, checked = set(full.parameters), _simple(named)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if unknown := sorted(keywords.keys() - names):
                raise TypeError(_unexpected(function.__name__, unknown, keywords, names))
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
    """The parameters whose annotations are bool, a number, text, a path, None or a union of these."""
    return {
        parameter.name: Setting(parameter.name, parameter.annotation, parameter.default, Declared())
        for parameter in parameters
        if set(members_of_type(parameter.annotation)) <= {bool, int, float, str, Path, NoneType}
    }


def _parameter(setting: Setting) -> inspect.Parameter:
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=setting.type)


def _unexpected(function: str, unknown: Sequence[str], keywords: Mapping[str, Any], names: set[str]) -> str:
    if "size" in unknown and "sizes" in names:
        return (
            f"{function}() has no size of a single split: give sizes={{'val': {keywords['size']!r}}}, with the split's "
            "name"
        )
    nearest_names = [(name, right) for name in unknown if (right := nearest(name, names)) is not None]
    hints = ", ".join(f"{right!r} instead of {wrong!r}" for wrong, right in nearest_names)
    return f"{function}() got unexpected keywords: {', '.join(unknown)}." + (
        f" Did you mean {hints}?" if hints else f" It takes {', '.join(sorted(names))}."
    )
