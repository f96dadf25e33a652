"""Source files that a program, check or judge needs: its own, the helpers that they import, and the data they read.

Imports are found by parsing import statements and `import_module("name")`, including those inside functions; no code
runs. Installed packages and the standard library are not copied. Data files are copied from the program's folder: those
that the module lists (`ARTIFACT_FILES = ["prices.json"]`), those that it opened (`assay.sources.opened`), and those
whose name, or the name of whose folder, is a text in the code. Secrets, hidden files and the job's data are not copied.
"""

import ast
import builtins
import filecmp
import importlib.metadata
import itertools
import os
import re
import site
import sqlite3
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import ProgramError
from assay.sources.artifact_files import SOURCE, around
from assay.sources.modules import root_of
from assay.sources.opened import is_written, opened_for, unfit
from assay.support.names import is_within
from assay.support.package import OWN_FOLDERS

FILES = "ARTIFACT_FILES"  # name of a module's list of further files, relative to the module
_MOST_BYTES = 50_000_000  # bytes of all files; more is a mistake, such as a model in the program's folder
_MOST_FILES = 2_000
_NAMED = 5  # files that a message lists
_MOST_CHARACTERS = 200  # of a text in the code that may be a path
_CODE = frozenset({".py", ".pyc", ".pyd", ".so"})
_OF_THE_SYSTEM = tuple(map(Path, ("/dev", "/etc", "/proc", "/sys", "/usr")))  # the same on any machine


@dataclass
class SourceFiles:
    """Files by their path in the artifact's `source` folder, and the new name of each object there (`file.py:NAME`).

    Attributes:
        notes: opened files that are not copied because they are private.
        missing: opened files and imported modules without which the copy does not work elsewhere: they are outside of
            the program's folder, or too large.
        origins: the files that are copied, by their path on this machine.
        outside: the files of `missing`, and those of the working directory that the code names, with their path in it.
        private: files that the code opens or names and that are not copied, with the reason.
        left_out: those of folders that the code names.
        links: names of files by which code is loaded and that are links, with the files.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    origins: dict[Path, bytes] = field(default_factory=dict)
    outside: dict[Path, str] = field(default_factory=dict)
    private: dict[Path, str] = field(default_factory=dict)
    left_out: dict[Path, str] = field(default_factory=dict)
    links: dict[Path, Path] = field(default_factory=dict)

    def add(self, name: str, module_name: str, attribute: str, *, without: Collection[Path] = ()) -> bool:
        """Add the files that an attribute of a loaded module needs, under the name by which it is loaded.

        Args:
            name: name by which the attribute is loaded, `file.py:NAME` or `package.module:NAME`.
            without: files and folders that are not copied even if they were opened.
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
        needed = _Needed(root / place, text, root, name)
        for relative, content in needed.files.items():
            self.files.setdefault(relative, content)
        self.missing += needed.missing
        self.outside |= needed.outside
        self.origins |= needed.origins
        if module_name == "__main__":  # the slice of a script is not its file
            self.origins.pop(root / place, None)
        if (link := Path(os.path.abspath(name.rpartition(":")[0]))) != path and link.resolve() == path:
            self.links[link] = path
        if (size := self._bytes()) > _MOST_BYTES:
            raise ProgramError(
                f"the source files of {name} have {size / 1e6:.0f} MB; the limit is {_MOST_BYTES / 1e6:.0f} MB: "
                f"shorten {FILES}. The largest: {largest(self.files)}"
            )
        for key in [name, *needed.modules]:
            for opened, written in opened_for(key).items():
                self._take_opened(opened, written, root, without)
        for file in _below(needed.named, without):
            if not self._take(file, root, without):
                if file in needed.named:
                    self.outside[file] = str(file)
                else:
                    self.left_out[file] = "the files are too large together, or too many"
            if file.relative_to(root).as_posix() not in self.files and (why := _unfit(file, root)) is not None:
                (self.private if file in needed.named else self.left_out)[file] = why
        self._note_nearby(needed.nearby, without)
        self.names[name] = f"{place}:{attribute}"
        return True

    def _note_nearby(self, named: Collection[Path], without: Collection[Path]) -> None:
        """Note files of the working directory, as many as an artifact's source may have."""
        size, folder = 0, Path.cwd().resolve()
        for file in itertools.islice(_below(named, without), _MOST_FILES):
            if file not in named and (why := _unfit(file, folder)) is not None:
                self.left_out[file] = why
                continue
            size += file.stat().st_size
            if size <= _MOST_BYTES:
                self.outside.setdefault(file, file.relative_to(folder).as_posix())

    def _bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def _take_opened(self, file: Path, written: str, root: Path, without: Collection[Path]) -> None:
        if not is_user_file(file) or file.suffix in _CODE:
            return
        file = file if file.is_relative_to(root) else file.resolve()
        if not file.is_relative_to(root):
            if is_of_the_machine(file) or _is_below(file, without):
                return
            if (twin := _twin(file, written, root)) is None:
                self.missing.append(f"it reads {written}, which is outside of its folder {root}")
                self.outside[file] = written
                return
            file = twin
        place = file.relative_to(root)
        why = _private(file, root, without)
        if why is not None and place.as_posix() not in self.files:
            if not _is_below(file, without) and (reason := _unfit(file, root)) is not None:
                self.private[file] = reason
            self.notes.append(
                f"the program reads {place}, which its artifact does not contain: {why}. List it in {FILES} to copy it"
            )
        elif not self._take(file, root, without):
            self.missing.append(
                f"it reads {place}, which has {file.stat().st_size / 1e6:.0f} MB; an artifact's source has at most "
                f"{_MOST_BYTES / 1e6:.0f} MB"
            )
            self.outside[file] = written
        elif not Path(written).is_absolute() and is_within(spelled := Path(os.path.normpath(written)).as_posix()):
            self.files.setdefault(spelled, file.read_bytes())  # where the same relative path finds it

    def _take(self, file: Path, root: Path, without: Collection[Path]) -> bool:
        """Copy a file unless it is private; False if it is too large."""
        place = file.relative_to(root)
        if _private(file, root, without) is not None:
            return True
        if (content := self.files.get(place.as_posix())) is not None:
            self.origins.setdefault(file, content)
            return True
        if self._bytes() + file.stat().st_size > _MOST_BYTES or len(self.files) >= _MOST_FILES:
            return False
        self.files[place.as_posix()] = self.origins[file] = file.read_bytes()
        return True


