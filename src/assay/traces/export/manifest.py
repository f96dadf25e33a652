"""Reads and checks the manifest of an export. `assay.traces.export.pipeline` writes it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from assay.errors import DataError
from assay.support.formats import check_format

__all__ = ["FORMAT", "checked_manifest"]

FORMAT = 1


def checked_manifest(folder: Path, required_kind: str) -> dict[str, Any]:
    """Read the manifest of an export and check its kind, its format and the hash of its data file.

    Args:
        folder: Folder of the export.
        required_kind: Required kind of export, such as `sft` or `transitions`.
    Raises:
        DataError: The folder is not an export, or it has another kind, another format or changed data.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        kind, version, files, _ = manifest["kind"], manifest["format"], manifest["files"], manifest["passed"]
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not an export: it has no manifest.json. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/manifest.json cannot be read as the manifest of an export: {type(error).__name__}: {error}. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        ) from error
    check_format(f"the export {folder}", version, FORMAT, remake="export again", error=DataError)
    if kind != required_kind:
        raise DataError(
            f"{folder} is an export for {kind}, not for {required_kind}. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        )
    with open(folder / "data.jsonl", "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != files.get("data.jsonl", {}).get("sha256"):
            raise DataError(
                f"{folder}/data.jsonl was changed after the export, so its gates and privacy checks no longer apply. "
                f"Export again"
            )
    return manifest
