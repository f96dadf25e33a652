"""Public API for `assay registry`: versions of agents, aliases, flags, differences, capabilities."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.datasets.sources import check_data_exists
from assay.deployment.compatibility import code_changes
from assay.deployment.registry import Registry, Version, flag_history, flags_of, set_flag, set_suite, suite_of
from assay.deployment.routing import Quality, preference_of, probabilities, qualities, set_preference
from assay.deployment.settings import Preference, Suite
from assay.errors import ConfigError, DeploymentError
from assay.rubrics.loading import check_rubric_exists
from assay.runs.settings import RegisterSettings
from assay.sources.artifact_files import read_json, read_manifest
from assay.support.keywords import takes
from assay.traces import Store

_COMPARED = ("program", "version", "model", "adapters", "rubric", "judge_model", "data", "settings", "assay", "dspy")


@takes(RegisterSettings)
def register(
    agent: str, artifact: str | Path, *, parent: str | None = None, alias: str | None = None, tenant: str | None = None,
    store: str | Path | None = None,
) -> Version:  # fmt: skip
    """Registers an artifact as the next version of an agent. The first version becomes its champion.

    Args:
        parent: version from which it was made, such as `support@1`.
        alias: lets this alias name it.
    Raises:
        ArtifactError: the folder is no artifact, or was changed.
        ConfigError: `agent` is no name.
    """
    with Store(store) as opened:
        registry = Registry(opened.engine)
        version = registry.register(agent, artifact, parent=parent, tenant=tenant)
        if registry.alias(agent, "champion") is None:
            registry.set_alias(version.name, "champion", why="first version")
        if alias is not None:
            registry.set_alias(version.name, alias, why="registered so")
        return version


@takes()
def agent_versions(agent: str | None = None, *, store: str | Path | None = None) -> list[dict[str, Any]]:
    """Versions of one agent or of all, with the aliases that name them."""
    with Store(store) as opened:
        registry = Registry(opened.engine)
        rows = []
        for name in [agent] if agent is not None else registry.agents():
            aliases = registry.aliases(name)
            versions = registry.versions(name)
            if not versions:
                registry.version(name)  # says what there is
            rows += [
                {**version.to_dict(), "aliases": sorted(a for a, number in aliases.items() if number == version.number)}
                for version in versions
            ]
        return rows


@takes()
def show_version(name: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """A version with its evidence, and the history of aliases and flags of its agent.

    `problem` says why it cannot be loaded on this machine (no folder, or a changed one); None if it can.
    """
    with Store(store) as opened:
        registry = Registry(opened.engine)
        version = registry.version(name)
        history = [vars(change) for change in registry.alias_history(version.agent)]
        return {
            **version.to_dict(),
            "problem": registry.problem_of(version),
            "aliases": registry.aliases(version.agent),
            "alias_history": history,
            "flags": flags_of(opened.engine, version.agent),
            "flag_history": flag_history(opened.engine, version.agent),
        }


@takes()
def set_agent_alias(
    version: str, alias: str, *, reason: str = "", by: str | None = None, store: str | Path | None = None
) -> Version:
    """Lets an alias name a version.

    Raises:
        DeploymentError: there is no such version, it is retired, or its folder on this machine was changed. A folder
            that is elsewhere cannot be verified; see `problem` of `show_version`.
    """
    with Store(store) as opened:
        registry = Registry(opened.engine)
        named = registry.version(version)
        if registry.is_here(named) and (problem := registry.problem_of(named)) is not None:
            raise DeploymentError(problem)
        return registry.set_alias(version, alias, why=reason, by=by)


@takes()
def set_agent_flag(
    agent: str, flag: str, value: bool | float | None, *, reason: str = "", store: str | Path | None = None
) -> dict[str, Any]:
    """Sets a flag of an agent, see `assay.deployment.registry`. Returns its flags; None removes one."""
    with Store(store) as opened:
        set_flag(opened.engine, agent, flag, value, why=reason)
        return flags_of(opened.engine, agent)


@takes()
def agent_suite(agent: str, *, store: str | Path | None = None) -> Suite | None:
    """The validation suite of an agent; None if it has none.

    Raises:
        DeploymentError: there is no such agent, or a file of the suite is missing or was changed.
    """
    with Store(store) as opened:
        Registry(opened.engine).version(f"{agent}@1")
        return suite_of(opened.engine, agent)


@takes()
def set_agent_suite(
    agent: str, data: str | None = None, rubric: str | None = None, *, threshold: float = 0.0, pass_rate: float = 0.0,
    pass_at: float = 0.5, reason: str = "", store: str | Path | None = None,
) -> Suite | None:  # fmt: skip
    """Sets the validation suite that every candidate of an agent must pass before its deployment.

    Args:
        data, rubric: None for both removes the suite.
        threshold: mean score that is needed.
        pass_rate: share of the tasks that must score at least `pass_at`.
    Raises:
        ConfigError: one of `data` and `rubric` is missing.
        DataError, RubricError: there is no such file.
        DeploymentError: there is no such agent.
    """
    if (data is None) != (rubric is None):
        raise ConfigError("data and rubric belong together", flag="--data, --rubric")
    suite = None
    if data is not None and rubric is not None:
        check_data_exists(data)
        check_rubric_exists(rubric)
        suite = Suite(data=data, rubric=rubric, threshold=threshold, pass_rate=pass_rate, pass_at=pass_at)
    with Store(store) as opened:
        set_suite(opened.engine, agent, suite, why=reason)
    return suite


@takes()
def set_routing(
    agent: str, versions: Sequence[int], *, floor: float = 0.05, cost_weight: float = 0.0, window_days: float = 30.0,
    reason: str = "", store: str | Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Lets the measured quality per task type choose between versions of an agent that were champions.

    Args:
        versions: their numbers; none removes the preference.
        floor: smallest probability of a version.
        cost_weight: score that a dollar of a rollout's cost is worth.
        window_days: rollouts of so many days count.
    Returns:
        The probabilities, see `routing`.
    Raises:
        DeploymentError: one of them was never the champion.
    """
    if not isinstance(versions, Sequence):
        raise ConfigError(f"versions={versions!r} must be a list or tuple of integers")
    preference = None
    if versions:
        preference = Preference(versions=versions, floor=floor, cost_weight=cost_weight, window_days=window_days)
    with Store(store) as opened:
        set_preference(opened.engine, agent, preference, why=reason)
    return routing(agent, store=store)


