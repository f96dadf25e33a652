"""What Windows lacks is used only where it exists."""

import os
import subprocess
import sys
from pathlib import Path

from assay.testing.scripted_server import running


def test_commands_run_without_what_windows_lacks(tmp_path: Path) -> None:
    with running() as url:
        done = subprocess.run(
            [sys.executable, "-m", "rigs.without_unix", url], cwd=tmp_path, capture_output=True, text=True, timeout=600,
            env={**os.environ, "OPENAI_API_KEY": "none", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
