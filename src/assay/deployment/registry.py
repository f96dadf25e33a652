"""Versions of agents and their aliases, in the store.

A version is immutable: an artifact with its hash, model and adapters. An alias (`champion`, `candidate`, `previous`, or
one of your own) names a version; its history is kept. Does not run programs.
"""

import getpass
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.deployment.evidence import unit_digest
from assay.deployment.settings import Suite
from assay.errors import ArtifactError, ConfigError, DeploymentError
from assay.sources.artifact_files import unproven_note, verified
from assay.support.names import check_name, nearest
from assay.support.numbers import counted
from assay.support.report import Report
from assay.traces.store import tables as schema
from assay.traces.store.leases import present, seconds, writing
from assay.traces.store.rows import as_json, clean

RETIRED = "retired:"  # prefix of a flag; the number of the version follows
_EVIDENCE = 40  # printed lines of it
_LONGEST = 200  # of a user's name, the width of its column


@dataclass(frozen=True, kw_only=True, repr=False)
class Version(Report):
    """One version of an agent.

    Attributes:
        name: `AGENT@NUMBER`.
        agent: name of the agent.
        number: counts from 1.
        artifact: absolute path of the folder.
        sha256: of its manifest, which has the hashes of all its files.
        model: the model that it was compiled for.
        adapters: its trained adapters.
        parent: number of the version that it was made from.
        evidence: what it was registered with, such as gate, test and card.
        people: hashes of the data subjects whose data it holds.
        tenant: to which it belongs.
        registered_at: seconds since the epoch.
        registered_by: name of the user.
    """

    agent: str
    number: int
    artifact: str
    sha256: str
    model: str
    adapters: tuple[str, ...] = ()
    parent: int | None = None
    evidence: Mapping[str, Any]
    people: tuple[str, ...] = ()
    tenant: str | None = None
    registered_at: float
    registered_by: str

    @property
    def name(self) -> str:
        return f"{self.agent}@{self.number}"

    @property
    def note(self) -> str | None:
        """Note on a version that is unproven."""
        return unproven_note(self.name, self.evidence)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    def lines(self) -> Iterator[str]:
        yield f"{self.name}  {self.sha256[:12]}  {self.artifact}"

    def warnings(self) -> Iterator[str]:
        if self.note is not None:
            yield f"note: {self.note}"


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One change of an alias."""

    agent: str
    alias: str
    number: int
    at: float
    by: str
    why: str


@dataclass(frozen=True, kw_only=True, repr=False)
class VersionReport(Version):
    """A version with the history of aliases and flags of its agent.

    Attributes:
        problem: why it cannot be loaded on this machine (no folder, or a changed one); null if it can.
        aliases: number of the version by alias, of all aliases of the agent.
        alias_history: changes of aliases, oldest first.
        flags: feature flags of the agent.
        flag_history: changes of flags, oldest first.
    """

    problem: str | None
    aliases: dict[str, int]
    alias_history: list[Alias]
    flags: dict[str, Any]
    flag_history: list[dict[str, Any]]

    def lines(self) -> Iterator[str]:
        from assay.reports.markdown import result_lines
        from assay.reports.texts import leaf_texts, readable

        data = self.to_dict()
        for name in ("name", "artifact", "sha256", "model", "adapters", "parent", "tenant", "registered_by"):
            if data[name] not in (None, []):
                yield f"{name}: {data[name]}"
        if named := [alias for alias, number in self.aliases.items() if number == self.number]:
            yield f"aliases: {', '.join(named)}"
        evidence = data["evidence"]
        result = evidence.get("result")  # of an artifact; a person may have registered anything
        lines = list(result_lines(result)) if isinstance(result, dict) else []
        if lines:
            del evidence["result"]
        lines += [f"{name}: {text}" for name, text in leaf_texts(evidence)]
        yield "evidence (--json has all figures):" if lines else "evidence: none"
        yield from (f"  {readable(line)[:200]}" for line in lines[:_EVIDENCE])
        if len(lines) > _EVIDENCE:
            yield f"  and {counted(len(lines) - _EVIDENCE, 'more lines')}"
        for change in self.alias_history:
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(change.at))
            moved = f"= {change.agent}@{change.number}" if change.number else "removed"
            yield f"{at}  {change.alias} {moved}  {change.by}: {change.why}"
        yield from (f"flag {name} = {value}" for name, value in self.flags.items())

    def warnings(self) -> Iterator[str]:
        if self.problem is not None:
            yield f"note: {self.problem}"
        yield from super().warnings()


def current_user() -> str:
    """Name of the user who runs this process, for the history."""
    try:
        return getpass.getuser()[:_LONGEST]
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


class Registry:
    """Versions and aliases in the store of `engine`.

    Args:
        engine: of an open `Store`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    def register(
        self,
        agent: str,
        artifact: str | Path,
        *,
        parent: str | None = None,
        evidence: Mapping[str, Any] | None = None,
        people: Sequence[str] = (),
        tenant: str | None = None,
        by: str | None = None,
    ) -> Version:
        """Registers an artifact as the next version of an agent. The same artifact again is the same version.

        Args:
            people: hashes of data subjects whose data it may hold, besides those that the artifact names.
        Raises:
            ConfigError: `agent` is not a name, or `parent` no version.
            ArtifactError: the folder is not an artifact, or was changed after it was written.
        """
        check_name(agent, "agent", plain=True)
        folder = Path(artifact).resolve()
        manifest = verified(folder)
        if (manifest.get("config") or {}).get("delivery", "gateway") != "gateway":
            raise ConfigError(
                f"{artifact} has texts that the agent reads itself, which no gateway can replace",
                hint="Take them over where the agent runs: git apply changes.patch",
            )
        parent_number = self.version(parent).number if parent is not None else None
        row = {
            "agent": agent,
            "artifact": str(folder),
            "sha256": str(manifest["sha256"]),
            "model": str(manifest.get("model", "")),
            "adapters_json": as_json(list(manifest.get("adapters") or ())),
            "parent": parent_number,
            "evidence_json": as_json(evidence if evidence is not None else _evidence(manifest)),
            "people_json": as_json(sorted({*((manifest.get("shown") or {}).get("people") or ()), *people})),
            "tenant": tenant,
            "registered_at": present(self.engine),
            "registered_by": clean(by or current_user())[:_LONGEST],
        }
        return self._insert(agent, row)

    def _insert(self, agent: str, row: dict[str, Any]) -> Version:
        table = schema.agent_versions
        for _ in range(100):  # another process may take the number
            known = self.versions(agent)
            for version in known:
                if version.sha256 == row["sha256"]:  # the hash covers all files, wherever the folder is
                    return version
            number = max((version.number for version in known), default=0) + 1
            try:
                with writing(self.engine, "the version") as connection:
                    connection.execute(sa.insert(table).values(number=number, **row))
                return self.version(f"{agent}@{number}")
            except sa.exc.IntegrityError:
                continue
        raise DeploymentError(
            f"cannot register {agent!r}: other processes register versions at the same time; try again"
        )

    def reseal(self, before: str, after: str) -> None:
        """Follows an artifact from which an erasure removed texts: the hash of its manifest has changed.

        Nothing else of a version is ever changed.
        """
        table = schema.agent_versions
        with writing(self.engine, "the version") as connection:
            connection.execute(sa.update(table).where(table.c.sha256 == before).values(sha256=after))

    def agents(self) -> list[str]:
        """Names of all agents with a version."""
        column = schema.agent_versions.c.agent
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(column).distinct().order_by(column)).scalars())

    def versions(self, agent: str) -> list[Version]:
        """Versions of an agent, oldest first."""
        table = schema.agent_versions
        query = sa.select(table).where(table.c.agent == agent).order_by(table.c.number)
        with self.engine.connect() as connection:
            return [_version(row) for row in connection.execute(query).mappings()]

    def version(self, name: str) -> Version:
        """The version of `AGENT@NUMBER`, `AGENT@ALIAS` or `AGENT`, which is its champion.

        Raises:
            DeploymentError: there is none; the message names the nearest agent or the known aliases.
        """
        agent, _, which = str(name).partition("@")
        # Python reads no integer of more than 4,300 digits
        number = int(which[:20]) if which.isdecimal() else self.alias(agent, which or "champion")
        table = schema.agent_versions
        with self.engine.connect() as connection:
            query = sa.select(table).where(table.c.agent == agent, table.c.number == number)
            row = connection.execute(query).mappings().first() if number is not None and number < 2**31 else None
        if row is None:
            raise DeploymentError(self._unknown(agent, which))
        return _version(row)

    def _unknown(self, agent: str, which: str) -> str:
        known = self.versions(agent)
        if not known:
            agents = self.agents()
            hint = f" Did you mean {near!r}?" if (near := nearest(agent, agents)) else ""
            listed = f" There are {', '.join(agents)}." if agents and not hint else ""
            return f"no agent {agent!r} is registered.{hint}{listed} Register an artifact: assay registry register"
        aliases = ", ".join(f"{alias} (@{number})" for alias, number in self.aliases(agent).items()) or "none"
        return (
            f"agent {agent!r} has no version {which or 'champion'!r}; it has versions 1 to {known[-1].number} and the "
            f"aliases {aliases}"
        )

    def alias(self, agent: str, alias: str) -> int | None:
        """Number of the version that an alias names; None if there is no such alias."""
        table = schema.agent_aliases
        query = (
            sa.select(table.c.number)
            .where(table.c.agent == agent, table.c.alias == alias)
            .order_by(table.c.id.desc())
            .limit(1)
        )
        with self.engine.connect() as connection:
            return connection.execute(query).scalar() or None

    def aliases(self, agent: str) -> dict[str, int]:
        """Version number by alias, as they are now."""
        with self.engine.connect() as connection:
            return aliases_in(connection, agent)

    def alias_history(self, agent: str) -> list[Alias]:
        """All changes of an agent's aliases, oldest first; the number 0 says that the alias was removed."""
        table = schema.agent_aliases
        query = sa.select(table).where(table.c.agent == agent).order_by(table.c.id)
        with self.engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return [Alias(**{key: value for key, value in row.items() if key != "id"}) for row in rows]

    def set_alias(self, name: str, alias: str, *, why: str = "", by: str | None = None) -> Version:
        """Lets an alias name a version.

        Args:
            name: `AGENT@NUMBER` or `AGENT@ALIAS`.
        """
        check_name(alias, "alias", plain=True)
        if alias.isdecimal():
            raise ConfigError(f"`alias={alias!r}` must not be a number, which names a version")
        version = self.version(name)
        with writing(self.engine, "the alias") as connection:
            lock_version(connection, version.agent, version.number)
            check_not_retired_in(connection, version.agent, version.number)
            move_alias(connection, version.agent, alias, version.number, by=by or current_user(), why=why)
        return version

    def retired(self, agent: str) -> dict[int, str]:
        """Numbers of the retired versions of an agent, with the reasons."""
        with self.engine.connect() as connection:
            return retired_in(connection, agent)

    def runs_elsewhere(self, name: str) -> bool:
        """Whether a version has texts of an agent that was written with anything, which no assay command runs.

        Args:
            name: as of `version`.
        Raises:
            DeploymentError: there is no such version, or it cannot be loaded.
        """
        return verified(self.folder_of(self.version(name))).get("agent") is not None

    def problem_of(self, version: Version) -> str | None:
        """Why a version cannot be loaded on this machine: its folder is not there, or was changed; None if it can."""
        try:
            self.folder_of(version)
        except DeploymentError as error:
            return str(error)
        return None

    def is_here(self, version: Version) -> bool:
        """Whether a folder of this version is on this machine, changed or not."""
        return any((place / "manifest.json").is_file() for place in _places(version))

    def folder_of(self, version: Version) -> Path:
        """The folder of a version, after verifying that it is what was registered.

        It is looked for where it was registered, and by its name in `ASSAY_ARTIFACTS` and `.assay/artifacts`, so that
        another machine needs only the store and the folder.

        Raises:
            DeploymentError: it is not there, or was changed after the registration.
        """
        places = _places(version)
        problem: object = f"no artifact at {' or '.join(map(str, places))}"
        for place in places:
            try:
                if verified(place)["sha256"] == version.sha256:
                    return place
                problem = f"{place} is another artifact than the registered one: register it as a new version"
            except ArtifactError as error:
                if (place / "manifest.json").is_file():
                    problem = error
        raise DeploymentError(f"{version.name} cannot be loaded: {problem}")


