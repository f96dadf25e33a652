"""Validation suites in the store: kept with the flags of an agent, every change a row."""

import hashlib
from dataclasses import asdict
from pathlib import Path

import sqlalchemy as sa

from assay.deployment.flags import flags_of, write_flag
from assay.deployment.registry import Registry
from assay.deployment.suites import Suite
from assay.errors import ConfigError, DeploymentError

_FLAG = "suite"


def set_suite(engine: sa.Engine, agent: str, suite: Suite | None, *, why: str = "", by: str | None = None) -> None:
    """Sets the suite of an agent; None removes it. Files are kept by absolute path and hash.

    Raises:
        DeploymentError: there is no such agent.
    """
    Registry(engine).version(f"{agent}@1")
    value = None
    if suite is not None:
        named = {"data": _absolute(suite.data), "rubric": _absolute(suite.rubric)}
        hashes = {name: _hash(place) for name, place in named.items() if Path(place).is_file()}
        value = {**asdict(suite), **named, "sha256": hashes}
    write_flag(engine, agent, _FLAG, value, why=why, by=by)


def suite_of(engine: sa.Engine, agent: str) -> Suite | None:
    """The suite of an agent; None if it has none.

    Raises:
        DeploymentError: one of its files is missing on this machine, or was changed since.
    """
    if (stored := flags_of(engine, agent).get(_FLAG)) is None:
        return None
    for name, digest in stored.pop("sha256").items():
        place = Path(stored[name])
        if not place.is_file() or _hash(str(place)) != digest:
            raise DeploymentError(
                f"the validation suite of {agent!r} names {place}, which is missing here or was changed since: set the "
                f"suite again (assay registry suite {agent} --data D --rubric R)"
            )
    try:
        return Suite(**stored)
    except (TypeError, ConfigError) as error:
        raise DeploymentError(f"the validation suite of {agent!r} cannot be read: {error}") from None


def _absolute(place: str) -> str:
    return str(Path(place).absolute()) if Path(place).is_file() else place


def _hash(place: str) -> str:
    return hashlib.sha256(Path(place).read_bytes()).hexdigest()
