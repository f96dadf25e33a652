"""Artifacts: a folder with the program's state (JSON, no pickle), a manifest and a report."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ArtifactError, ProgramError
from assay.judges import Judge
from assay.models import LanguageModel
from assay.programs import Agent, AgentParameters, program_state, restore_program
from assay.programs.compose import Configured, EnsembleProgram, NearestDemos, is_agent

__all__ = ["FORMAT", "Artifact", "check_pinned", "check_place", "load_artifact", "save_artifact"]

FORMAT = 1
_FILES = ("program.json", "splits.json", "report.md")


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact. `program` is ready to run under any language model; `manifest` says where it comes from."""

    path: Path
    program: dspy.Module
    manifest: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.manifest["settings"])

    def runnable(self) -> dspy.Module:
        """The program with the adapter and temperature it was compiled with."""
        return runnable(self.program, self.settings)


def runnable(program: dspy.Module, settings: dict[str, Any]) -> dspy.Module:
    """The program under its settings: an Agent has them itself, a plain module is wrapped."""
    if is_agent(program):
        return program
    return Configured(program, settings["adapter"], settings["parameters"].get("temperature"))


def save_artifact(folder: Path, program: dspy.Module, manifest: dict[str, Any], *, splits: dict[str, Any], report: str) -> Path:
    """Writes an artifact, whole or not at all. An existing folder of that name is left alone; a number is added.

    Args:
        manifest: needs `program` (its name) and `settings` (adapter and parameters).
    Raises:
        ArtifactError: the folder cannot be written.
    """
    inner = program
    while isinstance(inner, NearestDemos | EnsembleProgram):
        inner = inner.program if isinstance(inner, NearestDemos) else inner.members[0]
    config = inner.config if isinstance(inner, Agent | Judge) else {}
    texts = {
        "program.json": json.dumps(program_state(program), indent=1, ensure_ascii=False, default=str),
        "splits.json": json.dumps(splits),
        "report.md": report,
    }
    whole = {"format": FORMAT, **manifest, "config": config, "files": {name: _sha(text) for name, text in texts.items()}}
    whole = json.loads(json.dumps(whole, ensure_ascii=False, default=str))  # as it will be read, so that its hash is the same
    texts["manifest.json"] = json.dumps({**whole, "sha256": _manifest_sha(whole)}, indent=1, ensure_ascii=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".artifact-") as scratch:
            ready = Path(scratch) / "artifact"
            ready.mkdir()
            for name, text in texts.items():
                (ready / name).write_text(text, encoding="utf-8")
            return _place(ready, folder)
    except OSError as error:
        raise ArtifactError(f"cannot write the artifact to {folder}: {error}. Choose another folder with --out") from error


def check_place(folder: Path) -> None:
    """Raises `ArtifactError` where `save_artifact` could not write, before a run that would end there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".artifact-").cleanup()
    except OSError as error:
        raise ArtifactError(f"cannot write the artifact to {folder}: {error}. Choose another folder with --out") from error


def _place(ready: Path, folder: Path) -> Path:
    for number in range(1, 10_000):
        target = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            os.mkdir(target)  # of several processes only one gets the name
        except FileExistsError:
            continue
        for file in ready.iterdir():
            shutil.move(file, target / file.name)
        return target
    raise OSError(f"{folder} and its numbered names are all taken")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest_sha(manifest: dict[str, Any]) -> str:
    """Over everything in the manifest but this hash itself."""
    return _sha(json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True))


def check_pinned(artifact: Artifact, lm: LanguageModel) -> None:
    """Raises `ArtifactError` where the model goes by the artifact's name for it, and its adapters are no longer those it was measured with."""
    wanted, there = list(artifact.manifest.get("adapters") or ()), list(lm.recording.backend.adapters)
    if artifact.manifest["model"] == lm.recording.model and wanted != there:
        told = [", ".join(one[:12] + "…" for one in hashes) or "none" for hashes in (wanted, there)]
        raise ArtifactError(f"{artifact.path} was measured with the adapters {told[0]}, and {lm.recording.model} has {told[1]} now: measure it again")


def is_artifact(path: str | Path) -> bool:
    """Whether a path looks like an artifact's folder."""
    return (Path(path) / "manifest.json").is_file()


def load_artifact(path: str | Path, *, program: dspy.Module | None = None) -> Artifact:
    """Loads an artifact after checking it whole; into `program` where it cannot be built from its name alone.

    Raises:
        ArtifactError: no artifact there, of a newer format, a file missing or changed since it was written, or its
            program cannot be built here.
    """
    folder = Path(path)
    manifest = _read_json(folder / "manifest.json", folder)
    version = manifest.get("format")
    if not isinstance(version, int):
        raise ArtifactError(f"{folder}: manifest.json has no format number: it is no assay artifact")
    if version > FORMAT:
        raise ArtifactError(f"{folder} has format {version}, this assay reads up to {FORMAT}: update assay")
    changed = (
        "was changed after the artifact was written. Compile again, or restore the file: a changed program is no longer the one that was measured"
    )
    if manifest.get("sha256") != _manifest_sha(manifest):
        raise ArtifactError(f"{folder}: manifest.json {changed}")
    for name in _FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{folder}: {name} cannot be read: {error}") from None
        if _sha(text) != manifest.get("files", {}).get(name):
            raise ArtifactError(f"{folder}: {name} {changed}")
    try:
        program = restore_program(manifest["program"], manifest["config"], _read_json(folder / "program.json", folder), program)
        settings = manifest["settings"]
        if is_agent(program):
            program.parameters, program.adapter = AgentParameters.of(settings["parameters"]), settings["adapter"]
    except ProgramError:
        raise
    except Exception as error:
        raise ArtifactError(f"{folder}: the program cannot be rebuilt: {type(error).__name__}: {error}") from error
    return Artifact(folder, program, manifest)


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{folder} is no artifact: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} does not hold an object")
    return found
