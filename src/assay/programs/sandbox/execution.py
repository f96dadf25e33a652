"""Runs untrusted Python code once, under limits."""

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, SandboxError
from assay.programs.sandbox.isolation import Limits, isolations_of
from assay.programs.sandbox.process import SandboxedProcess

_probing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What a run did.

    Args:
        output: standard output up to `output_bytes`, with what was printed before a hard exit.
        stderr: standard error up to `output_bytes`, with the traceback of an exception.
        exit_code: of the process; 128 + N if signal N ended it, so 137 after a limit.
        isolation: the isolation that was used: `bubblewrap`, `landlock` or `none`.
        killed_by: the limit that ended the run: `time`, `memory`, `processes` or `disk`. None if it ended itself, also
            by an exception such as MemoryError.
        truncated: more was written than `output_bytes`.
    """

    output: str
    stderr: str
    exit_code: int
    isolation: str
    killed_by: str | None
    truncated: bool
    duration_s: float

    @property
    def timed_out(self) -> bool:
        """Whether the time limit ended the run."""
        return self.killed_by == "time"

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0. Untrusted code chooses its exit code: it proves nothing."""
        return self.killed_by is None and self.exit_code == 0


def run(
    code: str,
    *,
    timeout_s: float,
    memory_mb: int,
    isolation: str = "auto",
    files: Mapping[str, str | bytes] | None = None,
    read_only: Sequence[str | Path] = (),
    stdin: str = "",
    processes: int = 16,
    disk_mb: int = 64,
    output_bytes: int = 1_000_000,
) -> SandboxResult:
    """Runs Python code as a script, in an empty folder, without network, environment and files of the host.

    The system's folders (`/usr`, `/lib`, …) and the interpreter are readable, with the packages in its own folder.
    Those of a virtual environment are not, except where `read_only` names them. At the end all processes are killed and
    the folder is removed.

    Args:
        timeout_s: wall-clock limit in seconds, from the start of the code.
        memory_mb: address space of each process, and resident memory of all together; at least 64.
        isolation: `bubblewrap`, `landlock`, `none`, or `auto` for the first of bubblewrap and landlock that works here.
            `none` limits resources but lets the code read your files and use the network.
        files: name -> content of files in the working folder; modules among them can be imported.
        read_only: files and folders of the host that the code may read, at their own paths.
        processes: processes and threads at a time.
        disk_mb: size of the working folder.
        output_bytes: bytes kept of standard output and of standard error, each; the rest is discarded.
    Raises:
        SandboxError: the isolation is not available, or the process could not be started.
        ConfigError: a limit is out of range, or another argument of a wrong type.
    """
    limits = Limits(
        timeout_s=timeout_s, memory_mb=memory_mb, processes=processes, disk_mb=disk_mb, output_bytes=output_bytes
    )
    _check_contents(code, files, read_only, stdin)
    chosen = choose_isolation(isolation)
    other_files = dict(files or {})
    if "main.py" in other_files:
        raise ConfigError("files must not contain 'main.py': the code itself is written there")
    with SandboxedProcess(
        chosen,
        ["-s", "-u", "main.py"],  # unbuffered: the output until a kill is not lost
        limits=limits,
        files={**other_files, "main.py": code},
        read_only=[_existing(path) for path in read_only],
        stdin=stdin,
    ) as process:
        exit_code = process.wait()
        return SandboxResult(
            output=process.text("stdout"),
            stderr=process.text("stderr"),
            exit_code=exit_code,
            isolation=chosen,
            killed_by=process.killed_by,
            truncated=process.truncated,
            duration_s=time.monotonic() - process.started,
        )


def _check_contents(code: Any, files: Any, read_only: Any, stdin: Any) -> None:
    """Refuses what cannot be written into the sandbox. Source may be bytes."""
    if not isinstance(code, str | bytes):
        raise ConfigError(f"code={str(code)[:200]} must be Python source, not {type(code).__name__}")
    texts = isinstance(files, Mapping) and all(isinstance(part, str | bytes) for part in files.values())
    if files is not None and (not texts or not all(isinstance(name, str) for name in files)):
        raise ConfigError(f"files={str(files)[:200]} must be a mapping of file names to text or bytes")
    if isinstance(read_only, str | bytes) or not isinstance(read_only, Sequence):
        raise ConfigError(f"read_only={read_only!r} must be a list of paths")
    if not isinstance(stdin, str):
        raise ConfigError(f"stdin={stdin!r} must be text")


def _existing(path: str | Path) -> Path:
    full = Path(os.path.realpath(path))
    if not full.exists():
        raise ConfigError(f"read_only={str(path)!r} does not exist")
    return full


def choose_isolation(isolation: str) -> str:
    """The isolation to use. Never a weaker one than was asked for.

    Raises:
        SandboxError: it is not available here; the message has the reason.
        ConfigError: there is no isolation of this name.
    """
    reasons = {}
    for name in isolations_of(isolation):
        reasons[name] = available(name)
        if not reasons[name]:
            return name
    raise SandboxError(
        f"isolation={isolation!r} is not available: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}. "
        "isolation='none' runs the code with your rights: only for code that you trust"
    )


def available(isolation: str) -> str:
    """Why an isolation cannot be used here; empty if it can. `auto` can be used if one of its two can.

    Each is tried once per process.

    Raises:
        ConfigError: there is no isolation of this name.
    """
    reasons = {}
    for name in isolations_of(isolation):
        with _probing:
            reasons[name] = probe(name)
        if not reasons[name]:
            return ""
    return reasons[isolation] if len(reasons) == 1 else "; ".join(f"{name}: {why}" for name, why in reasons.items())


@cache
def probe(isolation: str) -> str:
    """As `available`, without its lock. The result is cached; `probe.cache_clear()` forgets it."""
    if isolation == "none":
        return ""
    if sys.platform != "linux":
        return f"{isolation} needs Linux"
    try:
        with SandboxedProcess(
            isolation, ["-I", "-c", "print('works')"], limits=Limits(timeout_s=20, memory_mb=256), files={}
        ) as process:
            process.wait()
            output = process.text("stdout").strip()
            return "" if output == "works" else f"the interpreter does not run: {process.text('stderr')[-300:]}"
    except SandboxError as error:
        return str(error)
