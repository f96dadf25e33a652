"""The files of a job on another machine: what its code needs, each at the path that it has here, below one folder.

Carried are the files that an artifact would contain (`assay.sources.files`), and those below the working directory that
the code opens by a relative path. The other machine works in the folder that stands for the working directory. Modules
from files keep their private names, so that objects pickled by reference find their classes, and a path that the code
has as an absolute one is found below the folder (`assay.sources.opened`). Files that are not carried, and installed
modules, must be the same there: `Shipment.differences` compares what both machines see.
"""

import hashlib
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from assay.errors import ConfigError
from assay.sources.artifact_files import around
from assay.sources.files import FILES, SourceFiles, is_of_the_machine, is_user_file, largest
from assay.sources.modules import mount, private_roots
from assay.sources.opened import find_files_of_sender, is_written, unfit

_MOST_BYTES = 200_000_000  # bytes of all files; they are in memory on every machine
_INSTALLED = ("dspy", "litellm")  # besides the modules of the job: what sends and parses the calls
_PREFIX = "assay-host-"  # of temporary folders
_TO_SEND = f"List it in {FILES} of its module to send it, or put the same file at this path on every host"
ABSENT = ""  # hash of a file that does not exist


@dataclass
class Shipment:
    """What another machine needs to run the code of a job.

    Attributes:
        files: contents by absolute path.
        elsewhere: hashes of files that it must have itself, by absolute path.
        private: why those among them are not sent that would be if they had other names.
        links: files by the absolute path of a link to them.
        installed: hashes or versions of installed modules that it must have, by name.
        folder: the working directory.
        roots: folders of the modules from files, by private name.
        path: folders of the user's on `sys.path`.
        variables: environment variables that it must have.
        addresses: hashes of environment variables that must be the same there, or unset as here, by name.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    roots: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    variables: Sequence[str] = ()
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def hashes(self) -> dict[str, str]:
        """What both machines must see: hashes of files by path, of installed modules and of variables by name."""
        return {
            **{path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()},
            **self.elsewhere,
            **self.installed,
            **self.addresses,
        }

    def differences(self, seen: Mapping[str, str]) -> list[str]:
        """What another machine sees otherwise, as texts.

        Args:
            seen: as `hashes`, on the other machine.
        """
        return [
            f"{name} {_difference(value, there)} there{self._why(name)}"
            for name, value in self.hashes.items()
            if (there := seen.get(name, ABSENT)) != value
        ]

    def _why(self, name: str) -> str:
        return f"; it is not sent because {self.private[name]}. {_TO_SEND}" if name in self.private else ""


def _difference(here: str, there: str) -> str:
    if there == ABSENT:
        return "is missing"
    return "is another one" if here != ABSENT else "is missing here and not"


def shipment(
    sources: SourceFiles, modules: Iterable[str], *, without: Collection[Path] = (), variables: Sequence[str] = (),
    addresses: Iterable[str] = (),
) -> Shipment:  # fmt: skip
    """What the code of a job needs on another machine.

    Args:
        sources: its files.
        modules: names of its modules.
        without: files that are not sent, such as the data.
        variables: see `Shipment`.
        addresses: names of variables, see `Shipment`.
    Raises:
        ConfigError: the files are too large.
    """
    files, elsewhere, private = dict(sources.origins), dict[str, str](), dict[str, str]()
    for folder in {artifact[0] for path in sources.origins if (artifact := around(path)) is not None}:
        files |= {path: path.read_bytes() for path in folder.rglob("*") if _is_part(path)}
    for path, written in sources.outside.items():
        if path in without or is_written(path):
            continue
        is_near = path.is_relative_to(Path.cwd().resolve()) and not os.path.isabs(written)
        if (why := _unfit(path)) is not None:
            private[str(path)] = why
        elif is_near:
            files[path] = path.read_bytes()
        else:
            elsewhere[str(path)] = _hash_of(path)
    private |= {str(path): why for path, why in sources.private.items() if path not in without and not is_written(path)}
    private = {path: why for path, why in private.items() if Path(path) not in files}
    elsewhere |= {path: _hash_of(Path(path)) for path in private}
    _check_size(files)
    return Shipment(
        files={str(path): content for path, content in sorted(files.items())},
        elsewhere=elsewhere,
        private=private,
        links={str(link): str(path) for link, path in sources.links.items()},
        installed={name: _hash_of_module(name) for name in sorted({*modules, *_INSTALLED}) if _is_installed(name)},
        roots=private_roots(),
        path=[
            folder
            for folder in dict.fromkeys(map(os.path.abspath, sys.path))
            if "site-packages" not in folder and any(str(path).startswith(f"{folder}{os.sep}") for path in files)
        ],
        variables=variables,
        addresses={name: _hash_of_variable(name) for name in addresses},
    )


def _unfit(path: Path) -> str | None:
    """Reason why a file is private: by its path in the working directory, elsewhere by its name."""
    folder = Path.cwd().resolve()
    return unfit(path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name))


def _is_part(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.parent.name != "__pycache__"


def _check_size(files: Mapping[Path, bytes]) -> None:
    if (size := sum(map(len, files.values()))) > _MOST_BYTES:
        raise ConfigError(
            f"the files of the program have {size / 1e6:.0f} MB together, and at most {_MOST_BYTES / 1e6:.0f} MB "
            f"are sent to other machines. The largest: {largest(files)}. Files at the same absolute path on every "
            "machine are not sent"
        )


def _is_installed(name: str) -> bool:
    """Whether a module comes from an installed package, and neither from Python itself nor from a file of the user."""
    module = sys.modules.get(name)
    if name.partition(".")[0] in sys.stdlib_module_names or name == "__main__" or module is None:
        return False
    file = getattr(module, "__file__", None)
    return file is not None and not is_user_file(Path(file))


def _hash_of_module(name: str) -> str:
    """Version of a package of `_INSTALLED`, hash of the file of another module; empty if it is not installed."""
    try:
        if name in _INSTALLED:
            return importlib.metadata.version(name)
        return _hash_of(Path(str(importlib.import_module(name).__file__)))
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return ABSENT


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ABSENT


def _hash_of_variable(name: str) -> str:
    """Hash of an environment variable's value, which may contain a key; empty if it is not set."""
    value = os.environ.get(name)
    return hashlib.sha256(value.encode()).hexdigest() if value else ABSENT


