"""Commands that continue a run or repeat a rollout, made from what the store has of them. Runs nothing."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_origin

from assay.commands import COMMANDS, SHORT_FORMS, command_class, long_form
from assay.errors import Names, spoken
from assay.models.roles import DEFAULT_MODEL
from assay.support.options import flag_of, options_of

_KNOWN = {*COMMANDS, *SHORT_FORMS}

_PLAIN = (str, int, float)
_LONGEST = 4_000  # characters of a command


class NotRepeatable(Exception):
    """No command line has these settings."""


def resume_command(kind: str, config: Mapping[str, Any], *, store: str | None = None) -> str | None:
    """The command that resumes a run; None if its kind has no `--resume` or its settings fit no command line."""
    if (name := _command(kind, config)) not in _KNOWN or "resume" not in options_of(command_class(name)):
        return None
    text = run_command(kind, config, store=store)
    return None if text is None else f"{text} --resume"


def run_command(kind: str, config: Mapping[str, Any], *, store: str | None = None) -> str | None:
    """The command with the settings of a run; None if no command line has them.

    Args:
        kind: of the run, such as `judge compile`.
        config: its stored settings. Those that are the default are left out.
        store: value of `--store`; None for the default store.
    """
    if (name := _command(kind, config)) not in _KNOWN:
        return None
    try:
        words = ["assay", *name.split(), *_arguments(name, config)]
    except NotRepeatable:
        return None
    return _line([*words, *(("--store", store) if store else ())])


def spoken_by_run(kind: str, config: Mapping[str, Any], text: str) -> str:
    """A message of a run, whose settings are named as on the command line of its command."""
    name = _command(kind, config)
    return spoken(text, names_in(name) if name in _KNOWN else str)


def names_in(command: str) -> Names:
    """How settings are written on the command line of a command."""
    return partial(flag_of, options_of(command_class(command)))


def _command(kind: str, config: Mapping[str, Any]) -> str:
    """The command of a kind of run; empty if the run is a part of another one."""
    if kind != "train":
        return kind
    part = ",".join(str(config.get(name)) for name in ("program", "rubric", "data"))
    is_retention = part in (config.get("retention") or ())  # each of its tasks is a run with the training's settings
    return "" if is_retention else f"train {config.get('algorithm')}"


def rollout_command(
    program: str, inputs: Mapping[str, Any], model: str, *, api_base: str = "", api_key_env: str = "",
    store: str | None = None,
) -> str | None:  # fmt: skip
    """The command that runs a program or an artifact on the inputs of a rollout; None if an input is not text or
    number."""
    if not program or not all(isinstance(value, _PLAIN) for value in inputs.values()):
        return None
    if any("=" in name or name.startswith("-") for name in inputs):
        return None
    options = {"--model": model, "--api-base": api_base, "--api-key-env": api_key_env, "--store": store}
    flags = itertools.chain.from_iterable((flag, value) for flag, value in options.items() if value)
    return _line(["assay", "run", program, *(f"{name}={value}" for name, value in inputs.items()), *flags])


def _line(words: Sequence[str]) -> str | None:
    line = " ".join(map(shlex.quote, words))
    return line if len(line) <= _LONGEST and line.isprintable() else None


def _arguments(words: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The arguments and options of a command that set what a run was given."""
    sizes, fixed = config.get("sizes") or {}, long_form(words)[1]
    values = {**config, "size": sizes.get(config.get("split")), **{f"{split}_size": sizes[split] for split in sizes}}
    if words.startswith("train "):
        values |= {"name": config.get("adapter_name"), "program": config.get("program", config.get("export"))}
        if words != "train sft":  # its rollouts are sampled at the training's own temperature
            parameters = (config.get("parameters") or {}).items()
            values["parameters"] = {name: value for name, value in parameters if name != "temperature"}
            values["program"] = None if config.get("agent") else values["program"]
        else:
            values["program"] = config.get("program")
    options = options_of(command_class(words)).values()
    for option in sorted(options, key=lambda option: (not option.positional, not option.required)):
        value = values.get(option.name)
        unset = DEFAULT_MODEL if option.name == "model" else option.default
        if option.name in fixed or value is None or value in (unset, [], {}):
            continue
        if not option.flag.shown:
            if option.flag.stored and option.name != "salt":  # that of the store
                raise NotRepeatable(option.name)
            continue
        flag, kind = () if option.positional else (option.flag_name,), get_origin(option.type)
        if option.type is bool:
            yield option.switch.split("/")[0 if value else -1]
        elif isinstance(value, Mapping) and kind is Mapping:
            for name, item in value.items():
                yield from (*flag, f"{name}={':'.join(map(_text, item)) if isinstance(item, list) else _text(item)}")
        elif isinstance(value, list) and kind is Sequence:
            texts = [_text(item) for item in value]
            for text in [",".join(texts)] if option.flag.commas else texts:
                yield from (*flag, text)
        else:
            yield from (*flag, _text(value))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, _PLAIN):
        raise NotRepeatable(value)
    return str(value)
