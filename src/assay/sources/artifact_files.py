"""Reads an artifact's files and verifies all of them against the manifest, before any is used. Runs no code.

Everything is bounded: the number of files and the size of each. Only plain files are allowed. A malicious folder can
therefore neither exhaust the memory nor refer to files outside of it. Python files and rubrics inside of an artifact
run only if it is trusted, whichever way the file is named: `assay.sources.modules` asks before running a file.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, NoArtifact
from assay.support.names import is_within
from assay.support.places import write_whole
from assay.support.values import check_format

FORMAT = 2
SOURCE, RUBRIC, TEXTS = "source", "rubric", "texts"
PATCH = "changes.patch"  # of the files in `TEXTS`
_FILES = ("program.json", "splits.json", "report.md")
MAX_FILES = 10_000  # files in the whole folder
_MOST_DEPTH = 100  # of lists and objects within each other; code that reads them may be recursive
_MOST_BYTES = 256 * 2**20  # bytes of one file; the state of a program with its demonstrations is a few MB
_CHANGED = (
    "was changed after the artifact was written. Compile again, or restore the file: "
    "the scores belong to the program as it was"
)


def is_artifact(path: str | Path) -> bool:
    """Whether a path looks like an artifact's folder."""
    return bool(path) and (Path(path) / "manifest.json").is_file()


def check_artifact_format(manifest: Mapping[str, Any], folder: Path) -> None:
    """Raises `NoArtifact` if the manifest has no format number, `ArtifactError` if it has another format."""
    if not isinstance(version := manifest.get("format"), int):
        raise NoArtifact(f"{folder}: manifest.json has no format number: it is not an assay artifact")
    if manifest.get("kind") in ("sft", "grpo", "preferences", "transitions") and "program" not in manifest:
        raise NoArtifact(f"{folder} is an export, not an artifact")
    check_format(f"the artifact {folder}", version, FORMAT, remake="compile again", error=ArtifactError)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Manifest of an artifact, not verified against its files.

    Raises:
        ArtifactError: not an artifact, or one of another format.
    """
    manifest = read_json(folder / "manifest.json", folder)
    check_artifact_format(manifest, folder)
    return manifest


def unproven_note(name: str | Path, facts: Mapping[str, Any] | None = None) -> str | None:
    """A note on an artifact that gate did not show to be better than its baseline, or that a migration did not show to
    be no worse than its parent; None for others.

    Args:
        name: folder of the artifact, or the name of a version.
        facts: its manifest, or the version's evidence; None: the manifest in the folder, if there is one.
    """
    if facts is None:
        folder = Path(name)
        facts = read_json(folder / "manifest.json", folder) if (folder / "manifest.json").is_file() else {}
    if not facts.get("unproven"):
        return None
    result = facts.get("result")
    if isinstance(result, Mapping) and "verdict" in result:
        return f"{name} is unproven: compared with the artifact that it was migrated from, it is {result['verdict']!r}"
    return f"{name} is unproven: its gate did not show that it is better than its baseline, which is stored beside it"


def verified(folder: Path) -> dict[str, Any]:
    """Manifest of an artifact, after verifying all files against it.

    Raises:
        ArtifactError: not an artifact; another format; a file is missing, changed, too large or not in the manifest; or
            the folder contains a link.
    """
    manifest = read_manifest(folder)
    if manifest.get("sha256") != hash_of_manifest(manifest):
        raise ArtifactError(f"{folder}: manifest.json {_CHANGED}")
    _check_plain(folder)
    hashes = _mapping(manifest, "files", folder)
    for name in (*_FILES, *([PATCH] if PATCH in hashes else [])):
        if _hash_of_file(folder / name, folder) != hashes.get(name):
            raise ArtifactError(f"{folder}: {name} {_CHANGED}")
    _check_files(folder, RUBRIC, _mapping(manifest, "rubric_files", folder))
    _check_files(folder, TEXTS, _mapping(manifest, "text_files", folder))
    source = _mapping(manifest, "source", folder)
    if source:
        files = _mapping(source, "files", folder)
        _check_files(folder, SOURCE, files)
        places = _mapping(source, "names", folder)
        if unlisted := [name for name, place in places.items() if str(place).rpartition(":")[0] not in files]:
            raise ArtifactError(f"{folder}: the source of {unlisted[0]!r} is not in the manifest: compile again")
    return manifest


def resealed(folder: Path, shown: Mapping[str, Any]) -> str:
    """Writes the hashes of an artifact's files, of which some were changed on purpose, into its manifest.

    Args:
        shown: the manifest's entry about the tasks that its demonstrations show.
    Returns:
        The new hash of the manifest.
    """
    manifest = read_json(folder / "manifest.json", folder)
    groups: dict[str, dict[str, Any]] = {
        "": manifest.get("files") or {},
        RUBRIC: manifest.get("rubric_files") or {},
        TEXTS: manifest.get("text_files") or {},
        SOURCE: (manifest.get("source") or {}).get("files") or {},
    }
    before = dict(groups[TEXTS])
    for place in before:
        groups[TEXTS][place] = _hash_of_file(folder / TEXTS / place, folder)
    if groups[TEXTS] != before:  # the patch has the removed texts too, in a form that is not searched
        (folder / PATCH).unlink(missing_ok=True)
        groups[""].pop(PATCH, None)
    for kind, files in groups.items():
        for place in files:
            files[place] = _hash_of_file(folder / kind / place, folder)
    manifest |= {"shown": dict(shown)} if shown else {}
    manifest["sha256"] = hash_of_manifest(manifest)
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False))
    return str(manifest["sha256"])


def code_of(manifest: Mapping[str, Any], kind: str = SOURCE) -> list[str]:
    """Paths of the files of an artifact's source, or of its rubric, that run as code; data files are left out."""
    if kind == RUBRIC:
        return [f"{kind}/{place}" for place in manifest.get("rubric_files") or {} if place.endswith(".py")]
    source = manifest.get("source") or {}
    loaded = {str(place).rpartition(":")[0] for place in (source.get("names") or {}).values()}
    return [f"{kind}/{place}" for place in source.get("files") or {} if place.endswith(".py") or place in loaded]


