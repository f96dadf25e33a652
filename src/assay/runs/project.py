"""`assay.toml`: the settings of a project, by command and by role.

The command line reads it; Python functions use it only through `assay.project_settings`. A file that may be somebody
else's, or that sends keys or data to another host, must be trusted (`assay.sources.trust`).
"""

import functools
import operator
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.datasets import SPLITS
from assay.deployment.settings import PoolSettings
from assay.errors import ConfigError, ProjectError
from assay.models.roles import PROVIDER, address_in, is_local, is_loopback
from assay.optimizers.finetuning.settings import ALGORITHMS, SFTSettings
from assay.runs.settings import (
    AdvanceSettings,
    AgentRunSettings,
    CollectSettings,
    CompareSettings,
    CompileSettings,
    EvaluateSettings,
    ExportSettings,
    FidelitySettings,
    ImpactSettings,
    ImproveSettings,
    IndexSettings,
    JudgeAuditSettings,
    JudgeCompileSettings,
    JudgeDriftSettings,
    JudgeLabelSettings,
    JudgeScoreSettings,
    LoopInstallSettings,
    RunSettings,
    RunsListSettings,
    ServeSettings,
    SimulateSettings,
    StartSettings,
    TracesCloseSettings,
    TracesExportSettings,
    TracesForgetSettings,
    TracesImportSettings,
    TracesListSettings,
    TracesRateSettings,
    TracesScoreSettings,
    TrainSettings,
    TuneSettings,
    ViewSettings,
)
from assay.runs.settings.export import OF_KIND, RowSettings
from assay.sources import trust
from assay.sources.trust import hash_of_file, trusts
from assay.support.keywords import takes
from assay.support.settings import Declared, Setting, check_value, members_of_type, nearest, settings_of

FILE = "assay.toml"
ROLES = ("program", "judge", "reflection")
_ROLE_KEYS = ("model", "api_base", "api_key_env", "thinking")
_ROLE_SETTINGS = {name: (settings_of(RunSettings)[name],) for name in _ROLE_KEYS}
_MOST_LISTED = 80  # names in a message; [defaults] has more than twice as many
_EXPORTS = ("sft", "grpo", "preferences", "transitions")
_NOT_OF_TRAIN = ("algorithm", "cache")  # the command's own name; a policy in training is never answered from a cache
COMMANDS: dict[str, tuple[type[Any], ...]] = {
    "compile": (CompileSettings,),
    "evaluate": (EvaluateSettings,),
    "compare": (CompareSettings,),
    "run": (RunSettings,),
    "tune": (TuneSettings, ImpactSettings),
    "collect": (CollectSettings,),
    "improve": (ImproveSettings,),
    "train sft": (SFTSettings,),
    **{f"train {algorithm}": (TrainSettings,) for algorithm in ALGORITHMS},
    **{f"export {kind}": (ExportSettings,) for kind in _EXPORTS},
    "judge compile": (JudgeCompileSettings,),
    "judge audit": (JudgeAuditSettings,),
    "judge score": (JudgeScoreSettings,),
    "judge drift": (JudgeDriftSettings,),
    "judge fidelity": (FidelitySettings,),
    "serve": (ServeSettings,),
    "view": (ViewSettings,),
    "index": (IndexSettings,),
    "deploy simulate": (SimulateSettings,),
    "deploy start": (StartSettings,),
    "deploy advance": (AdvanceSettings,),
    "loop pool": (PoolSettings,),
    "loop install": (LoopInstallSettings,),
    "judge label": (JudgeLabelSettings,),
    "runs list": (RunsListSettings,),
    "traces list": (TracesListSettings,),
    "traces rate": (TracesRateSettings,),
    "traces close": (TracesCloseSettings,),
    "traces import": (TracesImportSettings,),
    "traces export": (TracesExportSettings,),
    "traces forget": (TracesForgetSettings,),
    "traces score": (TracesScoreSettings,),
    "agent run": (AgentRunSettings,),
}
_SIZE_KEYS = {f"{split}_size": split for split in SPLITS}
_UNSIZED = ("judge audit", "judge drift", "judge fidelity", "judge score")  # they read all labels
_ROOTS = (".git", ".hg", ".svn", ".jj")  # in the root of a project under version control
_LISTENS = ("host", "agent_listen", "allow_host")  # where requests are taken from, which use the user's key
_HAVE_ADDRESS = re.compile(r"(?:.*_)?model|embedder|sft|grpo|optimizer_settings")  # settings besides those of a URL
_read_values: set[tuple[str, str]] = set()  # name and `repr` of every setting that a project file has given
GROUPS = tuple(dict.fromkeys(name.split()[0] for name in COMMANDS if " " in name))


