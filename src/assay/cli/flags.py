"""Flags of the command line, made from the settings classes: name, type, default, help, choices and metavar are those
of the field.

What a command has besides its settings (`--json`, `--store`, `--out`) is in `assay.cli.shared`, or in the command.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_args, get_origin

import click

from assay.cli.options import Decorator, with_options
from assay.cli.shared import json_or_text, pairs
from assay.cli.value_types import Choice, Integer, Number
from assay.runs.project import COMMANDS, demand_trust, read_project
from assay.support.settings import Setting, settings_of
from assay.support.terminal import echo

_MODEL = ("model", "api_base", "api_key_env", "price", "thinking")
SPLITS = ("train", "val", "gate", "test")


def settings_flags(
    *kinds: type[Any],
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    sizes: Sequence[str] = SPLITS,
    help: Mapping[str, str] | None = None,
) -> Decorator:
    """Flags made from settings classes; required ones come first.

    Args:
        only: fields to include; empty means all.
        without: fields without a flag.
        sizes: the splits of `--SPLIT-size`; if empty, there is one `--size`, for the split that the command uses.
        help: help texts that replace those of the fields, by name.
    """
    settings = {
        name: setting
        for kind in kinds
        for name, setting in settings_of(kind).items()
        if not setting.declared.named or setting.declared.flag
    }
    chosen = [setting for name, setting in settings.items() if (not only or name in only) and name not in without]
    options = []
    for setting in sorted(chosen, key=lambda setting: not setting.required):
        text = (help or {}).get(setting.name, setting.declared.flag_help or setting.declared.help)
        text += "  [required]" if setting.required else ""  # click must not: it may be in the project's settings
        options += _size_options(text, sizes) if setting.name == "sizes" else [_option(setting, text)]
    return lambda function: with_options(function, options)


def _size_options(text: str, sizes: Sequence[str]) -> list[Decorator]:
    if not sizes:
        return [click.option("--size", type=Integer(1), help="Maximum number of tasks taken from the split.")]
    return [click.option(f"--{split}-size", type=Integer(1), help=text.format(split=split)) for split in sizes]


def _option(setting: Setting, text: str) -> Decorator:
    declared, kind = setting.declared, setting.plain
    flag = declared.flag or f"--{setting.name.replace('_', '-')}"
    if kind is bool:
        default = bool(setting.default) if "/" in flag else False
        return click.option(
            *flag.split(" "), _parameter(setting), is_flag=True, default=default, show_default="/" in flag, help=text
        )
    flags = flag.split("/")
    if get_origin(kind) in (Mapping, Sequence) and (declared.many or get_origin(kind) is Mapping):
        item = int if get_args(kind) == (int,) else str
        words = declared.metavar or ("NAME=VALUE" if get_origin(kind) is Mapping else _metavar(flags[0]))
        return click.option(*flags, setting.name, type=item, multiple=True, metavar=words, help=text)
    has_default = setting.default not in (MISSING, None, ())
    metavar = declared.metavar
    return click.option(
        *flags,
        setting.name,
        type=_type(setting),
        default=_default(setting),
        show_default=has_default,
        metavar=metavar,
        help=text,
    )


def _metavar(flag: str) -> str:
    """The word for a repeatable flag's value: `TASK_TYPE` of `--task-type`."""
    return flag.removeprefix("--").replace("-", "_").upper()


def _default(setting: Setting) -> Any:
    if setting.default is MISSING:
        return None
    return ",".join(setting.default) or None if isinstance(setting.default, tuple) else setting.default


def _type(setting: Setting) -> Any:
    declared, kind = setting.declared, setting.plain
    if declared.choices:
        return Choice(list(declared.choices))
    if kind not in (int, float):
        return str
    low, high = declared.gt if declared.ge is None else declared.ge, declared.lt if declared.le is None else declared.le
    if low is None and high is None:
        return kind
    if kind is int:
        return Integer(None if low is None else int(low), None if high is None else int(high))
    return Number(low, high, min_open=declared.gt is not None, max_open=declared.lt is not None)


def _parameter(setting: Setting) -> str:
    """Name of a flag's value: that of the field, except for a switch that turns something off (`--no-cache`)."""
    flag = setting.declared.flag
    return (
        setting.name
        if setting.plain is not bool or setting.default is False or "/" in flag
        else flag.removeprefix("--").replace("-", "_")
    )


