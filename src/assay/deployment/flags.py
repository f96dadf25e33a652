"""Feature flags of agents: settable without a restart, every change a row.

| flag | value |
|---|---|
| `kill` | true: everything goes to the champion |
| `percentage` | share of the units on the candidate in per cent, in place of the step's |
| `pin:unit:NAME`, `pin:tenant:NAME` | number of the version that a unit or tenant gets |
| `exclude:unit:NAME`, `exclude:tenant:NAME` | true: always the champion, and not compared |

Names of units are stored as digests.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from assay.deployment.assignment import unit_digest
from assay.deployment.registry import Registry, current_user
from assay.errors import ConfigError
from assay.traces.store import tables as schema
from assay.traces.store.leases import writing
from assay.traces.store.rows import clean

_KINDS = ("kill", "percentage", "pin:unit:NAME", "pin:tenant:NAME", "exclude:unit:NAME", "exclude:tenant:NAME")
_LONGEST_NAME = 300  # width of the column


def set_flag(
    engine: sa.Engine, agent: str, name: str, value: bool | float | None, *, why: str = "", by: str | None = None
) -> None:
    """Sets a flag of an agent; None removes it.

    Raises:
        ConfigError: there is no such flag, or `value` is not of its type.
        DeploymentError: there is no such agent, or no such version to pin.
    """
    stored = _stored(name)
    _check(Registry(engine), agent, name, value)
    write_flag(engine, agent, stored, value, why=why, by=by)


def write_flag(engine: sa.Engine, agent: str, stored: str, value: Any, *, why: str = "", by: str | None = None) -> None:
    """Adds a row under the name that is stored. Also for settings of an agent that are no flags of units, such as its
    validation suite; they are checked by who writes them."""
    row = {
        "agent": agent, "name": stored, "value": None if value is None else json.dumps(value), "at": time.time(),
        "by": clean(by or current_user())[:200], "why": clean(why),
    }  # fmt: skip
    with writing(engine, "the flag") as connection:
        connection.execute(sa.insert(schema.agent_flags).values(**row))


def flags_of(engine: sa.Engine, agent: str) -> dict[str, Any]:
    """The flags of an agent as they are now."""
    flags = {change["name"]: change["value"] for change in flag_history(engine, agent)}
    return {name: value for name, value in flags.items() if value is not None}


def flag_history(engine: sa.Engine, agent: str) -> list[dict[str, Any]]:
    """All changes of an agent's flags, oldest first."""
    table = schema.agent_flags
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table).where(table.c.agent == agent).order_by(table.c.id)).mappings().all()
    return [{**row, "value": None if row["value"] is None else json.loads(row["value"])} for row in rows]


def matching(flags: Mapping[str, Any], kind: str, unit: str, tenant: str | None) -> Any:
    """Value of the flag of a kind (`pin`, `exclude`) for a unit's digest or a tenant; None if there is none."""
    value = flags.get(f"{kind}:unit:{unit}")
    return flags.get(f"{kind}:tenant:{tenant}") if value is None and tenant is not None else value


def _stored(name: str) -> str:
    kind, _, rest = name.partition(":")
    of, _, who = rest.partition(":")
    if (kind in ("kill", "percentage") and not rest) or (
        kind in ("pin", "exclude") and of in ("unit", "tenant") and who
    ):
        stored = f"{kind}:unit:{unit_digest(who)}" if of == "unit" else clean(name)
        if len(stored) <= _LONGEST_NAME:
            return stored
    raise ConfigError(f"there is no flag {name[:80]!r}: it must be one of {', '.join(_KINDS)}")


def _check(registry: Registry, agent: str, name: str, value: Any) -> None:
    registry.version(f"{agent}@1")
    if value is None:
        return
    if name.startswith(("kill", "exclude")):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r} must be a number")
    elif name == "percentage" and not 0 <= value <= 100:
        raise ConfigError(f"percentage={value!r} must be between 0 and 100")
    elif name.startswith("pin"):
        registry.version(f"{agent}@{int(value)}")
