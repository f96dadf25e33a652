"""Reads YAML files with size limits.

A few lines of nested aliases can expand to billions of nodes, which any code that traverses the result would visit. The
nodes are therefore counted with aliases expanded before objects are constructed.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from assay.errors import AssayError
from assay.support.places import no_such_file

MOST_BYTES = 2 * 2**20  # per file
_MOST_NODES = 100_000  # with aliases expanded
_MOST_DIGITS = 400  # of a number; longer ones take quadratic time to parse or overflow a float


class _Loader(yaml.SafeLoader):
    """Uses YAML 1.2 booleans: `no` and `yes` are strings, so that a scale can be written as `[no, partly, yes]`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|false", re.IGNORECASE), list("tTfF"))


def read_yaml(text: str, source: str, error: type[AssayError]) -> tuple[Any, yaml.Node | None]:
    """Parses YAML text. Returns the content and the root node, which has line numbers.

    Args:
        source: file name, for error messages.
        error: raised for invalid YAML, or if a size limit is exceeded.
    """
    if len(text) > MOST_BYTES:
        raise error(f"{source}: the file has {len(text) / 2**20:.1f} MiB; the maximum is {MOST_BYTES >> 20} MiB")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node, source, error)
        return loader.construct_document(node), node
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        if isinstance(problem, error):
            raise
        raise error(_invalid(source, problem)) from None
    finally:
        loader.dispose()


def _check_size(root: yaml.Node, source: str, error: type[AssayError]) -> None:
    """Raises `error` for too many nodes (aliases expanded), too long numbers and recursive aliases."""
    sizes: dict[int, int] = {}  # by node id; 0 while the node is being counted

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise error(f"{source}:{node.start_mark.line + 1}: an alias refers to a node that contains it")
        if known is not None:
            return known
        sizes[id(node)] = 0
        count = 1
        if isinstance(node, yaml.MappingNode):
            count += sum(size(part) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            count += sum(map(size, node.value))
        elif node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _MOST_DIGITS:
            raise error(
                f"{source}:{node.start_mark.line + 1}: a number has {len(node.value)} characters; "
                f"the maximum is {_MOST_DIGITS}"
            )
        if count > _MOST_NODES:
            raise error(f"{source}:{node.start_mark.line + 1}: more than {_MOST_NODES} values after expanding aliases")
        sizes[id(node)] = count
        return count

    size(root)


def _invalid(source: str, problem: Exception) -> str:
    """Message about text that is not YAML: place and problem, without PyYAML's name of the text."""
    mark = getattr(problem, "problem_mark", None)
    if mark is None:
        return f"{source}: invalid YAML: {problem}"
    return f"{source}:{mark.line + 1}: invalid YAML: {getattr(problem, 'problem', None)}, column {mark.column + 1}"


def read_text(path: Path, kind: str, error: type[AssayError]) -> str:
    """Reads a text file.

    Args:
        kind: what the file is, for error messages.
        error: raised if the file does not exist, is not UTF-8 text, or is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise error(f"{path}: the file is larger than {MOST_BYTES >> 20} MiB, the maximum for a {kind}")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise error(no_such_file(path)) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from None