def hash_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of_manifest(manifest: Mapping[str, Any]) -> str:
    """sha256 of the manifest without its own hash. It covers all files of the artifact, whose hashes it contains."""
    return hash_of_text(json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True))


def hash_of_files(files: Mapping[str, bytes]) -> dict[str, str]:
    return {place: hashlib.sha256(content).hexdigest() for place, content in files.items()}


def read_json(path: Path, folder: Path) -> dict[str, Any]:
    """The JSON object in a file of an artifact.

    Raises:
        NoArtifact: the file is missing.
        ArtifactError: it is too large, nested too deeply, or not a JSON object.
    """
    try:
        value = json.loads(_content(path, folder))
    except (FileNotFoundError, NotADirectoryError):
        why = (
            f"it has no {path.name}"
            if folder.is_dir()
            else "it is a file"
            if folder.is_file()
            else "there is no such folder"
        )
        raise NoArtifact(
            f"{folder} is not an artifact: {why}. `assay compile` and `assay tune` print the folder of their artifact"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} is not a JSON object")
    if _is_deeper(value, _MOST_DEPTH):
        raise ArtifactError(f"{path} has more than {_MOST_DEPTH} lists and objects within each other")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON is nested deeper than this. Visits every value once."""
    level = [value]
    for _ in range(levels):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _mapping(mapping: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    value = mapping.get(name)
    if not isinstance(value, dict | None):
        raise ArtifactError(f"{folder}: {name} in manifest.json is a {type(value).__name__}, not an object")
    return value or {}


def _content(path: Path, folder: Path) -> bytes:
    """Content of a plain file of limited size. Reading a pipe would block forever."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{folder}: {path.name} is not a plain file: artifacts contain no links and no devices")
    if status.st_size > _MOST_BYTES:
        raise ArtifactError(
            f"{folder}: {path.name} has {status.st_size / 2**20:.0f} MiB; the limit is {_MOST_BYTES // 2**20} MiB"
        )
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def _hash_of_file(path: Path, folder: Path) -> str:
    try:
        return hashlib.sha256(_content(path, folder)).hexdigest()
    except OSError as error:
        raise ArtifactError(f"{folder}: cannot read {path.relative_to(folder).as_posix()}: {error}") from None


def _check_plain(folder: Path) -> None:
    """Check that the folder contains only files and folders: the target of a link is not hashed, and may change."""
    waiting, count = [folder.resolve()], 0
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError as error:
            raise ArtifactError(f"cannot read {folder}: {error}") from None
        for entry in entries:
            count += 1
            if count > MAX_FILES:
                raise ArtifactError(f"{folder} has more than {MAX_FILES} files: it is not an assay artifact")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                place = Path(entry.path).relative_to(folder.resolve()).as_posix()
                raise ArtifactError(
                    f"{folder}: {place} is a link or a device; an artifact contains only plain files. "
                    "Copy the file itself"
                )


def _check_files(folder: Path, kind: str, files: Mapping[str, Any]) -> None:
    home = folder / kind
    present = {
        path.relative_to(home).as_posix()
        for path in home.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    if extra := sorted(present - files.keys()):
        raise ArtifactError(f"{folder}: {kind}/{extra[0]} is not in the manifest: remove it, or compile again")
    for place, sha in files.items():
        if not is_within(place):
            raise ArtifactError(f"{folder}: {kind}/{place} is outside of the artifact")
        if _hash_of_file(home / place, folder) != sha:
            raise ArtifactError(f"{folder}: {kind}/{place} {_CHANGED}")


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