def command_settings(
    values: dict[str, Any], *kinds: type[Any], artifact: bool = False, project: bool = True
) -> dict[str, Any]:
    """Takes the flags of settings classes out of a command's values.

    Args:
        artifact: whether an artifact runs. It has its own model, so the model of the project file is ignored.
        project: whether the project file supplies missing values.
    Returns:
        Those that were given on the command line or in the project file, as keywords of the Python function; it has
        defaults for the others.
    Raises:
        click.MissingParameter: one that the job cannot do without was not given.
    """
    settings = {name: setting for kind in kinds for name, setting in settings_of(kind).items()}
    settings_values = {
        name: value
        for name, value in (of_project(without=_MODEL if artifact else ()) if project else {}).items()
        if name in settings
    }
    settings_values = {
        name: value
        for name, value in settings_values.items()
        if not settings[name].declared.named or settings[name].declared.flag
    }
    for setting in settings.values():
        if setting.name == "sizes":
            settings_values |= _sizes(values, settings_values)
            continue
        name = _parameter(setting)
        if name not in values:
            continue
        value = values.pop(name)
        if is_set(name):
            settings_values[setting.name] = _value(setting, value)
        elif setting.required and setting.name not in settings_values and not _is_in_curriculum(name):
            _require(name)
    return settings_values


def command_job(values: dict[str, Any], program: str | None, *kinds: type[Any]) -> tuple[str, dict[str, Any]]:
    """The program of a job and its settings, from the command line or the project file.

    Raises:
        click.MissingParameter: the program or a required setting is missing.
    """
    if (name := program or of_project(only=("program",)).get("program")) is None:
        _require("program")
    return str(name), command_settings(values, *kinds, artifact=is_artifact(name))


def is_artifact(*names: Any) -> bool:
    """Whether one of the names is an artifact's folder; as that of `assay.deployment.artifact`, which imports DSPy."""
    return any(name and (Path(str(name)) / "manifest.json").is_file() for name in names)


def of_project(*, only: Sequence[str] = (), without: Sequence[str] = ()) -> dict[str, Any]:
    """Settings of the running command in the project file, except those that are given on the command line.

    Says once which file was read.

    Args:
        only: names of settings; empty means all.
    Raises:
        UntrustedArtifact: the user does not trust the file, and these settings need it.
    """
    context, names = click.get_current_context(), list[str]()
    while context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    command = " ".join(names)
    path, values = read_project(command) if command in COMMANDS else (None, {})
    if path is None:
        return {}
    if not context.meta.get("project_file"):
        context.meta["project_file"] = path
        echo(f"settings: {path}", err=True)
    values = {
        name: value
        for name, value in values.items()
        if not is_set(name) and name not in without and (not only or name in only)
    }
    demand_trust(path, command, values)
    return values


def _is_in_curriculum(name: str) -> bool:
    """Whether a missing setting is the data, and a curriculum is given, whose stages may name their data."""
    return name == "data" and (is_set("curriculum") or "curriculum" in of_project())


def _require(name: str) -> None:
    context = click.get_current_context()
    param = next(option for option in context.command.params if option.name == name)
    hint = f"'{name.upper()}'" if isinstance(param, click.Argument) else None  # without the brackets of the usage line
    message = "Give it here or in assay.toml, which assay init writes."
    raise click.MissingParameter(message, ctx=context, param_hint=hint, param=param)


def is_set(name: str) -> bool:
    """Whether an option is on the command line, or in an environment variable that it reads."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def drop_unused_judge(settings: dict[str, Any]) -> None:
    """Removes what the project file says about a judge's model if no model is named, but not a flag of this call."""
    if "judge_model" not in settings:
        for name in ("judge_api_base", "judge_api_key_env", "judge_thinking"):
            if not is_set(name):
                settings.pop(name, None)


def _sizes(values: dict[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of tasks by split. Those of flags replace those of the project file."""
    sizes = dict(project.get("sizes", {}))
    sizes |= {split: size for split in SPLITS if (size := values.pop(f"{split}_size", None)) is not None}
    if "size" in values:  # one split, whose name may come from the other source
        size = next(iter(sizes.values()), None) if (flag := values.pop("size")) is None else flag
        split = values["split"] if is_set("split") else project.get("split", values["split"])
        sizes = {} if size is None else {split: size}
    return {"sizes": sizes} if sizes else {}


def _value(setting: Setting, value: Any) -> Any:
    """The value of a flag, converted to the type of its field."""
    flag, kind = setting.declared.flag.split("/")[0] or f"--{setting.name.replace('_', '-')}", setting.plain
    if kind is bool:
        return value if _parameter(setting) == setting.name else not value
    if get_origin(kind) is Mapping:
        read = _READ.get(get_origin(item := get_args(kind)[1]) or item, _text)
        return {name: read(text, flag, name) for name, text in pairs(value, flag).items()}
    if get_origin(kind) is Sequence and isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return Path(value) if kind is Path else value


def _text(text: str, flag: str, name: str) -> str:
    return text


def _number(text: str, flag: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"{flag}: {text!r} is not a number") from None


def _range(text: str, flag: str, name: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    if not colon:
        raise click.UsageError(f"{flag} {name}={text} must be NAME=LOW:HIGH")
    return _number(low, flag, name), _number(high, flag, name)


_READ: dict[Any, Callable[[str, str, str], Any]] = {
    Any: lambda text, flag, name: json_or_text(text),
    float: _number,
    tuple: _range,
}
