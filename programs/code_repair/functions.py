"""Functions that can be mutated and called, each with the module-level statements that it needs.

`module_files` finds source files, `slices` takes the functions of one. Nothing is imported. Only functions that cannot
have side effects are taken: an allowlist of modules and names, decided on the syntax tree.
"""

import ast
import importlib.machinery
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import DataError

STANDARD_LIBRARY = "stdlib"
_MOST_BYTES = 500_000
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "site-packages", "pydoc_data"}


def module_files(name: str) -> list[tuple[str, Path]]:
    """(name for descriptions, file), sorted.

    Args:
        name: a module or package such as `textwrap` or `json`, `path/to/file.py`, a folder, or `stdlib`.
    Raises:
        DataError: there is no such file, or the module has no Python source.
    """
    if not name:
        raise DataError(
            "mutants: needs a module, a package, a file or a folder: mutants:textwrap, mutants:src/tools.py"
        )
    if name == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(sys.stdlib_module_names - {"antigravity", "this"})
        return [file for module in names for file in _below(root, module)]
    path = Path(name)
    if path.is_dir():
        return [(str(file.relative_to(path.parent)), file) for file in _files(path)]
    if path.suffix == ".py" or "/" in name:
        if not path.is_file():
            raise DataError(f"mutants: no such file: {path}")
        return [(path.name, path)]
    return _by_name(name)


def _by_name(name: str) -> list[tuple[str, Path]]:
    """Files of a module or package. Only its place is looked up; importing a parent package would run it."""
    places: list[str] | None = sys.path
    spec = None
    for depth, _ in enumerate(name.split(".")):
        full = ".".join(name.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(full, places)
        if spec is None:
            raise DataError(
                f"mutants: there is no module {full!r} with Python source; name a module, a file or a folder"
            )
        places = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        return [(f"{name}/{file.relative_to(root)}", file) for file in _files(root)]
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise DataError(f"mutants: the module {name!r} has no Python source ({spec.origin}); name another one")
    return [(name, Path(spec.origin))]


def _below(root: Path, module: str) -> Iterator[tuple[str, Path]]:
    if (file := root / f"{module}.py").is_file():
        yield module, file
    elif (root / module).is_dir() and module not in _SKIPPED:
        yield from ((str(file.relative_to(root)), file) for file in _files(root / module))


def _files(root: Path) -> list[Path]:
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if not _SKIPPED & set(file.relative_to(root.parent).parts) and file.stat().st_size <= _MOST_BYTES
    ]


_MOST_LINES = 400  # of a slice; that of `textwrap.wrap` has 360
_FEWEST_STATEMENTS = 3  # of the function


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _words(
    "__future__ abc array ast base64 binascii bisect calendar codecs collections collections.abc colorsys copy "
    "dataclasses datetime decimal difflib enum errno fnmatch fractions functools hashlib heapq html html.entities "
    "itertools json keyword math numbers operator re reprlib sre_constants statistics string stringprep struct "
    "textwrap token types typing unicodedata urllib.parse weakref zlib"
)
_PATHS = _words("basename dirname join split splitext splitdrive normpath normcase isabs commonprefix")
_PARTS = {  # of modules that also have side effects
    "sys": _words("maxsize maxunicode byteorder version_info float_info hash_info int_info hexversion"),
    "os": _words("fspath sep altsep extsep pathsep linesep curdir pardir PathLike name"),
    "os.path": _PATHS,
    "posixpath": _PATHS,
    "ntpath": _PATHS,
    "datetime": _words("date datetime time timedelta timezone tzinfo MINYEAR MAXYEAR"),
    "codecs": _words("lookup BOM_UTF8 encode decode"),
    "warnings": _words("warn"),
}
_FORBIDDEN = _words(
    "__builtins__ __file__ __import__ __loader__ __spec__ breakpoint compile delattr dir eval exec exit globals help "
    "id input locals memoryview open print quit setattr vars"
)
_FORBIDDEN_ATTRIBUTES = _words("now today utcnow random shuffle read write system __globals__ __code__ __subclasses__")
_DECORATORS = frozenset(
    {"lru_cache", "cache", "total_ordering", "dataclass", "property", "staticmethod", "classmethod"}
)


@dataclass(frozen=True)
class Slice:
    """A function with what it needs.

    Args:
        name: of the function.
        code: the module-level statements, in their order, as written.
        module: where it is from, for descriptions.
        literals: texts and numbers in its functions, which its inputs may have to contain.
        is_generator: its result must be collected by `list(…)`.
    """

    name: str
    code: str
    module: str
    node: ast.FunctionDef
    literals: tuple[str | int, ...] = ()
    is_generator: bool = False


