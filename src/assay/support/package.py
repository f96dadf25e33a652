"""Version of assay, and the folders that it is installed in. Imports nothing of assay: every package can use it."""

from pathlib import Path

__version__ = "0.1.0"
FOLDER = Path(__file__).resolve().parents[1]
_IN_WHEEL = FOLDER / "shipped"
CONTENT = _IN_WHEEL if (_IN_WHEEL / "rubrics").is_dir() else FOLDER.parents[1]
"""The folder that has `programs`, `rubrics`, `judges` and `optimizers`."""
OWN_FOLDERS = (FOLDER, *(CONTENT / name for name in ("programs", "rubrics", "judges", "optimizers")))
