"""Python files and rubrics that lie in an artifact: they are the artifact's, however they are named, and need its trust.

Does not load artifacts. It is asked by `assay.sourcecode` before a file runs, and imports `assay.deployment` only where an artifact is around.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["around", "check_source", "listed", "named_code"]

_running: set[str] = set()  # contents whose code this process was allowed to run: their further modules may be imported later, in any thread


def around(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The innermost artifact that a file lies in, and its manifest as it is written. Other folders with a `manifest.json` are none.

    Raises:
        ArtifactError: its manifest was changed.
    """
    for folder in path.resolve().parents:
        if (folder / "manifest.json").is_file() and (manifest := _manifest(folder)) is not None:
            return folder, manifest
    return None


def _manifest(folder: Path) -> dict[str, Any] | None:
    from assay.deployment.reading import hash_of_manifest, read_json
    from assay.errors import ArtifactError

    try:
        found = read_json(folder / "manifest.json", folder)
    except ArtifactError:
        return None  # nothing can be loaded from there
    if not isinstance(found.get("format"), int) or not all(isinstance(found.get(key), str) for key in ("sha256", "program")):
        return None  # of an export, or of something else
    if found["sha256"] != hash_of_manifest(found):
        raise ArtifactError(f"{folder}: manifest.json was changed after the artifact was written: compile again, or restore the file")
    return found


def listed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes of an artifact's source and rubric files by their places in it."""
    source = manifest.get("source")
    groups = {"source": source.get("files") if isinstance(source, dict) else None, "rubric": manifest.get("rubric_files")}
    return {f"{kind}/{place}": sha for kind, files in groups.items() if isinstance(files, dict) for place, sha in files.items()}


def check_source(path: Path, *, imported: bool = False) -> None:
    """Passes where a Python file lies in no artifact, or is named in the artifact's manifest, as it was, and the content is trusted.

    Args:
        imported: by code that runs already; its artifact is not asked about again.
    Raises:
        ArtifactError: the manifest does not name it, or it was changed. UntrustedArtifact: the artifact is not trusted.
    """
    if (found := around(path)) is None:
        return
    from assay.deployment import trust
    from assay.errors import ArtifactError

    folder, manifest = found
    place = path.resolve().relative_to(folder).as_posix()
    if (sha := listed(manifest).get(place)) is None:
        raise ArtifactError(f"{folder}: {place} is not in the artifact's manifest, so it is not run. Move your own files to a folder of their own")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha:
        raise ArtifactError(f"{folder}: {place} was changed after the artifact was written: compile again, or restore the file")
    content = manifest["sha256"]
    if not (imported and content in _running):
        trust.demand(content, folder, f"holds Python code that would be run ({place})")
        _running.add(content)


def named_code(value: Any, key: str = "") -> Iterator[str]:
    """Names of code in what a rubric's or judge's YAML file says: checks that do not ship with assay, judges and members that are no data."""
    if isinstance(value, dict):
        for inner, one in value.items():
            yield from named_code(one, str(inner))
    elif isinstance(value, list):
        for one in value:
            yield from named_code(one, key)
    elif isinstance(value, str) and ":" in value:
        judge = key in ("use", "first", "second", "members") and (" " not in value.strip() or re.search(r"\.ya?ml:\w+$", value, re.IGNORECASE))
        if key == "check" or judge:
            yield value