@takes()
@trusts
def project_settings(command: str, folder: str | Path = ".") -> dict[str, Any]:
    """Settings of `assay.toml` for a command, as keywords: `assay.compile(**assay.project_settings("compile"))`.

    A command's table overrides those of the roles, which override `[defaults]`. Paths are relative to the file. The
    numbers of tasks have the keys of their flags (`val_size`, or `size` where a command reads one split); they are
    returned as `sizes`.

    Args:
        command: such as `compile`, `train grpo` or `judge audit`.
        folder: where the search for the file starts; it may be in a parent folder.
    Returns:
        Settings by name, `program` among them where the file names one; empty without a file.
    Raises:
        ConfigError: there is no such command.
        ProjectError: the file cannot be read, has an unknown table or key (the message names the nearest one), or a
            value of the wrong type.
        UntrustedArtifact: see `demand_trust`.
    """
    path, values = read_project(command, folder)
    if path is not None:
        demand_trust(path, command, values, folder)
    return values


def read_project(command: str, folder: str | Path = ".") -> tuple[Path | None, dict[str, Any]]:
    """The project file of a folder and its settings for a command, as `project_settings`. Demands no trust."""
    if command not in COMMANDS:
        raise ConfigError(f"there is no command {command!r} with settings; {_hint(str(command), COMMANDS)}")
    path = find_project(folder)
    if path is None:
        return None, {}
    tables = _read(path)
    paths, merged = _keys(command), dict[str, Any]()
    for table in ([tables.get("defaults", {})], _of_roles(command, tables), _of_command(command, tables)):
        for values in table:
            merged |= {name: value for name, value in values.items() if name in paths}
    sizes = {split: merged.pop(key) for key, split in _SIZE_KEYS.items() if key in merged}
    if "size" in merged:
        sizes[merged.get("split", _settings(command)["split"].default)] = merged.pop("size")
    located = {name: _located(path.parent, paths[name], value) for name, value in merged.items()}
    _read_values.update((name, repr(form)) for name, value in located.items() for form in _forms(name, value, command))
    return path, located | ({"sizes": sizes} if sizes else {})


def demand_trust(path: Path, command: str, values: Mapping[str, Any], folder: str | Path = ".") -> None:
    """Demands that the user trusts a project file, if values that it gives to a command need it.

    They do if the file is outside of the project of `folder` or belongs to another user, or if they choose a host that
    gets keys or data, or from which requests are accepted. Hosts of a model's provider and loopback addresses need no
    trust.

    Raises:
        UntrustedArtifact: the user has not trusted the content of the file.
    """
    start = Path(folder).resolve()
    if values and not path.parent.is_relative_to(root := _project_root(start)):
        why = f"is outside of this project ({root}) and sets {', '.join(values)}"
    elif values and not _is_owned(path):
        why = f"belongs to another user and sets {', '.join(values)}"
    elif places := _places(command, values):
        why = f"sends keys or data elsewhere, or accepts requests from there: {', '.join(places)}"
    else:
        return
    trust.demand(hash_of_file(path), path, why)


def _project_root(start: Path) -> Path:
    """The user's own project around a folder: the root of its version control, else the home folder, else itself.

    The root counts only if the user owns it: everybody may make a `.git` in a shared folder such as /tmp.
    """
    for place in (start, *start.parents):
        if any((place / name).exists() and _is_owned(place / name) for name in _ROOTS):
            return place
    home = Path.home().resolve()
    return home if start.is_relative_to(home) else start


