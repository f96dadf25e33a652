"""Presets: settings of a search or training in a TOML file, shipped in `optimizers/` or a user's own copy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import ConfigError
from assay.support.names import nearest
from assay.support.options import Settings, options_of
from assay.support.package import CONTENT
from assay.support.places import no_such_file


def apply_preset(settings: Settings, field: str, *kinds: Any) -> None:
    """Fills in the settings of the preset that a field names; a setting that is not at its default stays as it is.

    The preset's own value of the field, such as `optimizer = "gepa"`, replaces its name.

    Args:
        field: its value is a path that ends in `.toml`, or the name of a shipped preset; other values are left.
        kinds: the classes whose own settings a preset may have.
    Raises:
        ConfigError: no such file, it is not valid TOML, or it has an unknown setting or a value out of range.
    """
    named = getattr(settings, field)
    owner: Any = type(settings)
    if not isinstance(named, str | Path):
        return
    path = Path(named)
    is_shipped = path.suffix != ".toml"
    if is_shipped:
        path = CONTENT / "optimizers" / f"{named}.toml"
        if not str(named).isidentifier() or not path.is_file():
            return
    values, declared = _read(path), options_of(owner)
    allowed = [name for name in declared if any(name in kind.__annotations__ for kind in kinds)]
    if field not in values:
        if is_shipped:  # a preset of another command
            return
        raise ConfigError(f"{path}: {field} is missing: it says what the settings are for")
    for name, value in values.items():
        if name not in allowed:
            near = nearest(name, allowed)
            hint = f"did you mean {near!r}?" if near else f"it may have {', '.join(allowed)}"
            raise ConfigError(f"{path}: unknown setting {name!r}; {hint}")
        try:
            stored = declared[name].checked(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        own = getattr(settings, name)
        if name == field or not settings.changed(name):
            object.__setattr__(settings, name, stored)
        elif isinstance(value, Mapping) and isinstance(own, Mapping):
            object.__setattr__(settings, name, {**value, **own})


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(no_such_file(path)) from None
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"{path} cannot be read: {error}") from None
