"""Folders that belong to one job. The only place where folders are removed with what is in them.

A folder belongs to a job if it was made by `claim_folder`, which writes the job's id to a file in it, or is inside such
a folder. Every other folder is left as it is: it may be the user's.
"""

import shutil
from pathlib import Path

from assay.errors import ConfigError

MARKER = ".assay-job"


def check_claimable(folder: Path, job: str) -> None:
    """Raises `ConfigError` if a folder holds anything that this job has not made."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} exists and is not a folder: remove it, or take another name")
    if folder.is_dir() and any(folder.iterdir()) and _owner(folder) != job:
        raise ConfigError(
            f"{folder} holds files that this job has not made, and nothing of it is removed: move it, or take another "
            "name"
        )


def claim_folder(folder: Path, job: str) -> None:
    """Makes an empty folder that belongs to a job. What an earlier process of the same job left there is removed.

    Raises:
        ConfigError: the folder holds anything that this job has not made.
    """
    check_claimable(folder, job)
    remove_folder(folder, job)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(job, encoding="utf-8")  # first, so that a job that is killed can clean up


def remove_folder(folder: Path, job: str) -> None:
    """Removes a folder of a job with what is in it. Does nothing if the folder is not the job's, or missing."""
    if _owner(folder) == job:
        shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> str | None:
    """The job in the nearest marker at or above a folder; None without one, or behind a symbolic link."""
    if ".." in folder.parts:
        return None
    for place in (folder, *folder.parents):
        marker = place / MARKER
        if place.is_symlink() or marker.is_symlink():
            return None
        if marker.is_file():
            return marker.read_text(encoding="utf-8", errors="replace")
    return None