def slices(source: str, module: str) -> Iterator[Slice]:
    """Functions of a module that can be called with made-up inputs without side effects, in their order.

    Args:
        source: of the module; nothing is yielded if it is not valid Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.encode().split(b"\n")
    binders = _binders(tree)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not _are_harmless(node.decorator_list):
            continue
        if not _is_usable(node) or (needed := _needed(node, binders)) is None:
            continue
        statements = sorted(needed, key=lambda statement: statement.lineno)
        if any(not _is_pure(statement, binders) for statement in statements):
            continue
        code = "\n\n".join(_text(statement, lines) for statement in statements) + "\n"
        if code.count("\n") <= _MOST_LINES:
            yield Slice(node.name, code, module, node, tuple(_literals(statements)), _yields(node))


def _is_usable(node: ast.FunctionDef) -> bool:
    parameters = [*node.args.posonlyargs, *node.args.args]
    required = len(parameters) - len(node.args.defaults)
    needs_keyword = any(default is None for default in node.args.kw_defaults)
    size = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
    return 1 <= len(parameters) <= 6 and required <= 4 and not needs_keyword and size >= _FEWEST_STATEMENTS


def _yields(node: ast.FunctionDef) -> bool:
    """Whether a call gives a generator; functions inside it do not count."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(inner, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(inner)
    return False


def _are_harmless(decorators: Sequence[ast.expr]) -> bool:
    names = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in decorators]
    return all(getattr(name, "attr", getattr(name, "id", "")) in _DECORATORS for name in names)


def _binders(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Name -> module-level statements that bind it."""
    result: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _bound(node):
            result.setdefault(name, []).append(node)
    return result


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:  # assignments, also in `if` and `try`
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                yield from _bound(inner)


def _needed(node: ast.stmt, binders: dict[str, list[ast.stmt]]) -> list[ast.stmt] | None:
    """A statement and all that it needs, transitively; None if a name cannot be found."""
    needed, waiting = {id(node): node}, [node]
    while waiting:
        statement = waiting.pop()
        for inner in ast.walk(statement):
            if not isinstance(inner, ast.Name) or not isinstance(inner.ctx, ast.Load):
                continue
            if inner.id in _FORBIDDEN:
                return None
            for binder in binders.get(inner.id, ()):
                if id(binder) not in needed:
                    needed[id(binder)] = binder
                    waiting.append(binder)
    return list(needed.values())


def _is_pure(statement: ast.stmt, binders: dict[str, list[ast.stmt]]) -> bool:
    """Whether a statement uses nothing outside the allowlist."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if not _is_pure_import(node):
                return False
        elif isinstance(node, ast.Global | ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            return False
        elif isinstance(node, ast.Attribute):
            if node.attr in _FORBIDDEN_ATTRIBUTES or not _is_pure_part(node, binders):
                return False
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not _are_harmless(node.decorator_list):
            return False
    return True


def _is_pure_import(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in _MODULES or alias.name in _PARTS for alias in node.names)
    if node.level or node.module is None or (node.module not in _MODULES and node.module not in _PARTS):
        return False
    allowed = _PARTS.get(node.module)
    return all(alias.name != "*" and (allowed is None or alias.name in allowed) for alias in node.names)


def _is_pure_part(node: ast.Attribute, binders: dict[str, list[ast.stmt]]) -> bool:
    """Whether an attribute of a module with side effects is one of its harmless parts."""
    owner = ast.unparse(node.value)
    if owner not in _PARTS or not binders.get(owner.partition(".")[0]):
        return True
    return node.attr in _PARTS[owner] or (owner == "os" and node.attr == "path")


def _text(statement: ast.stmt, lines: Sequence[bytes]) -> str:
    first = min([statement.lineno, *(part.lineno for part in getattr(statement, "decorator_list", []))])
    return b"\n".join(lines[first - 1 : statement.end_lineno]).decode()


def _literals(statements: Sequence[ast.stmt]) -> Iterator[str | int]:
    seen = set[str | int]()
    for statement in statements:
        documented = {id(inner.value) for inner in ast.walk(statement) if isinstance(inner, ast.Expr)}
        for node in ast.walk(statement):
            if not isinstance(node, ast.Constant) or id(node) in documented or node.value in seen:
                continue
            value = node.value
            if (isinstance(value, str) and 0 < len(value) <= 20) or (type(value) is int and abs(value) < 10**6):
                seen.add(value)
                yield value
