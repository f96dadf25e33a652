"""`assay.toml`: the settings of a project, by command and by role.

The command line reads it; Python functions use it only through `assay.project_settings`. A file that may be somebody
else's, or that sends keys or data to another host, must be trusted (`assay.sources.trust`).
"""

import functools
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from assay.commands import COMMANDS, SHORT_FORMS, command_class, long_form
from assay.errors import ConfigError, ProjectError
from assay.jobs.project_file import find_project, remember
from assay.models.roles import PROVIDER, address_in, is_local, is_loopback
from assay.sources import trust
from assay.sources.trust import hash_of_file, trusts
from assay.support.names import nearest
from assay.support.options import Option, options_of, takes

ROLES = ("program", "judge", "reflection")
_ROLE_KEYS = ("model", "api_base", "api_key_env", "thinking")
_MOST_LISTED = 80  # names in a message; [defaults] has more than twice as many
_ROOTS = (".git", ".hg", ".svn", ".jj")  # in the root of a project under version control
_LISTENS = ("host", "agent_listen", "allow_host")  # where requests are taken from, which use the user's key
_HAVE_ADDRESS = re.compile(r"(?:.*_)?model|embedder|sft|grpo|optimizer_settings")  # settings besides those of a URL


@takes
@trusts
def project_settings(command: str, folder: str | Path = ".") -> dict[str, Any]:
    """Settings of `assay.toml` for a command, as keywords: `assay.compile(**assay.project_settings("compile"))`.

    A command's table overrides those of the roles, which override `[defaults]`. Paths are relative to the file.

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
    if command not in (known := commands_with_settings()):
        raise ConfigError(f"there is no command {command!r} with settings; {_hint(str(command), known)}")
    path = find_project(folder)
    if path is None:
        return None, {}
    tables = _read(path)
    options, merged = _options(command), dict[str, Any]()
    for table in ([tables.get("defaults", {})], _of_roles(command, tables), _of_command(command, tables)):
        for values in table:
            merged |= {name: value for name, value in values.items() if name in options}
    located = {name: _located(path.parent, options[name].flag.path, value) for name, value in merged.items()}
    for name, value in located.items():
        for form in _forms(options.get(name), value):
            remember(path, name, form)
    return path, located


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
    options, places = _options(command), list[str]()
    for name, value in values.items():
        if name.endswith("api_key_env"):
            role = name.removesuffix("api_key_env")
            # a key of another provider; one that goes to an address is named with the address
            model = str(values.get(f"{role}model") or values.get("model") or "openai")
            address = values.get(f"{role}api_base") or values.get("api_base") or PROVIDER
            if address == PROVIDER and not _is_key_of(str(value), model.partition("/")[0]):
                places.append(f"{name}={value!r}")
        elif name in options:
            places += [f"{name}={address!r}" for address in _addresses(options[name], value) if _leaves(address)]
        if isinstance(value, Mapping):  # settings of a step
            keys = {key: part for key, part in value.items() if str(key).endswith("api_key_env")}
            places += [f"{name}.{key}={part!r}" for key, part in keys.items()]
    return places


def _is_key_of(variable: str, provider: str) -> bool:
    """Whether the name of a variable has the provider's as a word, as OPENAI_API_KEY has."""
    return provider.partition("_")[0].lower() in {*variable.lower().split("_")} - {"", "api", "key", "secret", "token"}


def _addresses(option: Option, value: Any) -> list[str]:
    """Addresses in a setting: of a server, of clients, in a model's name, or anywhere in the settings of a step."""
    if isinstance(value, Mapping):
        return [address for item in value.values() for address in _addresses(option, item)]
    if isinstance(value, list | tuple):
        return [address for item in value for address in _addresses(option, item)]
    if option.name == "allow_host" and is_local(str(value)):  # no page of the internet has such a name
        return []
    if option.flag.metavar == "URL" or option.name in _LISTENS:
        return [str(value)]
    found = address_in(value) if _HAVE_ADDRESS.fullmatch(option.name) else None
    return [] if found is None else [found]


