"""Runs a process tree under limits on time, memory, disk and output, and removes all of it at the end."""

import contextlib
import os
import queue
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, SandboxError
from assay.models.unrecorded import accounted
from assay.programs.sandbox.isolation import FOLDER, Limits, Plan, isolations_of, plan_for
from assay.support.names import is_within
from assay.support.systems import kill_group

# -- Files of a sandboxed process on the host, and what its process group uses.
#
# Untrusted code chooses the names, modes and depth of what it leaves behind: nothing here recurses or follows links.


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


_EVERY_S = 0.05  # between two measurements of memory, disk and processes
_LONGEST_LINE = 8_000_000  # bytes of one message on the channel
_MOST_LINES = 100  # that wait to be received; a process that follows the protocol sends the next one after an answer
_MOST_LEFT = 1000  # reads of 64 KB after the end, of a child that escaped with isolation 'none' and still writes


class SandboxedProcess:
    """A running process; `wait` or `stop` ends it, and the context manager removes its folder.

    Args:
        arguments: of the interpreter. `{scripts}` in one of them is this package's folder as the process sees it,
            `{requests}` and `{replies}` are the descriptors of the channel.
        channel: whether the process gets messages (`send`) and answers with lines (`receive`).
    Raises:
        SandboxError: the process could not be started under this isolation.
    """

    def __init__(
        self,
        isolation: str,
        arguments: Sequence[str],
        *,
        limits: Limits,
        files: Mapping[str, str | bytes],
        read_only: Sequence[Path] = (),
        stdin: str = "",
        channel: bool = False,
    ) -> None:
        self.limits, self.started = limits, time.monotonic()
        self.killed_by: str | None = None
        self._home = Path(tempfile.mkdtemp(prefix="assay-sandbox-"))
        self._inputs = self._home / "files"
        self._output, self._dropped = {"stdout": bytearray(), "stderr": bytearray()}, False
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._partial = bytearray()
        self._descriptors: list[int] = []
        self._group_killed = False
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            self._given_bytes = write_files(self._inputs, files)
            os.chmod(self._home, 0o711)  # another user passes through to its own folder
            os.chmod(self._inputs, 0o700)
            self._start(isolation, arguments, read_only, stdin, channel)
        except BaseException:
            self.close()
            raise

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._descriptors += ends
        return ends

    def _start(
        self, isolation: str, arguments: Sequence[str], read_only: Sequence[Path], stdin: str, channel: bool
    ) -> None:
        status, status_end = self._pipe()
        theirs, self._replies, self._requests = [status_end], -1, -1
        if channel:
            requests_end, self._requests = self._pipe()
            self._replies, replies_end = self._pipe()
            theirs += [requests_end, replies_end]
            names = {"{requests}": str(requests_end), "{replies}": str(replies_end)}
            arguments = [names.get(argument, argument) for argument in arguments]
        self.plan: Plan = plan_for(
            isolation,
            arguments=arguments,
            inputs=self._inputs,
            limits=self.limits,
            status=status_end,
            read_only=read_only,
        )
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write(stdin.encode("utf-8", "surrogatepass"))
            stdin_file.seek(0)
            try:
                # without a network it calls no model that a recorder would miss
                with contextlib.nullcontext() if isolation == "none" else accounted():
                    self._process = subprocess.Popen(
                        self.plan.command,
                        stdin=stdin_file,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={"PATH": os.defpath},
                        pass_fds=theirs,
                        start_new_session=True,
                    )
            except OSError as error:
                raise SandboxError(f"{isolation} could not be started: {error}") from error
        for descriptor in theirs:
            self._close_descriptor(descriptor)
        self.started = time.monotonic()
        self._await_ready(status)
        self._watcher = threading.Thread(target=self._watch, name="assay-sandbox", daemon=True)
        self._watcher.start()

    def _await_ready(self, status: int) -> None:
        """Waits for the launcher. The time limit starts when it is ready."""
        with selectors.DefaultSelector() as selector:
            selector.register(status, selectors.EVENT_READ)
            report, deadline = b"", time.monotonic() + 30
            while selector.select(max(0.0, deadline - time.monotonic())):
                part = os.read(status, 4096)
                if not part:
                    break
                report += part
        self._close_descriptor(status)
        self.started = time.monotonic()
        if report != b"ready":
            self._kill()
            assert self._process.stderr is not None
            words = report.decode(errors="replace") or self._process.stderr.read(2000).decode(errors="replace")
            raise SandboxError(f"{self.plan.isolation} could not be started: {words.strip() or 'no answer'}")

    # While it runs, in a thread of its own

    def _watch(self) -> None:
        """Reads what the process writes and ends it at a limit."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        next_measure = 0.0
        with selectors.DefaultSelector() as selector:
            for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
                selector.register(stream.fileno(), selectors.EVENT_READ, name)
            if self._replies >= 0:
                selector.register(self._replies, selectors.EVENT_READ, "channel")
            while process.poll() is None and not self._stop.is_set() and self.killed_by is None:
                self._read_ready(selector, _EVERY_S / 5 if not selector.get_map() else _EVERY_S)
                now = time.monotonic()
                if now - self.started >= self.limits.timeout_s:
                    self.killed_by = "time"
                elif now >= next_measure:
                    self.killed_by = self.killed_by or self._over_limit()
                    next_measure = time.monotonic() + max(_EVERY_S, 20 * (time.monotonic() - now))
            self._kill()
            for _ in range(_MOST_LEFT):
                if not self._read_ready(selector, 0):
                    break
        self._lines.put(None)

    def _read_ready(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        if not selector.get_map():  # all are closed, and the process continues
            self._stop.wait(timeout_s)
            return False
        ready = selector.select(timeout_s)
        for key, _ in ready:
            part = os.read(key.fd, 65536)
            if not part:
                selector.unregister(key.fd)
            elif key.data == "channel":
                self._add_to_channel(part)
            else:
                output = self._output[key.data]
                free_bytes = self.limits.output_bytes - len(output)
                output += part[: max(0, free_bytes)]
                self._dropped |= len(part) > free_bytes
        return bool(ready)

    def _add_to_channel(self, part: bytes) -> None:
        *whole, rest = part.split(b"\n")
        for line in whole:
            self._lines.put(bytes(self._partial) + line)
            self._partial.clear()
        self._partial += rest
        if len(self._partial) > _LONGEST_LINE or self._lines.qsize() > _MOST_LINES:
            self.killed_by = "output"

    def _over_limit(self) -> str | None:
        pages, pids = 0, []
        for pid, resident in group_members(self._process.pid):
            pids.append(pid)
            pages += resident
        if len(pids) > self.limits.processes + self.plan.extra_processes:
            return "processes"
        limit = self.limits.memory_mb * 2**20
        if pages * os.sysconf("SC_PAGESIZE") > limit and proportional_memory(pids) > limit:
            return "memory"
        on_disk = self.plan.folder != FOLDER
        if on_disk and disk_use(self._inputs, pids) > self.limits.disk_mb * 2**20 + self._given_bytes:
            return "disk"
        return None

    # From outside

    def send(self, message: bytes, deadline: float) -> bool:
        """Writes a message, after its length. False if the process does not read it before the deadline, or ended."""
        os.set_blocking(self._requests, False)
        rest = memoryview(f"{len(message):08x}".encode() + message)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            while rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return False
                try:
                    rest = rest[os.write(self._requests, rest) :]
                except OSError:
                    return False
        return True

    def receive(self, deadline: float) -> bytes | None:
        """The next line of the process. None at the deadline, or once it ended."""
        try:
            line = self._lines.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)
        return line

    def wait(self) -> int:
        """Waits for the end and returns the exit code; 128 + N if signal N ended it."""
        if self._watcher is not None:
            self._watcher.join()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> int:
        """Ends the process and all its children."""
        self._stop.set()
        return self.wait()

    def text(self, name: str) -> str:
        """What was written to `stdout` or `stderr`. The writable folder has the same name under every isolation."""
        text = bytes(self._output[name]).decode("utf-8", "replace")
        return text if self.plan.folder == FOLDER else text.replace(self.plan.folder, FOLDER)

    @property
    def truncated(self) -> bool:
        return self._dropped

    def _kill(self) -> None:
        """Kills the process group: at once, as no process forks while the kernel signals a group.

        Only once: afterwards the number may belong to another group.
        """
        if not self._group_killed:
            self._group_killed = True
            kill_group(self._process)

    def _close_descriptor(self, descriptor: int) -> None:
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Ends the process, if it runs, and removes its folder. Can be called again."""
        if hasattr(self, "_process"):
            self._stop.set()
            if self._watcher is not None:
                self._watcher.join()
            self._kill()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        for descriptor in list(self._descriptors):
            self._close_descriptor(descriptor)
        remove_folder(self._home)

    def __enter__(self) -> "SandboxedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- Runs untrusted Python code once, under limits.


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
        return "" if hasattr(os, "killpg") else "there are no process groups on this system"
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
