"""Whether a candidate can replace the champion: inputs, outputs, tools, model, prompt format, context."""

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.deployment.artifact import Artifact
from assay.programs import program_fields
from assay.sources.artifact_files import RUBRIC, SOURCE, verified


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """What a candidate breaks for its callers, and what else changes.

    Attributes:
        outputs: what it breaks by the outputs that the programs declare; None if one of them declares none. What the
            programs answered says more, where it is known.
    """

    breaks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None


def compatibility(champion: Artifact, candidate: Artifact) -> Compatibility:
    """Compares the interface of two loaded artifacts.

    Other inputs, missing outputs and missing or changed tools break callers. Another model, prompt format, adapters or
    context length are changes. Runs neither program.
    """
    breaks, changes = [], []
    before, after = program_fields(champion.program), program_fields(candidate.program)
    if before and after and (after.missing(before.required) or before.inputs.keys() - after.inputs.keys()):
        breaks.append(f"inputs: the champion takes {sorted(before.inputs)}, the candidate {sorted(after.inputs)}")
    breaks += _other_texts(champion, candidate)
    tools, others = _tools(champion), _tools(candidate)
    if missing := sorted(tools.keys() - others.keys()):
        breaks.append(f"tools: the candidate has no {', '.join(missing)}")
    breaks += [
        f"tools: {name} takes {others[name]}, the champion's {tools[name]}"
        for name in sorted(tools.keys() & others.keys())
        if tools[name] != others[name]
    ]
    for name, values in _compared(champion, candidate).items():
        if values[0] != values[1]:
            changes.append(f"{name}: {values[0]!r} becomes {values[1]!r}")
    return Compatibility(breaks=tuple(breaks), changes=tuple(changes), outputs=_missing(champion, candidate))


def _other_texts(champion: Artifact, candidate: Artifact) -> list[str]:
    """That texts of an agent are looked for in its requests which the champion's version does not look for."""
    before, after = (
        {text["name"]: text["text"] for text in one.manifest["config"]["texts"]} if one.manifest.get("agent") else {}
        for one in (champion, candidate)
    )
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"texts: the candidate replaces other texts of the agent: {', '.join(changed)}"] if changed else []


def _missing(champion: Artifact, candidate: Artifact) -> tuple[str, ...] | None:
    before, after = _outputs(champion), _outputs(candidate)
    if before is None or after is None:
        return None
    missing = sorted(before - after)
    return (f"outputs: the candidate has no {', '.join(missing)}",) if missing else ()


def _outputs(artifact: Artifact) -> set[str] | None:
    """Output fields of the last predictor, which usually answers; None for a program without one."""
    predictors = artifact.program.predictors()
    return set(predictors[-1].signature.output_fields) if predictors else None


def _tools(artifact: Artifact) -> dict[str, Any]:
    """Argument names of each tool."""
    tools = getattr(artifact.program, "tools", None) or ()
    tools = tools.values() if isinstance(tools, Mapping) else tools
    return {
        str(tool.name): sorted(getattr(tool, "args", None) or ())
        for tool in tools
        if isinstance(getattr(tool, "name", None), str)
    }


def _compared(champion: Artifact, candidate: Artifact) -> dict[str, tuple[Any, Any]]:
    def facts(artifact: Artifact) -> dict[str, Any]:
        settings = artifact.settings
        return {
            **{name: artifact.manifest.get(name) for name in ("model", "adapters")},
            "prompt format": artifact.prompt_format,
            "context_length": settings["parameters"].get("context_length"),
        }

    of_candidate = facts(candidate)
    return {name: (value, of_candidate[name]) for name, value in facts(champion).items()}


# -- Differences of the code that two artifacts hold: of the program, and of the checks and judges of its rubric.
#
# Reads files; runs no code. The code of an installed or shipped program is in no artifact.


_MOST_BYTES = 200_000  # of a file that is shown as lines
_MOST_LINES = 400  # of one difference


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """One file that differs.

    Attributes:
        file: path in the artifact.
        a, b: sha256 of the file in each artifact; None where it is missing.
        diff: unified difference; empty for a binary or very long file.
        left_out: lines of the difference that are not in `diff`.
    """

    file: str
    a: str | None
    b: str | None
    diff: str = ""
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class CodeChanges:
    """What differs in the code of two artifacts.

    Attributes:
        a, b: hash of all source files of the program; None if the artifact has none, because its program is installed.
        files: the files that differ, also those of the rubric.
    """

    a: str | None
    b: str | None
    files: tuple[FileChange, ...] = ()


def code_changes(a: Path, b: Path) -> CodeChanges:
    """Compares the files of two artifacts.

    Raises:
        ArtifactError: one of them is not an artifact, or was changed.
    """
    one, two = verified(a), verified(b)
    of_a, of_b = _hashes(one), _hashes(two)
    files = [
        _change(place, (a, b), (of_a.get(place), of_b.get(place)))
        for place in sorted(of_a.keys() | of_b.keys())
        if of_a.get(place) != of_b.get(place)
    ]
    return CodeChanges(a=_code_hash(one), b=_code_hash(two), files=tuple(files))


def _hashes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of all source and rubric files by their path."""
    of_kind = {SOURCE: (manifest.get("source") or {}).get("files") or {}, RUBRIC: manifest.get("rubric_files") or {}}
    return {f"{kind}/{place}": sha256 for kind, files in of_kind.items() for place, sha256 in files.items()}


def _code_hash(manifest: Mapping[str, Any]) -> str | None:
    files = (manifest.get("source") or {}).get("files")
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest() if files else None


def _change(place: str, folders: tuple[Path, Path], hashes: tuple[str | None, str | None]) -> FileChange:
    texts = [_text(folder / place) if sha256 else "" for folder, sha256 in zip(folders, hashes, strict=True)]
    if texts[0] is None or texts[1] is None:
        return FileChange(file=place, a=hashes[0], b=hashes[1])
    lines = list(
        difflib.unified_diff(texts[0].splitlines(), texts[1].splitlines(), f"a/{place}", f"b/{place}", lineterm="")
    )
    return FileChange(
        file=place, a=hashes[0], b=hashes[1], diff="\n".join(lines[:_MOST_LINES]),
        left_out=max(0, len(lines) - _MOST_LINES),
    )  # fmt: skip


def _text(path: Path) -> str | None:
    """The text of a file; None if it is long or no text."""
    if path.stat().st_size > _MOST_BYTES:
        return None
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None
