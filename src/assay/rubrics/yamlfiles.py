"""YAML files of rubrics and judges, read within limits.

An alias stands for all that its anchor holds: a few lines of aliases of aliases stand for billions of nodes, which whatever walks the result
visits one by one. So the nodes are counted as if each alias were written out, before anything is made of them.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from assay.errors import RubricError

__all__ = ["MOST_BYTES", "read_text", "read_yaml"]

MOST_BYTES = 2 * 2**20  # of a file
_MOST_NODES = 100_000  # aliases written out
_MOST_DIGITS = 400  # of a number; what is longer is read in quadratic time, or is no float


class _Loader(yaml.SafeLoader):
    """YAML 1.2's booleans: `no` and `yes` are words, so that a scale may be written `[no, partly, yes]`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|false", re.IGNORECASE), list("tTfF"))


def read_yaml(text: str, shown: str) -> tuple[Any, yaml.Node | None]:
    """What a text says, and its nodes, which know their lines.

    Raises:
        RubricError: not YAML, or larger than a rubric can be.
    """
    if len(text) > MOST_BYTES:
        raise RubricError(f"{shown}: the file has {len(text) / 2**20:.1f} MiB, at most {MOST_BYTES >> 20} are read")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node, shown)
        return loader.construct_document(node), node
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, RubricError):
            raise
        raise RubricError(f"{shown}: not YAML: {error}") from None
    finally:
        loader.dispose()


def _check_size(root: yaml.Node, shown: str) -> None:
    """Raises `RubricError` where the nodes, aliases written out, are too many, or an alias stands for what holds it."""
    sizes: dict[int, int] = {}  # by node; 0 while it is counted

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise RubricError(f"{shown}:{node.start_mark.line + 1}: an alias stands for something that holds it")
        if known is not None:
            return known
        sizes[id(node)] = 0
        found = 1
        if isinstance(node, yaml.MappingNode):
            found += sum(size(part) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            found += sum(map(size, node.value))
        elif node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _MOST_DIGITS:
            raise RubricError(f"{shown}:{node.start_mark.line + 1}: a number of {len(node.value)} characters; at most {_MOST_DIGITS} are read")
        if found > _MOST_NODES:
            raise RubricError(f"{shown}:{node.start_mark.line + 1}: more than {_MOST_NODES} values, aliases written out: a rubric is smaller")
        sizes[id(node)] = found
        return found

    size(root)


def read_text(path: Path) -> str:
    """The text of a rubric's or judge's file.

    Raises:
        RubricError: no such file, no text, or it is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RubricError(f"{path}: the file has more than {MOST_BYTES >> 20} MiB, which no rubric or judge has")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise RubricError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RubricError(f"{path}: cannot be read: {error}") from None