def _is_owned(path: Path) -> bool:
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _places(command: str, values: Mapping[str, Any]) -> list[str]:
    """Hosts and variables of keys that settings choose, as `name='value'`."""
    settings, places = _settings(command), list[str]()
    for name, value in values.items():
        if name.endswith("api_key_env"):
            role = name.removesuffix("api_key_env")
            # a key of another provider; one that goes to an address is named with the address
            model = str(values.get(f"{role}model") or values.get("model") or "openai")
            address = values.get(f"{role}api_base") or values.get("api_base") or PROVIDER
            if address == PROVIDER and not _is_key_of(str(value), model.partition("/")[0]):
                places.append(f"{name}={value!r}")
        elif name in settings:
            places += [f"{name}={address!r}" for address in _addresses(settings[name], value) if _leaves(address)]
        if isinstance(value, Mapping):  # settings of a step
            keys = {key: part for key, part in value.items() if str(key).endswith("api_key_env")}
            places += [f"{name}.{key}={part!r}" for key, part in keys.items()]
    return places


def _is_key_of(variable: str, provider: str) -> bool:
    """Whether the name of a variable has the provider's as a word, as OPENAI_API_KEY has."""
    return provider.partition("_")[0].lower() in {*variable.lower().split("_")} - {"", "api", "key", "secret", "token"}


def _addresses(setting: Setting, value: Any) -> list[str]:
    """Addresses in a setting: of a server, of clients, in a model's name, or anywhere in the settings of a step."""
    if isinstance(value, Mapping):
        return [address for item in value.values() for address in _addresses(setting, item)]
    if isinstance(value, list | tuple):
        return [address for item in value for address in _addresses(setting, item)]
    if setting.name == "allow_host" and is_local(str(value)):  # no page of the internet has such a name
        return []
    if setting.declared.metavar == "URL" or setting.name in _LISTENS:
        return [str(value)]
    found = address_in(value) if _HAVE_ADDRESS.fullmatch(setting.name) else None
    return [] if found is None else [found]


def _leaves(address: str) -> bool:
    """Whether an address is of another machine than this one and the provider's."""
    return not (address == PROVIDER or address.startswith("sqlite:") or is_loopback(address))


def _forms(name: str, value: Any, command: str) -> list[Any]:
    """A value as it is in the file and as a settings object stores it: of `thinking = 0` that is `off`."""
    setting = _settings(command).get(name)
    if setting is None or setting.declared.parse is None:
        return [value]
    try:
        return [value, setting.declared.parse(value)]
    except (TypeError, ValueError):  # wrong for this command, which will refuse it
        return [value]


def is_of_project(name: str, value: Any) -> bool:
    """Whether `project_settings` has returned this value of a setting in this process.

    A project file gives the models of all roles to all commands; one that a command has no use for is no mistake.
    """
    return (name, repr(value)) in _read_values


def find_project(folder: str | Path = ".") -> Path | None:
    """The project file of a folder: in it, or in the nearest folder above it."""
    start = Path(folder).resolve()
    return next((place / FILE for place in (start, *start.parents) if (place / FILE).is_file()), None)


def _settings(command: str) -> dict[str, Setting]:
    """The settings that a command takes from the file, by key."""
    settings = {
        name: setting
        for kind in COMMANDS[command]
        for name, setting in settings_of(kind).items()
        if setting.declared.project
    }
    if settings.pop("sizes", None) is not None:
        settings |= {key: Setting(key, int, None, Declared(ge=1)) for key in _size_keys(command, settings)}
    if command.startswith("export "):
        others = settings_of(RowSettings).keys() - OF_KIND[command.split()[1]]
        return {name: setting for name, setting in settings.items() if name not in others}
    if command.startswith("train "):
        return {name: setting for name, setting in settings.items() if name not in _NOT_OF_TRAIN}
    return settings


def _size_keys(command: str, settings: Mapping[str, Setting]) -> Sequence[str]:
    """The keys for numbers of tasks: the names of the command's flags."""
    if command in _UNSIZED:
        return ()
    if "split" in settings:
        return ("size",)
    return [key for key in _SIZE_KEYS if key != "gate_size" or not command.startswith("train ")]


def _keys(command: str) -> dict[str, bool]:
    """The keys that a command takes, and whether their values may be paths."""
    return {name: setting.declared.file or name == "program" for name, setting in _settings(command).items()}


