"""Parts of Markdown that several generated pages need: table cells, and descriptions of fields read from the source."""

import ast
import dataclasses
import inspect
import re
from typing import Any, get_args

import pydantic

__all__ = ["cell", "coded", "descriptions", "docstring", "plain", "type_name"]


def plain(text: str) -> str:
    """Text in which nothing is taken for HTML or a link of Markdown."""
    return text.replace("<", "&lt;").replace("[", "\\[")


def cell(text: str) -> str:
    """Text inside a table."""
    return re.sub(r"\s+", " ", plain(text)).replace("|", "\\|")


def coded(text: str) -> str:
    """Code inside a table. A union is written with `or`: Markdown would show the backslash of an escaped bar."""
    return "`" + re.sub(r"\s+", " ", text).replace(" | ", " or ").replace("|", "\\|") + "`"


def docstring(owner: Any) -> str:
    """A docstring as Markdown, its sections as plain paragraphs."""
    return plain(re.sub(r"^(Args|Raises|Returns|Source):", r"**\1:**", inspect.getdoc(owner) or "", flags=re.MULTILINE))


def type_name(annotation: Any) -> str:
    """An annotation without module names."""
    is_plain = not isinstance(annotation, str) and not get_args(annotation)
    text = getattr(annotation, "__name__", str(annotation)) if is_plain else str(annotation)
    text = re.sub(r"\b(typing|collections\.abc|pathlib|pydantic|assay\.[\w.]*)\.", "", text)
    text = re.sub(r"Annotated\[str, [^\]]*\]", "str", text).replace("_Word", "str")
    return re.sub(r"\b_([A-Z]\w*)", r"\1", text)


def descriptions(owner: type) -> dict[str, str]:
    """Field -> its description: the docstring below it, its entry under `Args:`, or the comment on its line."""
    result: dict[str, str] = {}
    for parent in reversed(owner.__mro__):
        is_model = parent is not pydantic.BaseModel and issubclass(parent, pydantic.BaseModel)
        if dataclasses.is_dataclass(parent) or is_model:
            result |= _own_descriptions(inspect.getsource(parent))
    return result


def _own_descriptions(source: str) -> dict[str, str]:
    tree, lines = ast.parse(source).body[0], source.splitlines()
    assert isinstance(tree, ast.ClassDef)
    documented = re.finditer(
        r"^ {8}(\w+): (.+(?:\n {12,}.+)*)", ast.get_docstring(tree, clean=False) or "", re.MULTILINE
    )
    result = {entry[1]: re.sub(r"\s+", " ", entry[2]) for entry in documented}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            result[node.target.id] = inspect.cleandoc(str(after.value.value))
        elif comment := re.search(r"  # (?!type:|noqa)(.*)$", lines[(node.end_lineno or 1) - 1]):
            result[node.target.id] = comment[1]
    return result
