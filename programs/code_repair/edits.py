"""Edits of Python source by line: what a model is shown of a source, and what its edit makes of it.

Nothing is run. The source need not be valid Python.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MODULE = "module"
_PARSED = 500_000  # characters of the longest source that is parsed
_FENCE = re.compile(r"\A\s*```[^\n]*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)
_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Edit:
    """Replaces the line `line` (from 1) of a source by `text`, which may have several lines."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line} as `{self.text.strip()}`"


@dataclass(frozen=True)
class Excerpt:
    """Lines of a source as a model is shown them.

    Args:
        text: the lines with their numbers.
        choices: numbers of the lines that can be replaced: those with code, at least one.
        whole: whether all code is shown.
    """

    text: str
    choices: tuple[int, ...]
    whole: bool


def excerpt(source: str, limit: int, part: Sequence[int] = ()) -> Excerpt:
    """The source, or a part of it, in about `limit` characters: without docstrings and comments, if it has more.

    Args:
        part: numbers of the lines of the part.
    """
    lines = source.split("\n")
    within = list(part) or list(range(1, len(lines) + 1))
    docstrings = _docstring_lines(_parsed(source))
    coded = [n for n in within if n not in docstrings and lines[n - 1].strip() and lines[n - 1].lstrip()[:1] != "#"]
    coded = coded or within
    numbers = within if sum(len(lines[n - 1]) + 1 for n in within) <= limit else coded
    text, size, last = list[str](), 0, 0
    for number in numbers:
        size += len(lines[number - 1]) + 1
        if last and size > limit:
            text.append("…")
            break
        if number > last + 1 and last:
            text.append("…")
        text.append(f"{number}: {lines[number - 1].rstrip()[:limit]}")
        last = number
    choices = tuple(number for number in coded if number <= last)
    return Excerpt("\n".join(text), choices or (numbers[0],), not part and last == numbers[-1])


def functions_of(source: str) -> dict[str, list[int]]:
    """Functions and methods of a source -> numbers of their lines; `module` -> the other lines with code.

    Nested functions belong to the outer one. Empty if the source is not valid Python.
    """
    tree = _parsed(source)
    if tree is None:
        return {}
    parts: dict[str, list[int]] = {}
    for name, node in _functions(tree, ""):
        parts.setdefault(name, []).extend(_span(node))
    inside = {line for span in parts.values() for line in span} | _docstring_lines(tree)
    lines = enumerate(source.split("\n"), start=1)
    rest = [number for number, line in lines if number not in inside and line.strip()]
    return {**parts, _MODULE: rest} if rest else parts


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix)


def _parsed(source: str) -> ast.Module | None:
    if len(source) > _PARSED:
        return None
    try:
        return ast.parse(source)
    except _UNPARSED:
        return None


def _span(node: ast.stmt) -> range:
    decorators = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return range(first, (node.end_lineno or first) + 1)


def _docstring_lines(tree: ast.Module | None) -> set[int]:
    """Lines of texts that are statements. Lines that another statement begins on are not among them."""
    texts: set[int] = set()
    others: set[int] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(_span(node))
        elif isinstance(node, ast.stmt):
            others.add(node.lineno)
    return texts - others


def replacement_of(text: str, line: int) -> str:
    """The lines that a model wrote, without a Markdown fence and without the line's number in front."""
    fenced = _FENCE.match(text)
    text = (fenced[1] if fenced else text).replace("\r\n", "\n").strip("\n")
    if not fenced and text.count("`") == 2 and text.strip().startswith("`") and text.strip().endswith("`"):
        text = text.strip().strip("`")
    return re.sub(rf"\A\s*{line}: ?", "", text)


def applied(source: str, edit: Edit) -> str:
    """The source after an edit.

    The new lines get the indentation of the line that they replace, because models often leave it out or count it
    wrongly. If only their own indentation gives valid Python, they keep it.
    """
    results = list(_ways(source, edit))
    return next((result for result in results if _parsed(result) is not None), results[0])


def _ways(source: str, edit: Edit) -> Iterator[str]:
    lines = source.split("\n")
    old = lines[edit.line - 1]
    ending = "\r" if old.endswith("\r") else ""
    indent = old[: len(old) - len(old.lstrip())].rstrip("\r")
    first, _, rest = edit.text.partition("\n")
    dedented = textwrap.dedent(edit.text) if first[:1].isspace() else edit.text
    texts = [textwrap.indent(dedented, indent), edit.text]
    if indent and rest and all(row.startswith(indent) for row in rest.split("\n") if row.strip()):
        texts.insert(0, indent + edit.text.lstrip())  # only the first line lacks its indentation
    for new in texts:
        made = [row.rstrip("\r") + ending for row in new.split("\n")]
        yield "\n".join([*lines[: edit.line - 1], *made, *lines[edit.line :]])


def is_same(a: str, b: str) -> bool:
    """Whether two sources are equal, apart from white space at the end of lines."""
    return [line.rstrip() for line in a.split("\n")] == [line.rstrip() for line in b.split("\n")]
