"""Runs inside of the sandbox before the untrusted code: lowers its limits and rights, then becomes it by `exec`.

A script of its own, without imports of assay. Its only argument is JSON (`assay.programs.sandbox.isolation` writes it).
It writes `ready` to the status descriptor right before `exec`, otherwise the reason of the failure. The descriptor is
closed by `exec`: untrusted code never has it.
"""

import ctypes
import json
import os
import resource
import shutil
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAP_AMBIENT = 1, 8, 38, 22, 47
_CAP_DAC_READ_SEARCH = 2
_SCOPES = 3  # Landlock: abstract sockets and signals


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


class _RulesetAttr(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


def _prctl(option: int, *arguments: Any) -> None:
    """Raises OSError where the kernel refuses."""
    values = [*arguments, 0, 0, 0, 0][:4]
    wrapped = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *wrapped) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _become(user: int, *, read_everything: bool) -> None:
    """Drops root. `read_everything` keeps the right to read files, for an interpreter in root's home.

    Landlock still decides which files may be opened.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    if read_everything:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setresuid(user, user, user)
    if not read_everything:
        return
    header, bit = _CapHeader(0x20080522, 0), 1 << _CAP_DAC_READ_SEARCH
    data = (_CapData * 2)(_CapData(bit, bit, bit), _CapData(0, 0, 0))
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), ctypes.byref(data)) == 0:
        _prctl(_PR_CAP_AMBIENT, 2, _CAP_DAC_READ_SEARCH)  # 2 is PR_CAP_AMBIENT_RAISE
    # Without the capability, as in most containers, the interpreter has to be readable by everybody.


def _landlock(settings: dict[str, Any]) -> None:
    sys.path.insert(0, settings["package"])  # the folder of the package landlock
    from landlock import FSAccess, Ruleset, landlock_abi_version
    from landlock.plumbing import get_create_ruleset, get_restrict_self

    rules = Ruleset()
    readable = FSAccess.EXECUTE | FSAccess.READ_FILE | FSAccess.READ_DIR
    for path in settings["read"]:
        if os.path.exists(path):
            rules.allow(path, rules=readable if os.path.isdir(path) else FSAccess.EXECUTE | FSAccess.READ_FILE)
    for path in ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"):
        if os.path.exists(path):
            rules.allow(path, rules=FSAccess.READ_FILE | FSAccess.WRITE_FILE)
    rules.allow(settings["folder"], rules=rules.restrict_rules & ~(FSAccess.MAKE_CHAR | FSAccess.MAKE_BLOCK))
    rules.apply()
    os.close(rules._fd)
    if landlock_abi_version() >= 6:  # the package knows files alone
        attributes = _RulesetAttr(0, 0, _SCOPES)
        create: Any = get_create_ruleset()
        create.func.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
        descriptor = create(ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
        get_restrict_self()(descriptor, 0)
        os.close(descriptor)


def _set_limits(limits: dict[str, int], *, strict: bool) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        try:
            if kind is None:
                raise OSError(f"{name} does not exist here")
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            if strict:
                raise


def _copy_files(source: str, folder: str, user: int | None) -> None:
    """Copies the given files into the writable folder and gives them to the user of the untrusted code."""
    shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    for path, _, names in os.walk(folder, topdown=False):  # a folder last: afterwards only its owner enters it
        for name in [*names, ""]:
            if user is not None:
                os.chown(os.path.join(path, name), user, user)


def _prepare(settings: dict[str, Any]) -> None:
    os.umask(0o022)
    user = settings["user"]
    if settings["copy_from"]:
        _copy_files(settings["copy_from"], settings["folder"], user)
    if user is not None:
        _become(user, read_everything=settings["landlock"] is not None)
    os.chdir(settings["folder"])  # it belongs to that user alone
    if settings["isolation"] == "landlock":
        _prctl(_PR_SET_PDEATHSIG, 9)  # bubblewrap has --die-with-parent
    _set_limits(settings["limits"], strict=settings["isolation"] != "none")
    if settings["landlock"] is not None:
        _landlock(settings["landlock"])
    if settings["filter"] is not None:
        lines = bytes.fromhex(settings["filter"])
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        program = _Filter(len(lines) // 8, lines)
        _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program))  # 2 is SECCOMP_MODE_FILTER


def main() -> None:
    settings = json.loads(sys.argv[1])
    status = settings["status"]
    os.set_inheritable(status, False)
    try:
        _prepare(settings)
        os.write(status, b"ready")
        os.execve(settings["command"][0], settings["command"], settings["environment"])
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}".encode(errors="replace"))
        os._exit(1)


if __name__ == "__main__":
    main()
