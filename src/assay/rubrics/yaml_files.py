"""Reads YAML files of rubrics and judges with the size limits of `assay.support.yaml_files`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import RubricError
from assay.support import yaml_files
from assay.support.yaml_files import MOST_BYTES

if TYPE_CHECKING:
    import yaml

__all__ = ["MOST_BYTES", "read_text", "read_yaml"]


def read_yaml(text: str, source: str) -> "tuple[Any, yaml.Node | None]":
    """Parses YAML text. Returns the content and the root node, which has line numbers.

    Args:
        source: file name, for error messages.
    Raises:
        RubricError: invalid YAML, or a size limit is exceeded.
    """
    return yaml_files.read_yaml(text, source, RubricError)


def read_text(path: Path) -> str:
    """Reads a rubric or judge file.

    Raises:
        RubricError: the file does not exist, is not UTF-8 text, or is too large.
    """
    return yaml_files.read_text(path, "rubric or judge", RubricError)