def largest(files: Mapping[Any, bytes]) -> str:
    """The largest of some files with their sizes, for a message."""
    sizes = sorted(((len(content), str(path)) for path, content in files.items()), reverse=True)
    return ", ".join(f"{path} ({size / 1e6:.1f} MB)" for size, path in sizes[:_NAMED])


def _twin(file: Path, written: str, root: Path) -> Path | None:
    """The file of a program's folder that the same relative path finds elsewhere, if its content is the same.

    An artifact that is compiled again next to its program reads the file of the working directory, and has a copy.
    """
    twin = root / os.path.normpath(written)
    if twin.is_relative_to(root) and twin.is_file() and filecmp.cmp(file, twin, shallow=False):
        return twin
    return None


def _private(file: Path, root: Path, without: Collection[Path]) -> str | None:
    """Reason why a file of a program's folder is not copied; None if it may be."""
    if _is_below(file, without):
        return "it is the data"
    return _unfit(file, root) or _of_store(file.resolve())


def _unfit(file: Path, folder: Path) -> str | None:
    """Reason why a file of a folder is private by its name, or that of the file that it links to."""
    return unfit(file.relative_to(folder)) or unfit(Path(file.resolve().name))


def _of_store(file: Path) -> str | None:
    """Reason why the database of a store is not copied, or its log; None for other files."""
    database = file.with_name(re.sub(r"-(wal|shm|journal)$", "", file.name))
    with suppress(OSError, sqlite3.Error):
        with open(database, "rb") as opened:
            is_database = opened.read(16) == b"SQLite format 3\0"
        if is_database:
            with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
                names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            return "it is a store with recorded calls" if {"rollouts", "transitions"} <= names else None
    return None