@takes()
def routing(agent: str, *, store: str | Path | None = None) -> list[dict[str, Any]]:
    """Probabilities with which versions are chosen, by task type, with the scores that they follow from."""
    with Store(store) as opened:
        Registry(opened.engine).version(f"{agent}@1")
        if (preference := preference_of(flags_of(opened.engine, agent))) is None:
            return []
        measured = qualities(opened.engine, agent, preference)
    return [
        {
            "task_type": kind, "version": f"{agent}@{number}", "probability": probability,
            "n": of.get(number, Quality()).count,
            "score": of[number].total / of[number].count if number in of else None,
        }
        for kind, of in sorted(measured.items())
        for number, probability in probabilities(preference, of).items()
    ]  # fmt: skip


@takes()
def diff_versions(one: str, two: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """What differs between two versions.

    Returns:
        `changed` and `prompts` with pairs of values: settings, model, data, and leaves of the program's state. `code`
        has the hashes of the program's source in both (None: the program is installed, and its code in no artifact),
        and the files that differ, with a unified difference.
    """
    with Store(store) as opened:
        registry = Registry(opened.engine)
        folders = [registry.folder_of(registry.version(name)) for name in (one, two)]
    manifests = [read_manifest(folder) for folder in folders]
    states = [read_json(folder / "program.json", folder) for folder in folders]
    changed = {
        name: [manifest.get(name) for manifest in manifests]
        for name in _COMPARED
        if manifests[0].get(name) != manifests[1].get(name)
    }
    before, after = map(_flat, states)
    prompts = {
        path: [before.get(path), after.get(path)]
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    code = asdict(code_changes(*folders))
    return {"a": one, "b": two, "changed": changed, "prompts": prompts, "code": {**code, "files": list(code["files"])}}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested JSON by their paths."""
    if isinstance(value, Mapping):
        return {name: leaf for key, item in value.items() for name, leaf in _flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {name: leaf for at, item in enumerate(value) for name, leaf in _flat(item, f"{path}/{at}").items()}
    return {path: value}


@takes()
def capabilities(agent: str, *, store: str | Path | None = None) -> list[dict[str, Any]]:
    """Measured scores of an agent's versions in production, per task type, each with a 95 % interval."""
    import numpy as np
    import sqlalchemy as sa

    from assay.evaluation.statistics import interval_of
    from assay.traces.store import tables as schema

    columns = schema.rollouts.c
    query = (
        sa.select(columns.version, columns.task_type, columns.score)
        .where(
            columns.version.startswith(f"{agent}@", autoescape=True),
            columns.phase == "deployed",
            columns.ended_at.is_not(None),
        )
        .order_by(columns.version, columns.task_type)
    )
    with Store(store) as opened:
        Registry(opened.engine).version(f"{agent}@1")
        values: dict[tuple[str, str], list[float]] = {}
        with opened.engine.connect() as connection:
            for version, kind, score in connection.execute(query):
                values.setdefault((version, kind), []).append(math.nan if score is None else score)
    rows = []
    for (version, kind), scores in values.items():
        known = [score for score in scores if not math.isnan(score)]
        low, high = interval_of(np.array(known), 0.0, 1.0)
        mean = math.fsum(known) / len(known) if known else None
        rows.append(
            {"version": version, "task_type": kind, "score": mean, "low": low, "high": high, "n": len(known),
             "unscored": len(scores) - len(known)}
        )  # fmt: skip
    return rows
