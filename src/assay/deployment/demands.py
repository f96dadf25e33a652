"""The parts of an artifact that need the user's trust: its code, and addresses in its manifest or YAML files.

Does not store the trust: `assay.sources.trust` does.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.deployment.asking import has_address, imported_types, model_addresses, places_in
from assay.errors import ArtifactError, RubricError
from assay.rubrics.yaml_files import MOST_BYTES, read_yaml
from assay.sources import trust
from assay.sources.artifact_code import around, listed, named_code
from assay.sources.artifact_files import (
    RUBRIC,
    SOURCE,
    code_of,
    verified,
)

__all__ = ["code_named_in", "demand_trust", "demand_trust_around", "demands_of_config", "wants_trust"]


def wants_trust(manifest: Mapping[str, Any]) -> bool:
    """Whether anything that can be done with an artifact needs the user's trust."""
    endpoint = (
        manifest.get("api_base") is not None
        or manifest.get("api_key_env") is not None
        or has_address(manifest.get("model"))
    )
    return (
        endpoint
        or bool(demands_of_config(manifest))
        or bool((manifest.get("source") or {}).get("files") or code_of(manifest, RUBRIC))
    )


def demand_trust(folder: Path, manifest: Mapping[str, Any], kind: str = SOURCE) -> None:
    """Raises `UntrustedArtifact` if untrusted Python files of an artifact would be run; the error names the files."""
    if code_of(manifest, kind) or (kind == SOURCE and (manifest.get("source") or {}).get("files")):
        code = [*code_of(manifest), *code_of(manifest, RUBRIC)]
        names = ", ".join(code[:8]) + (f" and {len(code) - 8} more" if len(code) > 8 else "")
        trust.demand(manifest["sha256"], folder, f"holds Python code that would be run ({names})")


def demands_of_config(manifest: Mapping[str, Any]) -> list[str]:
    """Reasons why building the program from its arguments needs trust, as text that follows the artifact's path."""
    config = manifest.get("config")
    types, places = imported_types(config), places_in(config)
    imports = (
        [f"would import modules for the types of its signature ({', '.join(types[:8])}), which runs their code"]
        if types
        else []
    )
    return imports + ([f"sends prompts to {places[0]!r}, which its arguments name"] if places else [])


def demand_trust_around(path: str | Path) -> None:
    """Demands trust for a rubric or judge file inside an artifact, because the code it names would be run.

    Does nothing for files that are not inside an artifact.

    Raises:
        ArtifactError: the artifact was changed since it was written, or its manifest does not list the file.
        UntrustedArtifact: its code is not trusted.
    """
    # a rubric's judge is RUBRIC.yaml:NAME
    file = Path(re.sub(r"(\.ya?ml):\w+$", r"\1", str(path), flags=re.IGNORECASE)).resolve()
    if (enclosing := around(file)) is None:
        return
    folder, place = enclosing[0], file.relative_to(enclosing[0]).as_posix()
    if file.is_relative_to(folder / RUBRIC):
        demand_trust(folder, verified(folder), RUBRIC)
    if not file.is_file() or not (references := code_named_in(place, file.read_bytes())):
        return
    if place not in listed(manifest := verified(folder)):
        raise ArtifactError(
            f"{folder}: {place} names code ({references[0]}) and is not in the artifact's manifest. "
            "Move your own files to a folder of their own"
        )
    trust.demand(
        manifest["sha256"],
        folder,
        f"names code that would be run, or an address, in {place} ({', '.join(references[:8])})",
    )


def code_named_in(place: str, content: bytes) -> list[str]:
    """Code, and models with an address, that a rubric or judge YAML file names; empty for other or unreadable files."""
    if not place.lower().endswith((".yaml", ".yml")) or len(content) > MOST_BYTES:
        return []
    try:
        entries = read_yaml(content.decode("utf-8"), place)[0]
        return [*named_code(entries), *model_addresses(entries)]
    except (RubricError, ValueError):
        return []
