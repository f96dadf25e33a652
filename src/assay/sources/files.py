"""Source files that a program, check or judge needs: its own, and the helpers that they import from its folder.

Imports are found by parsing import statements and `import_module("name")`, including those inside functions; no code
runs. Installed packages and the standard library are not copied. Data files are copied if the module lists them
(`ARTIFACT_FILES = ["prices.json"]`), or if they are in its folder and it opened them for reading
(`assay.sources.opened`).
"""

import ast
import builtins
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import ProgramError
from assay.sources.modules import root_of
from assay.sources.opened import opened_for, unfit
from assay.support.package import FOLDER

__all__ = ["FILES", "SourceFiles", "is_user_file"]

FILES = "ARTIFACT_FILES"  # name of a module's list of further files, relative to the module
_MOST_BYTES = 50_000_000  # bytes of all files; more is a mistake, such as a model in the program's folder


@dataclass
class SourceFiles:
    """Files by their path in the artifact's `source` folder, and the new name of each object there (`file.py:NAME`)."""

    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # about opened files that are not copied

    def add(self, name: str, module_name: str, attribute: str, *, without: Collection[Path] = ()) -> bool:
        """Add the files that an attribute of a loaded module needs, under the name by which it is loaded.

        Args:
            name: name by which the attribute is loaded, `file.py:NAME` or `package.module:NAME`.
            without: files that are not copied even if they were opened.
        Returns:
            False if the code is installed or its source cannot be read; the name alone must then suffice.
        Raises:
            ProgramError: a file of `ARTIFACT_FILES` is missing or elsewhere, or the files are too large together.
        """
        module = sys.modules.get(module_name)
        if module is None or "<locals>" in attribute:
            return False
        file = getattr(module, "__file__", None)
        path = Path(str(file or "notebook.py")).resolve()
        if module_name == "__main__":
            text, root, place = _sliced(_main_text(module), attribute), path.parent, f"{path.stem}.py"
        elif is_user_file(path) and path.suffix == ".py":
            text, root = path.read_text("utf-8"), root_of(path)
            place = path.relative_to(root).as_posix()
        else:
            return False
        if text is None:
            return False
        needed, modules = _needed(root / place, text, root, name)
        for relative, content in needed.items():
            self.files.setdefault(relative, content)
        for file in dict.fromkeys(file for key in [name, *modules] for file in opened_for(key)):
            self._take_opened(file, root, without)
        if (size := sum(map(len, self.files.values()))) > _MOST_BYTES:
            raise ProgramError(
                f"the source files of {name} have {size / 1e6:.0f} MB; the limit is {_MOST_BYTES / 1e6:.0f} MB: "
                f"shorten {FILES}"
            )
        self.names[name] = f"{place}:{attribute}"
        return True

    def _take_opened(self, file: Path, root: Path, without: Collection[Path]) -> None:
        if not file.is_relative_to(root) or not is_user_file(file) or file.suffix in (".py", ".pyc"):
            return
        place = file.relative_to(root).as_posix()
        why = "it is the data" if file in without else unfit(file, root)
        if why is not None and place not in self.files:
            self.notes.append(
                f"the program reads {place}, which its artifact does not contain: {why}. List it in {FILES} to copy it"
            )
        elif why is None:
            self.files.setdefault(place, file.read_bytes())


def is_user_file(path: Path) -> bool:
    """Whether a file is the user's own: not part of an installed package, of Python, or of assay."""
    path = path.resolve()
    if not path.is_file() or path.is_relative_to(FOLDER):
        return False
    installed = {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib")),
    }
    return (
        not any(path.is_relative_to(Path(folder).resolve()) for folder in installed)
        and "site-packages" not in path.parts
    )


