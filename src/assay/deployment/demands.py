"""The parts of an artifact that need the user's trust: its code, addresses, and values that could weaken a limit.

Does not store the trust: `assay.sources.trust` does. What artifacts may set is loaded, with DSPy, only for files of an
artifact.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, RubricError
from assay.sources import trust
from assay.sources.artifact_files import (
    RUBRIC,
    SOURCE,
    around,
    code_of,
    listed,
    named_code,
    verified,
)
from assay.support.yaml_files import MOST_BYTES, read_yaml

_MOST_NAMED = 8  # values in a message


def wants_trust(manifest: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether anything that can be done with an artifact needs the user's trust.

    Args:
        state: of its program.
    """
    from assay.deployment.allowed import has_address

    endpoint = (
        manifest.get("api_base") is not None
        or manifest.get("api_key_env") is not None
        or has_address(manifest.get("model"))
    )
    return (
        endpoint
        or bool(demands_of_values(manifest, state))
        or bool((manifest.get("source") or {}).get("files") or code_of(manifest, RUBRIC))
    )


def demand_trust(folder: Path, manifest: Mapping[str, Any], kind: str = SOURCE) -> None:
    """Raises `UntrustedArtifact` if untrusted Python files of an artifact would be run; the error names the files."""
    if code_of(manifest, kind) or (kind == SOURCE and (manifest.get("source") or {}).get("files")):
        code = [*code_of(manifest), *code_of(manifest, RUBRIC)]
        names = ", ".join(code[:8]) + (f" and {len(code) - 8} more" if len(code) > 8 else "")
        trust.demand(manifest["sha256"], folder, f"holds Python code that would be run ({names})")


def demands_of_values(manifest: Mapping[str, Any], state: Mapping[str, Any], *, builds: bool = True) -> list[str]:
    """Reasons why loading an artifact needs trust because of values in it, as text that follows the artifact's path.

    Args:
        builds: whether the program is built from its name and arguments.
    """
    from assay.deployment.allowed import imported_types, places_in, refused_arguments, refused_settings, refused_state

    config, reasons = manifest.get("config") if builds else None, list[str]()
    if types := imported_types(config):
        named = ", ".join(types[:_MOST_NAMED])
        reasons.append(f"would import modules for the types of its signature ({named}), which runs their code")
    if places := places_in(config):
        reasons.append(f"sends prompts to {places[0]!r}, which its arguments name")
    thinking = {} if manifest.get("thinking") is None else {"thinking": manifest["thinking"]}  # of a judge
    refused = [
        *refused_arguments(str(manifest.get("program")), config),
        *refused_settings(manifest.get("settings")),
        *refused_settings(thinking),
        *refused_state(state, manifest.get("config")),
    ]
    if refused:
        named = ", ".join(refused[:_MOST_NAMED])
        reasons.append(f"sets {named}, which could weaken a limit or protection")
    return reasons


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
    if not file.is_file() or file.stat().st_size > MOST_BYTES or not (references := named_in(place, file.read_bytes())):
        return
    if place not in listed(manifest := verified(folder)):
        raise ArtifactError(
            f"{folder}: {place} names {references[0]} and is not in the artifact's manifest. "
            "Move your own files to a folder of their own"
        )
    trust.demand(
        manifest["sha256"],
        folder,
        f"names code that would be run, a model, or a weaker limit, in {place} ({', '.join(references[:_MOST_NAMED])})",
    )


def named_in(place: str, content: bytes) -> list[str]:
    """What needs trust in a rubric or judge YAML file: code, models, and arguments that weaken a limit.

    Empty for other or unreadable files.
    """
    from assay.deployment.allowed import refused_judge, refused_with

    if not place.lower().endswith((".yaml", ".yml")) or len(content) > MOST_BYTES:
        return []
    try:
        entries = read_yaml(content.decode("utf-8"), place, RubricError)[0]
    except (RubricError, ValueError):
        return []
    named, waiting = list(named_code(entries)), [entries]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            arguments = part.get("with", part.get("with_"))
            named += [
                *refused_with(part.get("check"), arguments),
                *refused_with(part.get("metric"), arguments),
                *refused_judge(part),
            ]
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return named
