"""What happens to versions that hold the data of an erased person: they are named, or retired. Deletes no file."""

import itertools
from collections.abc import Collection
from typing import Any

from assay.deployment.deployments import Deployments

POLICIES = ("name", "retire")


def versions_of_erased(
    deployments: Deployments,
    person: Collection[str],
    folders: Collection[str],
    adapters: Collection[str],
    *,
    policy: str,
) -> list[dict[str, Any]]:
    """Names the registered versions, of all agents, that hold a person's data, or retires them.

    A retired version leaves all aliases but `champion`; a deployment of it that runs is rolled back. The champion stays
    in production, because an agent without one answers nobody: a person must deploy another version.

    Args:
        person: hashes of the data subject, see `subject_digests`.
        folders: artifacts that were made from the person's data.
        adapters: hashes of adapters that were trained on it.
    Returns:
        For each version: `version`, `artifact`, `retired`, `aliases` that named it, `is_champion`, and the id of the
        `deployment` that was rolled back, or None.
    """
    rows, registry = [], deployments.registry
    for version in itertools.chain.from_iterable(map(registry.versions, registry.agents())):
        if (
            set(version.people).isdisjoint(person)
            and version.artifact not in folders
            and set(version.adapters).isdisjoint(adapters)
        ):
            continue
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