def _needed(first: Path, text: str, root: Path, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Needed files by their path under the root or the working directory, and the paths of the modules among them.

    The root takes precedence over the working directory.
    """
    files: dict[str, bytes] = {}
    waiting, seen = [(first, text)], {first}
    roots = [root, Path.cwd().resolve()]
    while waiting:
        path, text = waiting.pop(0)
        base = next((candidate for candidate in roots if path.is_relative_to(candidate)), path.parent)
        files.setdefault(path.relative_to(base).as_posix(), text.encode())
        tree = ast.parse(text, str(path))
        for other in (
            *_imported(tree, path, roots),
            *_loaded(path, root),
            *(_loaded(name, root) if path == first else ()),
        ):
            if other not in seen and is_user_file(other):
                seen.add(other)
                waiting.append((other, other.read_text("utf-8")))
        for further in _listed(tree):
            target = (path.parent / further).resolve()
            if not target.is_relative_to(base):
                raise ProgramError(
                    f"{path}: {FILES} names {further!r}, which is not below {base}; "
                    "an artifact contains only files of the program's folder"
                )
            if not target.is_file():
                raise ProgramError(f"{path}: {FILES} names {further!r}, which does not exist")
            files.setdefault(target.relative_to(base).as_posix(), target.read_bytes())
    return files, [str(path) for path in seen]


def _loaded(key: str | Path, root: Path) -> list[Path]:
    """Modules of a root that were imported under a key of `assay.sources.opened`, also by a computed name."""
    return [path for path in opened_for(str(key)) if path.suffix == ".py" and path.is_relative_to(root)]


def _imported(tree: ast.Module, path: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Files that a module's import statements and its imports by a literal name may refer to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _import_call(node)
            level = len(name) - len(name.lstrip("."))
            yield from _files_of(name[level:].split("."), [_above(path, level)] if level else roots) if name else ()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            dotted = node.module.split(".") if node.module else []
            bases: Sequence[Path] = [_above(path, node.level)] if node.level else roots
            yield from _files_of(dotted, bases)
            for alias in node.names:
                yield from _files_of([*dotted, alias.name], bases)


def _above(path: Path, level: int) -> Path:
    """Folder from which a relative import of this level starts."""
    return path.parents[min(level, len(path.parents)) - 1]


def _import_call(node: ast.Call) -> str:
    """Name in `importlib.import_module("name")`, `import_module("name")` or `__import__("name")`; empty otherwise."""
    called = (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )
    first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "name"), None)
    text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    return text if called in ("import_module", "__import__") else ""


def _files_of(dotted: Sequence[str], roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        module_found = False
        for length in range(len(dotted) + 1):  # the enclosing packages run as well
            place = root.joinpath(*dotted[:length])
            for file in ([place.with_name(f"{place.name}.py")] if length else []) + [place / "__init__.py"]:
                if file.is_file() and (length or dotted[:1] != [root.name]):
                    module_found = module_found or bool(length)
                    yield file.resolve()
        if module_found:
            return


def _listed(tree: ast.Module) -> list[str]:
    """The literal list `ARTIFACT_FILES` of a module; empty if it has none."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == FILES for target in targets):
            try:
                value = None if node.value is None else ast.literal_eval(node.value)
            except (ValueError, TypeError):
                value = None
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise ProgramError(f"{FILES} must be a literal list of file names, such as {FILES} = ['prices.json']")
            return list(value)
    return []


def _main_text(module: Any) -> str:
    """Source of the running script, or of a notebook's cells so far."""
    if (file := getattr(module, "__file__", None)) is not None:
        try:
            return Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""
    cells = [str(cell) for cell in getattr(module, "In", [])]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))


def _sliced(text: str, name: str) -> str | None:
    """The statements of a script that define a name and what it needs, so that loading it does not run the script."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    bound = {id(node): set(_bound(node)) for node in tree.body}
    needed, chosen = {name.partition(".")[0], FILES}, set[int]()
    if not any(name.partition(".")[0] in names for names in bound.values()):
        return None
    while True:
        new = [node for node in tree.body if id(node) not in chosen and (bound[id(node)] & needed or _is_future(node))]
        if not new:
            break
        for node in new:
            chosen.add(id(node))
            needed |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not hasattr(builtins, part.id)
            }
            needed |= {word for part in ast.walk(node) if isinstance(part, ast.Constant) for word in _words(part.value)}
    lines = text.splitlines()
    parts = []
    for node in tree.body:
        if id(node) in chosen:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n".join(parts) + "\n"


def _words(value: Any) -> list[str]:
    """Names in a string annotation or signature."""
    return [value] if isinstance(value, str) and value.isidentifier() else []


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines; code under `if __name__ == "__main__"` defines none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.If | ast.Try | ast.With):
        if "__main__" not in ast.dump(node.test if isinstance(node, ast.If) else node):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.stmt):
                    yield from _bound(part)
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
