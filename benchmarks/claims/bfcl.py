"""BFCL simple, multiple and irrelevance: the plain `tool_user`, without any compiling or training.

The tasks are read from the wheel of `bfcl-eval`, which is downloaded and unpacked but not installed. Each seed draws
its own tasks.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from claims.storing import Measured, Setting, held_out

CATEGORIES = {"simple_python": "correct_calls", "multiple": "correct_calls", "irrelevance": "abstention_when_not"}
SIZE = 10
SOURCE, FOLDER = "bfcl-eval", "bfcl_eval"


def measure(setting: Setting) -> Measured:
    folder, values = downloaded(setting.downloads), {}
    for category, criterion in CATEGORIES.items():
        # the whole category is drawn, and the test split of it is what is run
        evaluation = held_out(
            setting,
            "tool_user",
            rubric="tool_user",
            data=f"bfcl:{category}?path={folder}",
            test=SIZE,
            salt=f"seed {setting.seed}",
            model=setting.model,
            prompt_format="lean",
            parameters={"temperature": 0.1, "max_steps": 4},
        )
        values[category] = {"after": {task: result.grades[criterion] for task, result in evaluation.results.items()}}
    return Measured(values=values, facts={"size": SIZE})


def downloaded(folder: Path) -> Path:
    """The folder of the unpacked wheel, from the package registry if it is not there."""
    if not (folder / FOLDER).is_dir():
        words = ["download", "--quiet", "--no-deps", "--dest", str(folder), SOURCE]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = folder.glob("bfcl_eval-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder
