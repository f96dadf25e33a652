"""What only some operating systems have. Windows has neither `fork` nor process groups."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


def after_fork(renew: Callable[[], Any]) -> None:
    """Calls `renew` in each process that is forked from this one, on systems that fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process that was started with `start_new_session=True`, with its children, and waits for its end.

    On Windows only the process itself is killed.
    """
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
