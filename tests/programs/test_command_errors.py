"""What a command of an agent writes to standard error: its end is kept, in a file of limited size."""

import re
import sys

import pytest

from assay.programs.foreign.runners import AgentFailed, AgentTask, CommandRunner, RunnerLost

TASK = AgentTask(id="t", rollout="r", inputs={}, model="m", base_url="http://127.0.0.1:9/v1", api_key="k")
LOUD = """
import os, sys, time
for number in range(6):
    os.write(2, b"." * 700_000)
    time.sleep(0.12)
os.write(2, f"last words, of {os.fstat(2).st_size} bytes".encode())
sys.exit(3)
"""


def test_the_end_of_a_long_standard_error_is_kept_and_the_rest_is_not() -> None:
    with pytest.raises(AgentFailed, match="the agent exited with 3") as failed:
        CommandRunner([sys.executable, "-S", "-c", LOUD]).run(TASK, lambda: None)
    match = re.search(r"it said: '\.+last words, of (\d+) bytes'$", str(failed.value))
    assert match is not None
    assert len(str(failed.value)) < 1000
    assert int(match[1]) < 3_000_000  # of 4,200,000 that were written


def test_a_command_that_is_killed_is_named_with_its_signal_and_last_words() -> None:
    code = "import os; os.write(2, b'out of memory'); os.kill(os.getpid(), 9)"
    with pytest.raises(RunnerLost, match="the agent's process was killed by SIGKILL; it said: 'out of memory'"):
        CommandRunner([sys.executable, "-S", "-c", code]).run(TASK, lambda: None)