def _is_below(file: Path, folders: Iterable[Path]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def is_of_the_machine(file: Path) -> bool:
    """Whether a file belongs to the system or to a tool's settings and caches in the home folder."""
    if _is_below(file, _OF_THE_SYSTEM):
        return True
    return file.is_relative_to(Path.home()) and file.relative_to(Path.home()).parts[0].startswith(".")


def _below(named: Iterable[Path], without: Collection[Path]) -> Iterator[Path]:
    """The files among some paths, and those in the folders among them.

    Folders that contain the data, and files of its format next to it, are left out: they may be the sealed test.
    """
    for path in named:
        if path.is_file():
            if not is_written(path) and not any(
                (path.parent, path.suffix) == (data.parent, data.suffix) for data in without
            ):
                yield path
        elif not any(data.is_relative_to(path) for data in without):
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if not _is_environment(Path(folder, name)))
                paths = (Path(folder, name) for name in sorted(files) if Path(name).suffix not in _CODE)
                # a link may lead anywhere
                inside = path.resolve()
                yield from (file for file in paths if file.is_file() and file.resolve().is_relative_to(inside))


def _is_environment(folder: Path) -> bool:
    """Whether a folder has installed packages, caches or other content of tools."""
    return (
        folder.name.startswith(".")
        or folder.name in ("node_modules", "__pycache__")
        or (folder / "pyvenv.cfg").is_file()
    )


def is_user_file(path: Path) -> bool:
    """Whether a file is the user's own: not part of an installed package, of Python, or of assay."""
    path = path.resolve()
    if not path.is_file() or any(path.is_relative_to(folder) for folder in OWN_FOLDERS):
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


class _Needed:
    """What a module needs, found by reading its code and that of the modules that it imports.

    Attributes:
        files: by their path under the root or the working directory; the root takes precedence.
        modules: paths of the modules among them.
        named: data files and folders of the root whose path is a text in the code.
        nearby: those of the working directory, outside of the root.
        missing: imported modules that are elsewhere.
        origins, outside: see `SourceFiles`.
    """

    def __init__(self, first: Path, text: str, root: Path, name: str) -> None:
        self.files: dict[str, bytes] = {}
        self.named: dict[Path, None] = {}
        self.nearby: dict[Path, None] = {}
        self.missing: list[str] = []
        self.origins: dict[Path, bytes] = {}
        self.outside: dict[Path, str] = {}
        self._root, self._roots = root, [root, Path.cwd().resolve()]
        waiting, seen = [(first, text)], {first}
        while waiting:
            path, text = waiting.pop(0)
            base = next((candidate for candidate in self._roots if path.is_relative_to(candidate)), None)
            if base is None:
                self.missing.append(f"it imports {path}, which is outside of its folder {root}")
                self.outside[path] = str(path)
                continue
            self.origins[path] = text.encode()
            self.files.setdefault(path.relative_to(base).as_posix(), self.origins[path])
            try:
                tree = ast.parse(text, str(path))
            except SyntaxError:  # of a file that is named and not run
                continue
            self._take_listed(tree, path, base)
            self.named |= dict.fromkeys(self._named(tree, path))
            for other in (
                *_packages_of(path, base),
                *_imported(tree, path, self._roots),
                *self._named_code(tree, path),
                *_loaded(path, root),
                *(_loaded(name, root) if path == first else ()),
            ):
                if other not in seen and is_user_file(other):
                    seen.add(other)
                    with suppress(UnicodeDecodeError):  # likewise
                        waiting.append((other, other.read_text("utf-8")))
        self.modules = [str(path) for path in seen]
        self._take_artifact()

    def _take_listed(self, tree: ast.Module, path: Path, base: Path) -> None:
        for further in _listed(tree):
            target = (path.parent / further).resolve()
            if not target.is_relative_to(base):
                raise ProgramError(
                    f"{path}: {FILES} names {further!r}, which is not below {base}; "
                    "an artifact contains only files of the program's folder"
                )
            if not target.is_file():
                raise ProgramError(f"{path}: {FILES} names {further!r}, which does not exist")
            self.origins[target] = target.read_bytes()
            self.files.setdefault(target.relative_to(base).as_posix(), self.origins[target])

    def _named_code(self, tree: ast.Module, path: Path) -> Iterator[Path]:
        """Modules whose path is a text in the code: they are run by their file, or started."""
        for text in _texts(tree):
            for base in dict.fromkeys((path.parent, *self._roots)) if text.endswith(".py") else ():
                if self._root in (target := (base / text).resolve()).parents and target.is_file():
                    yield target

    def _named(self, tree: ast.Module, path: Path) -> Iterator[Path]:
        for text in _texts(tree):
            for base in dict.fromkeys((path.parent, *self._roots)):
                places = (base / text, base / text.rpartition("/")[0])  # `f"facts/{topic}.txt"` names the folder
                # a link is found by its own path
                target = Path(os.path.abspath(next((place for place in places if os.path.exists(place)), base)))
                if target in path.parents or target.suffix in _CODE or (target.is_dir() and _is_environment(target)):
                    continue
                if self._root in target.parents:
                    yield target
                elif self._roots[-1] in target.parents and not self._root.is_relative_to(target):
                    self.nearby[target] = None

    def _take_artifact(self) -> None:
        """What an artifact's source has is carried on."""
        artifact = around(self._root / "_")
        if artifact is not None and self._root == artifact[0] / SOURCE:
            for place in (artifact[1].get("source") or {}).get("files") or {}:
                self.origins[self._root / place] = (self._root / place).read_bytes()
                self.files.setdefault(place, self.origins[self._root / place])


