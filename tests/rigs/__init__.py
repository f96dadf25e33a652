"""What tests and benchmarks share: scripted model servers, a scripted learner, and rigs that kill processes.

The folder `tests` is on pytest's import path; a benchmark adds it to its own. As commands: `PYTHONPATH=tests python -m
rigs.upstream`.
"""

import sys
from pathlib import Path

__all__ = ["module_command"]


def module_command(module: str) -> list[str]:
    """Command line that runs a module of this package as a process, in any folder."""
    code = f"import runpy, sys; sys.path.append({str(Path(__file__).parents[1])!r}); "
    return [sys.executable, "-c", f"{code}runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]
