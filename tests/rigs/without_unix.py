"""A process without what Windows lacks: removes those names, then runs commands and functions in this interpreter.

    python -m rigs.without_unix MODEL_URL

Modules of the standard library are loaded before: on Windows they have other versions.
"""

import asyncio
import importlib
import json
import multiprocessing.pool  # noqa: F401
import os
import signal
import subprocess  # noqa: F401
import sys
import urllib.request  # noqa: F401
from pathlib import Path

LACKING = {
    os: (
        "fork", "forkpty", "register_at_fork", "killpg", "getpgid", "setsid", "getuid", "geteuid", "getgid", "getegid",
        "chown", "lchown", "fchmod", "mkfifo", "nice", "sysconf", "statvfs", "sched_getaffinity",
        "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC",
    ),
    signal: ("SIGHUP", "SIGKILL", "SIGALRM", "SIGPROF", "SIGCHLD", "SIGUSR1", "alarm", "setitimer", "pthread_sigmask"),
    asyncio.SelectorEventLoop: ("add_signal_handler", "remove_signal_handler"),
}  # fmt: skip
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
COMMANDS = ("compile", "evaluate", "serve", "view", "improve", "train sft", "run", "tune", "judge compile")
PROGRAM = """
import dspy

class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


def remove() -> None:
    for owner, names in LACKING.items():
        for name in names:
            if name in vars(owner):
                delattr(owner, name)
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]  # importing it is an ImportError
    os.environ["LITELLM_TOKEN_EXCHANGE_CACHE_DIR"] = ""  # litellm itself asks for the platform before it calls getuid


def main(url: str) -> None:
    remove()
    for module in ("assay", "assay.rubrics", "assay.testing", "assay.web.server", "assay.programs.sandbox"):
        importlib.import_module(module)
    from assay.commands.serve import serve
    from assay.programs import sandbox
    from assay.web.view import view
    from rigs.command_line import assay_command

    for words in ("", *COMMANDS):
        done = assay_command(*words.split(), "--help")
        assert done.code == 0, done
        assert "Usage" in done.stdout
    Path("sums.py").write_text(PROGRAM)
    Path("r.yaml").write_text("name: sums\ncriteria:\n- {name: right, check: exact}\n")
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--rubric", "r.yaml", "--data", "d.jsonl", "--model", "openai/m", "--api-base", url, "--json")
    for words in ("evaluate", "compile --max-search-calls 20"):
        done = assay_command(*words.split(), "sums.py", *options)
        assert done.code == 0, done
    for listen in (serve, view):
        listen(port=0, on_start=lambda _: signal.raise_signal(signal.SIGINT))
    assert sandbox.available("none") == "there are no process groups on this system"


if __name__ == "__main__":
    main(sys.argv[1])