def _places(version: Version) -> list[Path]:
    """Where the folder of a version may be."""
    return [Path(version.artifact), *(place / Path(version.artifact).name for place in _artifact_folders())]


def _artifact_folders() -> list[Path]:
    named = os.environ.get("ASSAY_ARTIFACTS")
    return [*([Path(named)] if named else []), Path(".assay") / "artifacts"]


def move_alias(connection: sa.Connection, agent: str, alias: str, number: int, *, by: str, why: str) -> None:
    """Adds a row to the history of an alias, in the transaction of `connection`."""
    row = {"agent": agent, "alias": alias, "number": number, "at": seconds(connection), "by": clean(by)[:_LONGEST]}
    connection.execute(sa.insert(schema.agent_aliases).values(**row, why=clean(why)))


def aliases_in(connection: sa.Connection, agent: str) -> dict[str, int]:
    """Version number by alias, as the transaction of `connection` sees them."""
    table = schema.agent_aliases
    query = sa.select(table.c.alias, table.c.number).where(table.c.agent == agent).order_by(table.c.id)
    newest = {row.alias: row.number for row in connection.execute(query)}
    return {alias: number for alias, number in newest.items() if number}


def lock_version(connection: sa.Connection, agent: str, number: int) -> None:
    """Lets other processes wait that retire, deploy or name this version, until the transaction of `connection` ends.

    It must be the first statement of the transaction: on SQLite it takes the lock of the whole database.
    """
    table = schema.agent_versions
    same = sa.update(table).where(table.c.agent == agent, table.c.number == number).values(model=table.c.model)
    connection.execute(same)


