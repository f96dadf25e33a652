"""Commands whose options the former settings classes declare, seen as options. It goes with the last of them."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from assay.datasets import SPLITS
from assay.support.options import Flag, OneOf, Option, Pair, Parse, Positive, option_of
from assay.support.settings import Setting, members_of_type, settings_of

FORMER_COMMANDS: dict[str, tuple[type[Any], ...]] = {}


def former_options(command: str) -> dict[str, Option]:
    """The settings that a command takes from the project file, by key."""
    settings = {
        name: setting
        for kind in FORMER_COMMANDS[command]
        for name, setting in settings_of(kind).items()
        if setting.declared.project
    }
    sized = settings.pop("sizes", None) is not None
    options = {name: _as_option(setting) for name, setting in settings.items()}
    if sized:
        options |= {key: option_of(key, Positive, None) for key in _size_keys(command, settings)}
    return options


def _size_keys(command: str, settings: Mapping[str, Setting]) -> Sequence[str]:
    """The keys for numbers of tasks: the names of the command's flags."""
    if "split" in settings:
        return ("size",)
    return [f"{split}_size" for split in SPLITS]


def _as_option(setting: Setting) -> Option:
    declared = setting.declared
    ends = ((Ge, declared.ge), (Gt, declared.gt), (Le, declared.le), (Lt, declared.lt))
    bounds = [kind(end) for kind, end in ends if end is not None]
    is_path = declared.file or setting.name == "program"
    extras: list[Any] = [Flag(metavar=declared.metavar or "", path=is_path)]
    extras += [OneOf(declared.choices)] if declared.choices else []
    extras += [Parse(declared.parse)] if declared.parse else []
    kinds = [_with_bounds(kind, bounds) for kind in members_of_type(setting.type)]
    annotation: Any = functools.reduce(operator.or_, kinds)
    for extra in extras:
        annotation = Annotated[annotation, extra]
    return option_of(setting.name, annotation, setting.default, declared.help)


def _with_bounds(kind: Any, bounds: Sequence[Any]) -> Any:
    if kind in (int, float):
        for bound in bounds:
            kind = Annotated[kind, bound]
    return Mapping[str, Pair] if kind == Mapping[str, tuple[float, float]] else kind
