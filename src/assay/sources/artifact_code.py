"""Checks on Python files and rubrics inside of an artifact: they run only if the artifact is trusted.

This holds whichever way the file is named. Does not load artifacts. `assay.sources.modules` calls it before running a
file.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Manifest hashes of artifacts whose code this process was allowed to run. Their modules may be imported later, and in
# any thread.
_running: set[str] = set()


def around(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The innermost artifact that contains a file, and its manifest (not verified against the files).

    Other folders with a `manifest.json` do not count. None if there is none.

    Raises:
        ArtifactError: the manifest was changed, or has another format.
    """
    for folder in path.resolve().parents:
        if (folder / "manifest.json").is_file() and (manifest := _manifest(folder)) is not None:
            return folder, manifest
    return None


def _manifest(folder: Path) -> dict[str, Any] | None:
    from assay.errors import ArtifactError
    from assay.sources.artifact_files import check_artifact_format, hash_of_manifest, read_json

    try:
        manifest = read_json(folder / "manifest.json", folder)
    except ArtifactError:
        return None  # not an artifact that could be loaded
    if not isinstance(manifest.get("format"), int) or not all(
        isinstance(manifest.get(key), str) for key in ("sha256", "program")
    ):
        return None  # the manifest of an export, or of something else
    check_artifact_format(manifest, folder)
    if manifest["sha256"] != hash_of_manifest(manifest):
        raise ArtifactError(
            f"{folder}: manifest.json was changed after the artifact was written: compile again, or restore the file"
        )
    return manifest


def listed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of an artifact's source and rubric files, by their paths inside of the artifact."""
    source = manifest.get("source")
    groups = {
        "source": source.get("files") if isinstance(source, dict) else None,
        "rubric": manifest.get("rubric_files"),
    }
    return {
        f"{kind}/{place}": sha
        for kind, files in groups.items()
        if isinstance(files, dict)
        for place, sha in files.items()
    }


def check_source(path: Path, *, imported: bool = False) -> None:
    """Check that a Python file may run: it is in no artifact, or is unchanged and its artifact is trusted.

    Args:
        imported: the file is imported by code that already runs; an artifact that was allowed is not checked again.
    Raises:
        ArtifactError: the manifest does not list the file, or the file was changed.
        UntrustedArtifact: the artifact is not trusted.
    """
    if (artifact := around(path)) is None:
        return
    from assay.errors import ArtifactError
    from assay.sources import trust

    folder, manifest = artifact
    place = path.resolve().relative_to(folder).as_posix()
    if (sha := listed(manifest).get(place)) is None:
        raise ArtifactError(
            f"{folder}: {place} is not in the artifact's manifest, so it is not run. "
            "Move your own files to another folder"
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha:
        raise ArtifactError(
            f"{folder}: {place} was changed after the artifact was written: compile again, or restore the file"
        )
    content = manifest["sha256"]
    if not (imported and content in _running):
        trust.demand(content, folder, f"contains Python code that would be run ({place})")
        _running.add(content)


def named_code(value: Any, key: str = "") -> Iterator[str]:
    """Names of code in the content of a rubric's or judge's YAML file: checks and judges that are not part of assay."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from named_code(item, str(inner))
    elif isinstance(value, list):
        for item in value:
            yield from named_code(item, key)
    elif isinstance(value, str) and ":" in value:
        judge = key in ("use", "first", "second", "members") and (
            " " not in value.strip() or re.search(r"\.ya?ml:\w+$", value, re.IGNORECASE)
        )
        if key in ("check", "metric") or judge:
            yield value
