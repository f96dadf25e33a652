"""The sandbox under attack: processes, memory, disk and output. Each test runs with bubblewrap and with Landlock."""

import random
import subprocess
import time

import pytest
from sandbox_attacks import attack, isolated as isolated, nothing_left as nothing_left


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
