"""Code under each isolation that works here, and the check that it leaves nothing behind."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.programs.sandbox import SandboxResult, available, run


@pytest.fixture(params=["bubblewrap", "landlock"])
def isolated(request: pytest.FixtureRequest) -> str:
    if why := available(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No run leaves a folder or a process behind."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)  # pytest's own folders are closed to the user of the code
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    folder.rmdir()  # fails if something is left
    assert _python_processes_of(os.getpid()) == []


def _python_processes_of(parent: int) -> list[str]:
    listing = subprocess.run(["ps", "--ppid", str(parent), "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if "launcher.py" in line or "main.py" in line]


def attack(code: str, isolated: str, **settings: Any) -> SandboxResult:
    return run(code, **{"timeout_s": 10, "memory_mb": 256, "isolation": isolated, **settings})