def _remove_left(file: Path) -> None:
    """Removes the folder of a process that was killed, by its lock."""
    lock = FileLock(file)
    with suppress(OSError, Timeout), lock.acquire(timeout=0):  # else of a process that lives, or of another user
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        file.unlink(missing_ok=True)


class Delivery:
    """A shipment on the other machine, in a temporary folder."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()).resolve()
        for left in folder.glob(f"{_PREFIX}*.lock"):
            _remove_left(left)
        self._lock = FileLock(folder / f"{_PREFIX}{uuid.uuid4().hex}.lock")
        self._lock.acquire(timeout=0)  # held while this process lives
        self.home = Path(self._lock.lock_file).with_suffix("")
        self.home.mkdir(mode=0o700)
        self._missed: set[str] = set()

    def unpack(self, sent: Shipment) -> None:
        """Writes the files that changed, and makes this process work with them."""
        for path, content in sent.files.items():
            place = self._place(path)
            if place.is_symlink():  # to a file that was not sent before
                place.unlink()
            if not place.is_file() or place.read_bytes() != content:  # modules of a file that is written are run again
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        # relative paths find what is not sent, and folders list it
        links = [(path, Path(path)) for path in sent.elsewhere if os.path.isfile(path)]
        for path, target in (*links, *((link, self._place(path)) for link, path in sent.links.items())):
            place = self._place(path)
            if not os.path.lexists(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(target)
        working = self._place(sent.folder)
        working.mkdir(parents=True, exist_ok=True)
        os.chdir(working)
        self._missed = find_files_of_sender(self.home)
        for name, root in sent.roots.items():
            mount(name, self._place(root))
        sys.path[:0] = [folder for folder in map(str, map(self._place, sent.path)) if folder not in sys.path]
        importlib.invalidate_caches()

    def seen(self, sent: Shipment) -> dict[str, str]:
        """See `Shipment.hashes`."""
        return {
            **{path: _hash_of(self._place(path)) for path in sent.files},
            **{path: _hash_of(Path(path)) for path in sent.elsewhere},
            **{name: _hash_of_module(name) for name in sent.installed},
            **{name: _hash_of_variable(name) for name in sent.addresses},
        }

    def missed(self) -> list[str]:
        """Paths on the sender of files that the code asked for and that are neither here nor were sent; each once."""
        missed = sorted(self._missed)
        self._missed.difference_update(missed)
        return missed

    def remove(self) -> None:
        os.chdir(tempfile.gettempdir())
        shutil.rmtree(self.home, ignore_errors=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def _place(self, path: str) -> Path:
        return self.home / Path(path).relative_to(Path(path).anchor)


def not_sent(missed: Iterable[str], folders: Iterable[str] = ()) -> str | None:
    """The first file that code on another machine asked for and that only this machine has, with what to do about it;
    None if there is none. Files that a program wrote are not sent.

    Args:
        folders: of the job, in which private files count: libraries look for others everywhere.
    """
    own = [Path(folder).resolve() for folder in folders]
    for name in missed:
        path = Path(name)
        if not is_user_file(path) or is_written(path):
            continue
        if (why := _unfit(path)) is None:
            return f"{path}, which was not sent: put it into the program's folder, and list it in {FILES} of its module"
        if not is_of_the_machine(path) and any(path.is_relative_to(folder) for folder in own if folder.name):
            return f"{path}, which is not sent because {why}. {_TO_SEND}"
    return None