def _leaves(address: str) -> bool:
    """Whether an address is of another machine than this one and the provider's."""
    return not (address == PROVIDER or address.startswith("sqlite:") or is_loopback(address))


def _forms(option: Option | None, value: Any) -> list[Any]:
    """A value as it is in the file and as a settings object stores it: of `thinking = 0` that is `off`."""
    if option is None or option.parse is None:
        return [value]
    try:
        return [value, option.parse(value)]
    except (TypeError, ValueError):  # wrong for this command, which will refuse it
        return [value]


@functools.cache
def commands_with_settings() -> Sequence[str]:
    """The commands that take settings from the file, by their words."""
    return [words for words in (*COMMANDS, *SHORT_FORMS) if _options(words)]


@functools.cache
def _options(command: str) -> Mapping[str, Option]:
    """The options that a command takes from the file, by key."""
    words, fixed = long_form(command)
    options = options_of(command_class(words))
    return {name: option for name, option in options.items() if option.flag.key and name not in fixed}


def _of_command(command: str, tables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables of a command: its group's, that of what a short form stands for, then its own."""
    words = [part for form in dict.fromkeys((long_form(command)[0], command)) for part in _prefixes(form)]
    return [reduce(lambda table, part: table.get(part, {}), form.split(), tables) for form in dict.fromkeys(words)]


def _prefixes(words: str) -> list[str]:
    parts = words.split()
    return [" ".join(parts[: at + 1]) for at in range(len(parts))]


def _of_roles(command: str, tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The models of the roles as settings of a command; a judge without a model uses the program's."""
    default_role = getattr(command_class(command), "ROLE", "program")
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


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _tables(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProjectError(f"{path} cannot be read: {error}") from error


@functools.lru_cache(maxsize=4)  # help about an unknown option asks for the settings of every command
def _tables(path: Path, text: str) -> Mapping[str, Any]:
    """The tables of a project file, checked."""
    tables = tomllib.loads(text)
    commands = tuple(dict.fromkeys(name.split()[0] for name in commands_with_settings()))
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
        for command in commands_with_settings()
        if name == "defaults" or command == name or (command.startswith(f"{name} ") and name not in ROLES)
    ]
    known: dict[str, tuple[Option, ...]] = {}
    for command in commands:
        for key, option in _options(command).items():
            known[key] = (*known.get(key, ()), option)
    if name in ROLES:
        known = {key: (option,) for key, option in _options("run").items() if key in _ROLE_KEYS}
    inner = [command.split()[1] for command in commands_with_settings() if command.startswith(f"{name} ")]
    for key, value in table.items():
        if key in inner and isinstance(value, dict):
            _check_keys(
                f"{path}: [{name}.{key}]", value, {k: (option,) for k, option in _options(f"{name} {key}").items()}
            )
        else:
            _check_keys(f"{path}: [{name}]", {key: value}, known, inner)


def _check_keys(
    where: str, table: Mapping[str, Any], known: Mapping[str, Sequence[Option]], also: Sequence[str] = ()
) -> None:
    """Commands may declare a setting differently; a value is wrong if it fits none of the declarations."""
    for key, value in table.items():
        if key not in known:
            flag = f"--{key.replace('_', '-')}"
            named = [name for name, options in known.items() if any(option.flag_name == flag for option in options)]
            hint = f"{flag} is the key {named[0]!r}" if named else _hint(key, [*known, *also])
            raise ProjectError(f"{where} has no setting {key!r}; {hint}")
        errors = [error for option in known[key] if (error := _misfit(option, value)) is not None]
        if len(errors) == len(known[key]):
            raise ProjectError(f"{where} {errors[0]}")


def _misfit(option: Option, value: Any) -> str | None:
    try:
        option.checked(value)
    except ConfigError as error:
        return str(error)
    return None


def _hint(name: str, names: Collection[str]) -> str:
    if similar := nearest(name, names):
        return f"did you mean {similar!r}?"
    if len(names) > _MOST_LISTED:
        return "`assay COMMAND --help` lists those of a command: --val-size is val_size"
    return f"there are {', '.join(names)}"
