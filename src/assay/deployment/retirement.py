"""What happens to versions that hold the data of an erased person: they are named, or retired. Deletes no file."""

from collections.abc import Collection
from typing import Any

from assay.deployment.deployments import Deployments
from assay.deployment.registry import Version

POLICIES = ("name", "retire")


def versions_holding(
    deployments: Deployments, person: Collection[str], folders: Collection[str], adapters: Collection[str]
) -> list[Version]:
    """The registered versions, of all agents, that hold a person's data.

    Args:
        person: hashes of the data subject, see `subject_digests`.
        folders: artifacts that were made from the person's data.
        adapters: hashes of adapters that were trained on it.
    """
    registry = deployments.registry
    return [
        version
        for agent in registry.agents()
        for version in registry.versions(agent)
        if not set(version.people).isdisjoint(person)
        or version.artifact in folders
        or set(version.adapters) & set(adapters)
    ]


def versions_of_erased(
    deployments: Deployments,
    person: Collection[str],
    folders: Collection[str],
    adapters: Collection[str],
    *,
    policy: str,
) -> list[dict[str, Any]]:
    """Names the versions, or retires them.

    A retired version leaves all aliases but `champion`; a deployment of it that runs is rolled back. The champion stays
    in production, because an agent without one answers nobody: a person must deploy another version.

    Returns:
        For each version: `version`, `artifact`, `retired`, `aliases` that named it, `is_champion`, and the id of the
        `deployment` that was rolled back, or None.
    """
    rows = []
    for version in versions_holding(deployments, person, folders, adapters):
        registry = deployments.registry
        aliases = [alias for alias, number in registry.aliases(version.agent).items() if number == version.number]
        rolled_back = None
        if policy == "retire":
            rolled_back = deployments.retire(version, why="it holds data of an erased person")
        rows.append(
            {
                "version": version.name, "artifact": version.artifact, "retired": policy == "retire",
                "aliases": aliases, "is_champion": "champion" in aliases, "deployment": rolled_back,
            }
        )  # fmt: skip
    return rows
