"""Copies of the working directory with other texts, in which a command runs: it reads the texts from its own files.

Files are copied, not linked: Node's `import.meta.url` and Python's `Path(__file__).resolve()` would lead from a link to
the original. Only folders of dependencies are linked.
"""

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from assay.errors import ConfigError
from assay.support.values import digest_of

LINKED = frozenset(("node_modules", ".venv", "venv", "site-packages", "vendor"))  # installed packages
VERSION_CONTROL = frozenset((".git", ".hg", ".svn"))
LEFT_OUT = VERSION_CONTROL | {".assay", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".tox"}
_MOST_BYTES = 512 << 20  # of a copy
_KEPT = 8


class FolderCopies:
    """Copies of a folder, one for each set of texts. Of those that no run uses the eight that were used last stay; all
    are removed with this object.

    Args:
        root: the folder; by default the working directory.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or Path.cwd()).resolve()
        self._scratch = tempfile.TemporaryDirectory(prefix="assay-copies-")
        self._made: dict[str, Path] = {}  # in the order of their last use
        self._in_use = Counter[str]()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "FolderCopies":
        return self

    @contextmanager
    def used(self, files: Mapping[str, str]) -> Iterator[Path]:
        """Inside, the copy with these contents of files is there.

        Args:
            files: path -> content.
        Raises:
            ConfigError: a file is outside of the folder, or the folder is too large to be copied.
        """
        key = digest_of(dict(files))
        with self._lock:
            place = self._made.pop(key, None) or self._copied(files, Path(self._scratch.name) / key[:16])
            self._made[key] = place
            self._in_use[key] += 1
        try:
            yield place
        finally:
            with self._lock:
                self._in_use[key] -= 1
                unused = [other for other in self._made if not self._in_use[other]]
                for other in unused[:-_KEPT]:
                    shutil.rmtree(self._made.pop(other), ignore_errors=True)

    def _copied(self, files: Mapping[str, str], place: Path) -> Path:
        shutil.rmtree(place, ignore_errors=True)  # of an attempt that failed
        copy_folder(self.root, place)
        for name, content in files.items():
            (place / self._inside(name)).write_bytes(content.encode("utf-8"))
        return place

    def moved(self, words: Sequence[str], copy: Path) -> list[str]:
        """The words of a command with the absolute paths in the folder as those of the copy."""
        return [
            str(copy / Path(word).relative_to(self.root))
            if Path(word).is_absolute() and Path(word).is_relative_to(self.root)
            else word
            for word in words
        ]

    def _inside(self, name: str) -> Path:
        path = Path(name).resolve()
        if not path.is_relative_to(self.root):
            raise ConfigError(
                f"{name} is outside of {self.root}, which is copied: run this in a folder that has the agent and its "
                "texts",
                field="delivery",
            )
        return path.relative_to(self.root)


def copy_folder(root: Path, place: Path, *, without: Collection[Path] = ()) -> list[Path]:
    """Copies a folder without caches and version control; folders of dependencies are linked.

    Args:
        place: a new folder.
        without: resolved paths that are left out.
    Returns:
        The folders that are linked.
    Raises:
        ConfigError: the folder is too large.
    """
    linked, size = list[Path](), 0

    def left_out(folder: str, names: Sequence[str]) -> set[str]:
        nonlocal size
        linked.extend(Path(folder) / name for name in names if name in LINKED)
        out = {name for name in names if name in LINKED or name in LEFT_OUT or Path(folder, name).resolve() in without}
        files = (Path(folder) / name for name in names if name not in out)
        size += sum(path.stat().st_size for path in files if path.is_file())
        if size > _MOST_BYTES:
            raise ConfigError(
                f"{root} is copied and has more than {_MOST_BYTES >> 20} MiB: run this in a folder that has the agent "
                "and its texts"
            )
        return out

    shutil.copytree(root, place, symlinks=True, ignore=left_out)
    for folder in linked:
        os.symlink(folder, place / folder.relative_to(root))
    return linked