def _of_command(command: str, tables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables of a command: its group's, then its own."""
    command_tables, table = [], tables
    for part in command.split():
        table = table.get(part, {})
        command_tables.append(table)
    return command_tables


def _of_roles(command: str, tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The models of the roles as settings of a command; a judge without a model uses the program's."""
    default_role = next((getattr(kind, "ROLE", "program") for kind in COMMANDS[command]), "program")
    # the model of an export is the one to be trained; a gateway behind an upstream records whichever model answered
    if command.startswith("export") or command == "serve":
        return []
    settings = [_role(tables, "program", without="thinking")] if default_role != "program" else []
    settings += [
        {f"{role}_{name}": value for name, value in _role(tables, role).items()}
        for role in ("judge", "reflection")
        if role != default_role
    ]
    return [*settings, _role(tables, default_role)]


def _role(tables: Mapping[str, Any], role: str, without: str = "") -> dict[str, Any]:
    return {name: value for name, value in tables.get(role, {}).items() if name in _ROLE_KEYS and name != without}


def _located(folder: Path, is_path: bool, value: Any) -> Any:
    """A path from the file, made relative to the file's folder; a value that is not a path is unchanged."""
    if isinstance(value, list):
        return [_located(folder, is_path, item) for item in value]
    if not is_path or not isinstance(value, str) or Path.cwd() == folder:
        return value
    name, colon, suffix = value.partition(":")
    return f"{folder / name}{colon}{suffix}" if (folder / name).exists() else value


def _read(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProjectError(f"{path} cannot be read: {error}") from error
    commands = tuple(dict.fromkeys(name.split()[0] for name in COMMANDS))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ProjectError(
                f"{path}: {name} = {table!r} is outside of a table; put it under [defaults] or under a command"
            )
        if name not in ("defaults", *ROLES, *commands):
            raise ProjectError(f"{path} has an unknown table [{name}]; {_hint(name, ('defaults', *ROLES, *commands))}")
        _check_table(path, name, table)
    return tables


def _check_table(path: Path, name: str, table: Mapping[str, Any]) -> None:
    """Raises `ProjectError` for a key that no command of the table has, or a value that none of them takes."""
    commands = [
        command
        for command in COMMANDS
        if name == "defaults" or command == name or (command.startswith(f"{name} ") and name not in ROLES)
    ]
    known = _ROLE_SETTINGS if name in ROLES else {}
    for command in commands:
        for key, setting in _settings(command).items():
            known = {**known, key: (*known.get(key, ()), setting)}
    inner = [command.split()[1] for command in COMMANDS if command.startswith(f"{name} ")]
    for key, value in table.items():
        if key in inner and isinstance(value, dict):
            _check_keys(
                f"{path}: [{name}.{key}]", value, {k: (setting,) for k, setting in _settings(f"{name} {key}").items()}
            )
        else:
            _check_keys(f"{path}: [{name}]", {key: value}, known, inner)


def _check_keys(
    where: str, table: Mapping[str, Any], known: Mapping[str, Sequence[Setting]], also: Sequence[str] = ()
) -> None:
    """Commands may declare a setting differently; a value is wrong if it fits none of the declarations."""
    for key, value in table.items():
        if key not in known:
            raise ProjectError(f"{where} has no setting {key!r}; {_hint(key, [*known, *also])}")
        errors = [error for setting in known[key] if (error := _misfit(setting, value)) is not None]
        if len(errors) == len(known[key]):
            raise ProjectError(f"{where} {errors[0]}")


def _misfit(setting: Setting, value: Any) -> str | None:
    kinds = [kind for kind in members_of_type(setting.type) if kind is not type(None)]  # TOML has no None
    try:
        check_value(replace(setting, type=functools.reduce(operator.or_, kinds)), value)
    except ConfigError as error:
        return str(error)
    return None


def _hint(name: str, names: Collection[str]) -> str:
    if similar := nearest(name, names):
        return f"did you mean {similar!r}?"
    if len(names) > _MOST_LISTED:
        return "`assay COMMAND --help` lists those of a command: --val-size is val_size"
    return f"there are {', '.join(names)}"
