"""`assay registry`: versions of agents, aliases, flags, differences, capabilities."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from assay.commands.groups import InExistingStore, OfAgent
from assay.deployment.settings import Preference, PreferenceFields, Suite, SuiteThresholds
from assay.errors import ConfigError, DeploymentError
from assay.support.options import Flag, Parse, Settings, function_of
from assay.support.report import Report
from assay.support.values import json_text, json_value

if TYPE_CHECKING:
    from assay.deployment.registry import Version, VersionReport
else:
    Version = VersionReport = Any  # so that the types can be read without the heavy packages

_COMPARED = ("program", "version", "model", "adapters", "rubric", "judge_model", "data", "settings", "assay", "dspy")


class Reasoned(Settings):
    """Options."""

    reason: Annotated[str, Flag(key=False)] = ""
    """Reason, stored in the history."""


class Register(OfAgent):
    """Register the folder ARTIFACT as the next version of AGENT. The first version becomes its champion.

    With texts of an agent that was written with anything, its own texts are the first version.

    Raises:
        ArtifactError: the folder is not an artifact, or was changed.
        ConfigError: `agent` is not a name.
    """

    artifact: Annotated[str | Path, Flag(key=False)] = field(kw_only=False)
    """Folder of the artifact."""

    parent: Annotated[str | None, Flag(metavar="VERSION", key=False)] = None
    """Version that the new one was made from, such as support@1."""

    tenant: Annotated[str | None, Flag(key=False)] = None
    """Tenant that the version belongs to."""

    def run(self) -> Version:
        from assay.deployment.artifact import with_own_texts
        from assay.deployment.registry import Registry
        from assay.sources.artifact_files import verified
        from assay.traces.store import Store

        with Store(self.store) as store:
            registry, folder = Registry(store.engine), Path(self.artifact).resolve()
            parent, of_agent = self.parent, verified(folder).get("agent") is not None
            if of_agent and registry.alias(self.agent, "champion") is None:
                own = registry.register(self.agent, with_own_texts(folder), tenant=self.tenant)
                registry.set_alias(own.name, "champion", why="the agent's own texts")
                parent = parent or own.name
            version = registry.register(self.agent, folder, parent=parent, tenant=self.tenant)
            if registry.alias(self.agent, "champion") is None:
                registry.set_alias(version.name, "champion", why="first version")
            return version


@dataclass(frozen=True, kw_only=True, repr=False)
class VersionListing(Report):
    """Versions of agents.

    Attributes:
        versions: each as `registry register` shows it, with the aliases that name it.
    """

    none = "no agent is registered; assay registry register AGENT ARTIFACT registers one"

    versions: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        for row in self.versions:
            aliases = ", ".join(row["aliases"]) or "–"
            yield (f"{row['name']:24} {_when(row['registered_at'])}  {row['model']:28} {aliases:22} {row['artifact']}")

    def warnings(self) -> Iterator[str]:
        from assay.sources.artifact_files import unproven_note

        notes = (unproven_note(row["name"], row["evidence"]) for row in self.versions)
        yield from (f"note: {note}" for note in notes if note is not None)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class ListVersions(InExistingStore):
    """List the versions of AGENT, or of all agents: name, time, model, aliases, artifact."""

    agent: Annotated[str | None, Flag(key=False)] = field(default=None, kw_only=False)
    """Name of the agent."""

    def run(self) -> VersionListing:
        from assay.deployment.registry import Registry

        rows = []
        with self.opened() as store:
            registry = Registry(store.engine)
            for agent in [self.agent] if self.agent is not None else registry.agents():
                aliases, versions = registry.aliases(agent), registry.versions(agent)
                if not versions:
                    registry.version(agent)  # says what there is
                rows += [
                    {**one.to_dict(), "aliases": sorted(a for a, number in aliases.items() if number == one.number)}
                    for one in versions
                ]
        return VersionListing(versions=tuple(rows))


class ShowVersion(InExistingStore):
    """Show VERSION (AGENT@NUMBER, AGENT@ALIAS, or AGENT for its champion), and the history of its agent."""

    version: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """The version."""

    def run(self) -> VersionReport:
        from assay.deployment.registry import Registry, VersionReport, flag_history, flags_of

        with self.opened() as store:
            registry = Registry(store.engine)
            version = registry.version(self.version)
            return VersionReport(
                **vars(version), problem=registry.problem_of(version), aliases=registry.aliases(version.agent),
                alias_history=registry.alias_history(version.agent),
                flags=flags_of(store.engine, version.agent),
                flag_history=flag_history(store.engine, version.agent),
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class AliasReport(Report):
    """An alias that was set.

    Attributes:
        alias: its name.
        version: name of the version.
    """

    alias: str
    version: Version
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"alias": self.alias, "version": self.version.name}

    def lines(self) -> Iterator[str]:
        yield f"{self.alias} = {self.version.name}"

    def warnings(self) -> Iterator[str]:
        if self.problem is not None:
            yield f"note: {self.problem}"
        yield from self.version.warnings()


class SetAlias(InExistingStore, Reasoned):
    """Set ALIAS (champion, previous, or your own name) to VERSION.

    Raises:
        DeploymentError: there is no such version, it is retired, or its folder on this machine was changed. A folder
            that is elsewhere cannot be verified.
    """

    version: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """The version."""

    alias: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """The alias."""

    by: Annotated[str | None, Flag(key=False, shown=False)] = None
    """Who sets it; by default the user of this process."""

    def run(self) -> AliasReport:
        from assay.deployment.registry import Registry

        with self.opened() as store:
            registry = Registry(store.engine)
            version = registry.version(self.version)
            problem = registry.problem_of(version)
            if problem is not None and registry.is_here(version):
                raise DeploymentError(problem)
            version = registry.set_alias(self.version, self.alias, why=self.reason, by=self.by)
            return AliasReport(alias=self.alias, version=version, problem=problem)


@dataclass(frozen=True, kw_only=True, repr=False)
class FlagsReport(Report):
    """Feature flags of an agent.

    Attributes:
        flags: value by name.
    """

    flags: dict[str, Any]

    def lines(self) -> Iterator[str]:
        yield f"flags: {json_text(self.flags)}"


def _flag_value(value: Any) -> Any:
    if isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"must be true, false or a number, not {value!r}")
        return value.lower() == "true"
    return value


class SetFlag(OfAgent, InExistingStore, Reasoned):
    """Set the flag NAME of AGENT to VALUE; without VALUE remove it. It takes effect within a second,
    without a restart.

    Flags: kill (true: everything to the champion), percentage (share of the candidate), pin:unit:NAME and
    pin:tenant:NAME (a version's number), exclude:unit:NAME and exclude:tenant:NAME (true).
    """

    name: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """The flag."""

    value: Annotated[bool | float | str | None, Flag(key=False), Parse(_flag_value)] = field(
        default=None, kw_only=False
    )
    """true, false or a number."""

    def run(self) -> FlagsReport:
        from assay.deployment.registry import flags_of, set_flag

        value: Any = self.value
        with self.opened() as store:
            set_flag(store.engine, self.agent, self.name, value, why=self.reason)
            return FlagsReport(flags=flags_of(store.engine, self.agent))


@dataclass(frozen=True, kw_only=True, repr=False)
class SuiteReport(Report):
    """The validation suite of an agent.

    Attributes:
        suite: data, rubric and thresholds; null if the agent has none.
    """

    suite: Suite | None

    def lines(self) -> Iterator[str]:
        suite = json_text(json_value(self.suite))
        yield "the agent has no validation suite" if self.suite is None else f"validation suite: {suite}"


class SetSuite(OfAgent, InExistingStore, SuiteThresholds, Reasoned):
    """Set the validation suite that every candidate of AGENT must pass; without --data and --rubric show it.

    Raises:
        DataError, RubricError: there is no such file.
        DeploymentError: there is no such agent, or a file of the suite is missing or was changed.
    """

    data: Annotated[str | None, Flag(metavar="D", key=False)] = None
    """Tasks of the suite: a file or a spec. Their val split is run."""

    rubric: Annotated[str | None, Flag(metavar="R", key=False)] = None
    """Rubric of the suite: a YAML file or a shipped name."""

    remove: Annotated[bool, Flag(key=False)] = False
    """Remove the suite: candidates run without one."""

    def check(self) -> None:
        thresholds = self.changed("threshold", "pass_rate", "pass_at")
        if self.remove and (self.changed("data", "rubric") or thresholds):
            raise ConfigError("excludes the settings of a suite", field="remove")
        if (self.data is None) != (self.rubric is None):
            raise ConfigError("`data` and `rubric` belong together")
        if self.data is None and thresholds:
            raise ConfigError("would have no effect without `data` and `rubric`", field=thresholds[0])

    def run(self) -> SuiteReport:
        from assay.datasets.sources import check_data_exists
        from assay.deployment.registry import Registry, set_suite, suite_of
        from assay.rubrics.loading import check_rubric_exists

        suite = None
        if self.data is not None and self.rubric is not None:
            check_data_exists(self.data)
            check_rubric_exists(self.rubric)
            thresholds = {"threshold": self.threshold, "pass_rate": self.pass_rate, "pass_at": self.pass_at}
            suite = Suite(data=self.data, rubric=self.rubric, **thresholds)
        with self.opened() as store:
            if suite is None and not self.remove:
                Registry(store.engine).version(f"{self.agent}@1")
                return SuiteReport(suite=suite_of(store.engine, self.agent))
            set_suite(store.engine, self.agent, suite, why=self.reason)
        return SuiteReport(suite=suite)


@dataclass(frozen=True, kw_only=True, repr=False)
class RoutingReport(Report):
    """How versions are chosen.

    Attributes:
        routing: by task type and version the probability with which it is chosen, and the score it follows from.
    """

    none = "the agent has no routing: its champion gets all requests outside of a deployment"

    routing: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        for row in self.routing:
            score = "–" if row["score"] is None else f"{row['score']:.3f} of {row['n']}"
            yield f"{row['task_type']:20} {row['version']:24} {row['probability']:6.1%}  {score}"


class Route(OfAgent, InExistingStore, PreferenceFields, Reasoned):
    """Let the measured quality per task type choose between versions of AGENT; without --version show the choice.

    Versions must have been champions. An active deployment overrides it.

    Raises:
        DeploymentError: one of them was never the champion.
    """

    remove: Annotated[bool, Flag(key=False)] = False
    """Remove the routing: the champion gets all requests again."""

    def check(self) -> None:
        if self.remove and self.versions:
            raise ConfigError("`versions` and `remove` exclude each other")
        if not self.versions and (unused := self.changed("floor", "cost_weight")):
            raise ConfigError("would have no effect without `versions`", field=unused[0])

    def run(self) -> RoutingReport:
        from assay.deployment.registry import Registry, flags_of
        from assay.deployment.routing import Quality, preference_of, probabilities, qualities, set_preference

        preference = None
        if self.versions:
            preference = Preference(versions=self.versions, floor=self.floor, cost_weight=self.cost_weight)
        with self.opened() as store:
            if preference is not None or self.remove:
                set_preference(store.engine, self.agent, preference, why=self.reason)
            Registry(store.engine).version(f"{self.agent}@1")
            if (preference := preference_of(flags_of(store.engine, self.agent))) is None:
                return RoutingReport(routing=())
            measured = qualities(store.engine, self.agent, preference)
        rows = [
            {
                "task_type": kind, "version": f"{self.agent}@{number}", "probability": probability,
                "n": of.get(number, Quality()).count,
                "score": of[number].total / of[number].count if number in of else None,
            }
            for kind, of in sorted(measured.items())
            for number, probability in probabilities(preference, of).items()
        ]  # fmt: skip
        return RoutingReport(routing=tuple(rows))


@dataclass(frozen=True, kw_only=True, repr=False)
class VersionDiff(Report):
    """What differs between two versions.

    Attributes:
        a: the first version.
        b: the second version.
        changed: pairs of values of settings, model and data, by name.
        prompts: pairs of values of leaves of the program's state, by path.
        code: hashes of the program's source in both (null: the program is installed, and its code in no artifact), and
            the files that differ, with a unified difference.
    """

    a: str
    b: str
    changed: dict[str, list[Any]]
    prompts: dict[str, list[Any]]
    code: dict[str, Any]

    def lines(self) -> Iterator[str]:
        from assay.reports.texts import readable

        for name, (before, after) in {**self.changed, **self.prompts}.items():
            yield readable(f"{name}\n  - {before}\n  + {after}")
        for change in self.code["files"]:
            hashes = " -> ".join(sha256[:12] if sha256 else "missing" for sha256 in (change["a"], change["b"]))
            yield f"code {readable(change['file'])}: {hashes}"
            if change["diff"]:
                yield readable(change["diff"])
            if change["left_out"]:
                yield f"... {change['left_out']} more lines of the difference"

    def warnings(self) -> Iterator[str]:
        if not (self.changed or self.prompts or self.code["files"]):
            yield "no difference in settings, model, data, prompts or code"
        if installed := [name for name, side in ((self.a, "a"), (self.b, "b")) if self.code[side] is None]:
            yield f"the code of {' and '.join(installed)} is installed and not in the artifact: it is not compared"


class DiffVersions(InExistingStore):
    """Show what differs between the versions A and B: settings, model, data, prompts, code."""

    a: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """A version."""

    b: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Another version."""

    def run(self) -> VersionDiff:
        from assay.deployment.compatibility import code_changes
        from assay.deployment.registry import Registry
        from assay.sources.artifact_files import read_json, read_manifest

        with self.opened() as store:
            registry = Registry(store.engine)
            folders = [registry.folder_of(registry.version(name)) for name in (self.a, self.b)]
        manifests = [{name: read_manifest(folder).get(name) for name in _COMPARED} for folder in folders]
        states = [dict(_leaves(read_json(folder / "program.json", folder))) for folder in folders]
        return VersionDiff(
            a=self.a, b=self.b, changed=_pairs(_COMPARED, *manifests),
            prompts=_pairs(sorted({*states[0], *states[1]}), *states), code=json_value(code_changes(*folders)),
        )  # fmt: skip


def _pairs(names: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values that differ, by name."""
    pairs = {name: [before.get(name), after.get(name)] for name in names}
    return {name: [one, other] for name, (one, other) in pairs.items() if one != other}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested JSON with their paths."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}/{key}")


@dataclass(frozen=True, kw_only=True, repr=False)
class CapabilityReport(Report):
    """Measured scores of versions in production.

    Attributes:
        capabilities: by version and task type the mean score with its 95 % interval.
    """

    none = "no rollout of the agent in production so far"

    capabilities: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        for row in self.capabilities:
            score = "–" if row["score"] is None else f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            yield f"{row['version']:24} {row['task_type']:20} {score:24} {row['n']} scored, {row['unscored']} not"


class Capabilities(OfAgent, InExistingStore):
    """Show the scores of AGENT's versions in production, per task type, with 95 % intervals."""

    def run(self) -> CapabilityReport:
        import numpy as np
        import sqlalchemy as sa

        from assay.deployment.registry import Registry
        from assay.evaluation.statistics import interval_of
        from assay.traces.store import tables as schema

        columns = schema.rollouts.c
        query = (
            sa.select(columns.version, columns.task_type, columns.score)
            .where(
                columns.version.startswith(f"{self.agent}@", autoescape=True),
                columns.phase == "deployed",
                columns.ended_at.is_not(None),
            )
            .order_by(columns.version, columns.task_type)
        )
        values: dict[tuple[str, str], list[float | None]] = {}
        with self.opened() as store:
            Registry(store.engine).version(f"{self.agent}@1")
            with store.engine.connect() as connection:
                for version, kind, score in connection.execute(query):
                    values.setdefault((version, kind), []).append(score)
        rows = []
        for (version, kind), scores in values.items():
            known = [score for score in scores if score is not None and not math.isnan(score)]
            low, high = interval_of(np.array(known), 0.0, 1.0)
            mean = math.fsum(known) / len(known) if known else None
            counts = {"n": len(known), "unscored": len(scores) - len(known)}
            rows.append({"version": version, "task_type": kind, "score": mean, "low": low, "high": high, **counts})
        return CapabilityReport(capabilities=tuple(rows))


register = function_of(Register, "register")
agent_versions = function_of(ListVersions, "agent_versions")
show_version = function_of(ShowVersion, "show_version")
set_agent_alias = function_of(SetAlias, "set_agent_alias")
set_agent_flag = function_of(SetFlag, "set_agent_flag")
agent_suite = function_of(SetSuite, "agent_suite")
routing = function_of(Route, "routing")
diff_versions = function_of(DiffVersions, "diff_versions")
capabilities = function_of(Capabilities, "capabilities")
