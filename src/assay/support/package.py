"""Version of assay, and the folder that it is installed in. Imports nothing of assay: every package can use it."""

from pathlib import Path

__all__ = ["FOLDER", "__version__"]

__version__ = "0.1.0"
FOLDER = Path(__file__).resolve().parents[1]
