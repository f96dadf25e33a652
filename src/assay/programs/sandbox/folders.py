"""Files of a sandboxed process on the host, and what its process group uses.

Untrusted code chooses the names, modes and depth of what it leaves behind: nothing here recurses or follows links.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from assay.errors import ConfigError
from assay.support.names import is_within

__all__ = ["disk_use", "group_members", "proportional_memory", "remove_folder", "write_files"]

_DEEPEST = 64  # levels of folders; a deeper tree counts as too much disk
_MOST_ENTRIES = 20_000


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> int:
    """Writes files below a new folder and returns the bytes they use.

    Raises:
        ConfigError: a name is not relative, or leads out of the folder.
    """
    folder.mkdir()
    used = 0
    for name, content in files.items():
        if not is_within(name):
            raise ConfigError(f"the file name {name!r} must be a relative path within the folder")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        target.write_bytes(data)
        used += (len(data) // 4096 + 2) * 4096
    return used


def group_members(group: int) -> Iterator[tuple[int, int]]:
    """(pid, resident pages) of each process in a process group. Empty where there is no /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended
        if int(fields[2]) == group:  # state, parent, group; resident pages are the 22nd after the name
            yield int(name), int(fields[21])


def proportional_memory(pids: Sequence[int]) -> int:
    """Bytes of memory in which shared pages count once: a fork shares almost all."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def disk_use(folder: Path, pids: Sequence[int]) -> int:
    """Bytes on disk below a folder, with files that were deleted while open. A huge tree counts as unlimited."""
    used, entries, waiting = 0, 0, [(str(folder), 0)]
    while waiting:
        path, depth = waiting.pop()
        if depth > _DEEPEST or entries > _MOST_ENTRIES:
            return 2**62
        try:
            with os.scandir(path) as listing:
                for entry in listing:
                    entries += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError:
            continue  # it was removed meanwhile, or made unreadable
    return used + _deleted_but_open(folder, pids)


def _deleted_but_open(folder: Path, pids: Sequence[int]) -> int:
    seen = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                target = os.readlink(path)
                if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
                    status = os.stat(path)
                    seen[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(seen.values())


def remove_folder(folder: Path) -> None:
    """Removes a folder, whatever was left in it. A tree too deep for Python is removed by `rm`."""
    try:
        shutil.rmtree(folder)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        pass
    # It may be without rights for its owner, or nested thousands of levels deep.
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)