def retired_in(connection: sa.Connection, agent: str) -> dict[int, str]:
    """Numbers of the retired versions of an agent, with the reasons, as the transaction of `connection` sees them."""
    table = schema.agent_flags
    query = sa.select(table.c.name, table.c.why).where(
        table.c.agent == agent, table.c.name.startswith(RETIRED, autoescape=True)
    )
    return {int(name.removeprefix(RETIRED)): why for name, why in connection.execute(query)}


def check_not_retired_in(connection: sa.Connection, agent: str, number: int) -> None:
    """Raises `DeploymentError` if a version is retired. After `lock_version` it cannot become so any more."""
    if (why := retired_in(connection, agent).get(number)) is not None:
        raise DeploymentError(f"{agent}@{number} is retired ({why}): make a new version without that data")


def retire_in(connection: sa.Connection, version: Version, *, why: str, by: str) -> None:
    """Retires a version permanently: no alias but `champion` keeps it, and none takes it again."""
    lock_version(connection, version.agent, version.number)
    flag = {
        "agent": version.agent, "name": f"{RETIRED}{version.number}", "value": "true", "at": seconds(connection),
        "by": clean(by)[:_LONGEST], "why": clean(why),
    }  # fmt: skip
    if version.number not in retired_in(connection, version.agent):
        connection.execute(sa.insert(schema.agent_flags).values(**flag))
    for alias, number in aliases_in(connection, version.agent).items():
        if number == version.number and alias != "champion":
            move_alias(connection, version.agent, alias, 0, by=by, why=f"{version.name} is retired: {why}")