def _texts(tree: ast.Module) -> Iterator[str]:
    """Texts in the code that may be paths."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and 0 < len(text) <= _MOST_CHARACTERS and not {"\n", "\0"} & set(text):
            yield text


def _packages_of(path: Path, base: Path) -> Iterator[Path]:
    """The `__init__.py` of the packages that a module is in."""
    for folder in path.parents:
        if folder == base or not (folder / "__init__.py").is_file():
            return
        yield folder / "__init__.py"


def _loaded(key: str | Path, root: Path) -> list[Path]:
    """Modules of a root that were imported under a key of `assay.sources.opened`, also by a computed name."""
    return [path for path in opened_for(str(key)) if path.suffix == ".py" and path.is_relative_to(root)]


def _imported(tree: ast.Module, path: Path, roots: list[Path]) -> Iterator[Path]:
    """Files that a module's import statements and its imports by a literal name may refer to.

    A folder of `sys.path` that a module was imported from is added to `roots` if it is below one of them.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _import_call(node)
            level = len(name) - len(name.lstrip("."))
            yield from _files_of(name[level:].split("."), [_above(path, level)] if level else roots) if name else ()
        if isinstance(node, ast.Import):
            for alias in node.names:
                dotted = alias.name.split(".")
                yield from [*_files_of(dotted, roots)] or _on_path(dotted, roots)
        elif isinstance(node, ast.ImportFrom):
            dotted = node.module.split(".") if node.module else []
            bases: Sequence[Path] = [_above(path, node.level)] if node.level else roots
            files = [*_files_of(dotted, bases)]
            for alias in node.names:
                files += _files_of([*dotted, alias.name], bases)
            yield from files or ([] if node.level else _on_path(dotted, roots))


def _on_path(dotted: Sequence[str], roots: list[Path]) -> Iterator[Path]:
    """The user's files that a module was imported from through a folder of `sys.path`, which is added to the roots.

    Packages that are installed in place are not the user's files here.
    """
    file = getattr(sys.modules.get(dotted[0]), "__file__", None)
    if file is None or not is_user_file(top := Path(file).resolve()) or top.suffix != ".py":
        return
    if any(True for _ in importlib.metadata.distributions(name=dotted[0])):
        return
    folder = top.parent.parent if top.name == "__init__.py" else top.parent
    if folder not in roots and any(folder.is_relative_to(root) for root in roots):
        roots.insert(1, folder)
    yield from _files_of(dotted, [folder])


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