def _evidence(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Scores with which an artifact was compiled."""
    return {name: manifest[name] for name in ("unproven", "rubric", "data", "result") if name in manifest}


def _version(row: Any) -> Version:
    plain = {key: value for key, value in row.items() if not key.endswith("_json")}
    return Version(
        **plain,
        adapters=tuple(json.loads(row["adapters_json"])),
        evidence=json.loads(row["evidence_json"]),
        people=tuple(json.loads(row["people_json"])),
    )


# -- Feature flags of agents: settable without a restart, every change a row.
#
# | flag | value | |---|---| | `kill` | true: everything goes to the champion | | `percentage` | share of the units on
# the candidate in per cent, in place of the step's | | `pin:unit:NAME`, `pin:tenant:NAME` | number of the version that
# a unit or tenant gets | | `exclude:unit:NAME`, `exclude:tenant:NAME` | true: always the champion, and not compared |
#
# Names of units are stored as digests.


_KINDS = ("kill", "percentage", "pin:unit:NAME", "pin:tenant:NAME", "exclude:unit:NAME", "exclude:tenant:NAME")
_LONGEST_NAME = 300  # width of the column


def set_flag(engine: sa.Engine, agent: str, name: str, value: bool | float | None, *, why: str = "") -> None:
    """Sets a flag of an agent; None removes it.

    Raises:
        ConfigError: there is no such flag, or `value` is not of its type.
        DeploymentError: there is no such agent, or no such version to pin.
    """
    stored = _stored(name)
    _check(Registry(engine), agent, name, value)
    write_flag(engine, agent, stored, value, why=why)


def write_flag(engine: sa.Engine, agent: str, stored: str, value: Any, *, why: str = "") -> None:
    """Adds a row under the name that is stored. Also for settings of an agent that are not flags of units, such as its
    validation suite; they are checked by who writes them."""
    row = {
        "agent": agent, "name": stored, "value": None if value is None else json.dumps(value),
        "by": clean(current_user()), "why": clean(why),
    }  # fmt: skip
    with writing(engine, "the flag") as connection:
        connection.execute(sa.insert(schema.agent_flags).values(**row, at=seconds(connection)))


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


# -- Validation suites in the store: kept with the flags of an agent, every change a row.


_FLAG = "suite"


def set_suite(engine: sa.Engine, agent: str, suite: Suite | None, *, why: str = "") -> None:
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
    write_flag(engine, agent, _FLAG, value, why=why)


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
