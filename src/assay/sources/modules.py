"""Runs Python files of users as modules: programs, checks, judges and the helpers that they import.

Every folder is a namespace of its own: a helper `tools.py` next to one program is a different module from the
`tools.py` next to another. `sys.path` does not change. A file can import, in this order: modules of its own folder (of
the folder above its package, if it is in one), installed modules, modules of the working directory, and modules of the
folders of programs that were loaded before. `importlib.import_module` and `__import__` in such a file find the same
modules. `load_source` runs a file's code, and is the only entry point. Files inside of an artifact run only if its
manifest lists them and the artifact is trusted. Errors of imports are in the user's words: without the private names of
modules, and with the nearest name that exists.
"""

import builtins
import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from assay.sources.artifact_files import around, check_source
from assay.sources.opened import find_files_of, notice, of_sender, watching
from assay.support.names import nearest

PREFIX = "assay_source_"
_lock = threading.RLock()
# by package name; outdated namespaces are kept for the modules that were loaded from them
_namespaces: dict[str, "_Namespace"] = {}
_current: dict[Path, "_Namespace"] = {}  # by root, in the order of their last use
_moved: ContextVar[Mapping[str, str]] = ContextVar("assay_moved", default=MappingProxyType({}))
_alone: ContextVar[bool] = ContextVar("assay_alone", default=False)
_check: ContextVar[Callable[[str], None] | None] = ContextVar("assay_names_checked", default=None)


class NoSuchFile(FileNotFoundError):
    """The named file does not exist; distinct from a file that its code could not open."""


class _Namespace:
    """Modules of one root folder, as submodules of a package with a private name."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.files: dict[Path, tuple[int, int]] = {}  # files that ran -> (mtime, size) at that time
        self._has_module: dict[str, bool] = {}
        self._importlib = _Importlib(self)
        package = ModuleType(name)
        package.__path__ = [str(root)]
        sys.modules[name] = package
        if around(root / "source") is not None:
            find_files_of(f"{name}.", root)

    def fresh(self) -> bool:
        """Whether all files that ran are unchanged."""
        return all(_stamp(path) == stamp for path, stamp in self.files.items())

    def has(self, top: str, *, loose: bool = False) -> bool:
        """Whether the root has a module of this name; with `loose` also a folder that is not a regular package, with
        modules at any depth."""
        if top not in self._has_module:
            spec = PathFinder.find_spec(top, [str(self.root)])
            self._has_module[top] = spec is not None and spec.loader is not None
        return self._has_module[top] or (loose and next((self.root / top).rglob("*.py"), None) is not None)

    def forget(self) -> None:
        """Clear the cache of existing modules: files may have been added."""
        self._has_module.clear()

    def load(self, dotted: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{dotted}")

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        """`__import__` for the files of this root."""
        top = name.partition(".")[0]
        if level == 0 and top == "importlib" and not self.has(top):
            module = _python_import(name, globals, locals, fromlist, level)
            return self._importlib if module is importlib else module
        # a file `json.py` that imports json means the standard library's
        itself = (globals or {}).get("__name__") == f"{self.name}.{top}"
        if level == 0 and not itself and self.has(top):
            return self._import_local(name, globals, locals, fromlist)
        try:
            return _python_import(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            if level or error.name != top or itself:
                raise
            other = next((namespace for namespace in self._others() if namespace.has(top, loose=True)), None)
            if other is None:
                raise
            return other._import_local(name, globals, locals, fromlist)

    def _others(self) -> Iterator["_Namespace"]:
        yield self  # folders without __init__.py come after installed modules
        if _alone.get():
            return
        yield _namespace(Path.cwd())
        yield from reversed(list(_current.values()))

    def _import_local(self, name: str, globals: Any, locals: Any, fromlist: Any) -> Any:
        module = _python_import(f"{self.name}.{name}", globals, locals, fromlist, 0)
        return module if fromlist else sys.modules[f"{self.name}.{name.partition('.')[0]}"]


class _Importlib(ModuleType):
    """The module `importlib` for the files of a root: `import_module` finds the same modules as import statements."""

    def __init__(self, namespace: _Namespace) -> None:
        super().__init__("importlib", importlib.__doc__)
        self.__path__ = importlib.__path__
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        if name.startswith("."):
            name = importlib.util.resolve_name(name, package or "")
        return self._namespace.import_(name, fromlist=("__name__",))


class _Loader(SourceFileLoader):
    """Runs a file with its namespace's `__import__`. Compiled files next to it are neither read nor written."""

    def __init__(self, fullname: str, path: str, namespace: _Namespace) -> None:
        super().__init__(fullname, path)
        self.namespace = namespace

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        check_source(Path(self.path), imported=True)
        self.namespace.files[Path(self.path)] = _stamp(Path(self.path))
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self.namespace.import_}
        notice(self.path)  # recorded for the importing module
        with watching(self.path):
            super().exec_module(module)


class _Finder:
    """Finds submodules of the private packages."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        namespace = _namespaces.get(fullname.partition(".")[0]) if fullname.startswith(PREFIX) else None
        if namespace is None or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, str(spec.origin), namespace)
        return spec


def _python_import(name: str, *rest: Any) -> Any:
    return builtins.__import__(name, *rest)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size


def _namespace(root: Path) -> _Namespace:
    """Namespace of a root; a new one if a file that it ran has changed."""
    with _lock:
        _find_private()
        root = root.resolve()
        namespace = _current.pop(root, None)
        if namespace is None or not namespace.fresh():
            digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
            count = sum(name.startswith(f"{PREFIX}{digest}") for name in _namespaces)
            namespace = _Namespace(root, f"{PREFIX}{digest}" + (f"_{count}" if count else ""))
            _namespaces[namespace.name] = namespace
        _current[root] = namespace
        return namespace


def _find_private() -> None:
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)


def private_roots() -> dict[str, str]:
    """Folders of the modules from files, by the private names of their packages."""
    with _lock:
        return {name: str(namespace.root) for name, namespace in _namespaces.items()}


def mount(name: str, root: Path) -> None:
    """Makes the modules of a folder those of a private package of another process, which has them in its own folder."""
    with _lock:
        _find_private()
        if name not in _namespaces:
            root = root.resolve()
            _namespaces[name] = _current[root] = _Namespace(root, name)


def root_of(path: Path) -> Path:
    """Folder that a file's module name is relative to: its own, or the one above its package."""
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def load_source(path: str | Path) -> ModuleType:
    """Run a Python file and return its module. A file runs once, until it or one of its helpers changes.

    A file of a package that is importable by name is imported by that name.

    Raises:
        NoSuchFile: no such file.
        ImportError: not a Python file, or its name is not valid for a module.
        ArtifactError: the file is in an artifact that does not list it, or that is not trusted.
        Exception: any exception of the file.
    """
    file = of_sender(path).resolve()
    if not file.is_file():
        raise NoSuchFile(f"no such file: {path}")
    root = root_of(file)
    dotted = ".".join(file.relative_to(root).with_suffix("").parts)
    if file.suffix != ".py" or "." in file.stem:
        raise ImportError(f"{path} cannot be imported: the file of a module is called NAME.py, without other dots")
    check_source(file)
    if root != file.parent and (module := _known_to_python(dotted, file)) is not None:
        return module
    importlib.invalidate_caches()
    namespace = _namespace(root)
    namespace.forget()
    return namespace.load(dotted)  # without the lock: Python holds its own import locks while modules run


def _known_to_python(dotted: str, file: Path) -> ModuleType | None:
    try:
        spec = importlib.util.find_spec(dotted)
    except (ImportError, ValueError):
        return None
    same = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file
    return importlib.import_module(dotted) if same else None


def import_named(name: str, *, folders: Sequence[Path] = ()) -> ModuleType:
    """Module by its dotted name: installed, or in `folders`, the working directory or a loaded program's folder.

    Raises:
        ModuleNotFoundError: no such module.
        Exception: any exception of the module.
    """
    top = name.partition(".")[0]
    _check_resolved(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        importlib.invalidate_caches()
        for namespace in [*map(_namespace, [*folders, Path.cwd()]), *reversed(list(_current.values()))]:
            namespace.forget()
            if namespace.has(top, loose=True):
                return namespace.load(name)
        raise


def _check_resolved(name: str) -> None:
    """Check the files that a name resolves to, as `load_source` does: the working directory may be an artifact."""
    parts, places = name.split("."), None
    for at in range(1, len(parts) + 1):
        dotted = ".".join(parts[:at])
        spec = None if dotted in sys.builtin_module_names else PathFinder.find_spec(dotted, places)
        if spec is None:
            return
        if spec.origin is not None and spec.has_location and "site-packages" not in Path(spec.origin).parts:
            check_source(Path(spec.origin), imported=True)
        places = list(spec.submodule_search_locations or [])


def without_call(name: str) -> str:
    """A name without the arguments of `file.py:NAME(k=3)`."""
    return name.partition("(")[0] if name.endswith(")") and ":" in name.partition("(")[0] else name


def located(name: str, *, folder: Path | None = None) -> tuple[ModuleType, str]:
    """Module and attribute that `file.py:NAME` or `package.module:NAME` names, also with arguments: `NAME(k=3)`.

    Args:
        folder: folder that file names are relative to; None: the working directory.
    Raises:
        NoSuchFile: no such file.
        ImportError: no such module.
        Exception: any exception of the module, or of the `check` passed to `relocated`.
    """
    if (check := _check.get()) is not None:
        check(name if folder is None or not name.rpartition(":")[0].endswith(".py") else str(folder / name))
    module_name, _, attribute = without_call(_moved.get().get(name, name)).rpartition(":")
    if module_name.endswith(".py"):
        return load_source((folder or Path()) / module_name), attribute
    return import_named(module_name, folders=[folder] if folder is not None else []), attribute


def attribute_of(name: str, *, folder: Path | None = None) -> Any:
    """The object that a name refers to; see `located` for the format.

    Raises:
        AttributeError: the module has no such attribute; also raises what `located` raises.
    """
    module, attribute = located(name, folder=folder)
    return functools.reduce(getattr, attribute.split("."), module)


@contextmanager
def relocated(places: Mapping[str, str], *, check: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside, names are replaced by others: an artifact's program is loaded from the artifact's own files.

    Args:
        places: name -> replacement.
        check: called with every name before it is imported; raises to refuse it.
    """
    tokens = _moved.set({**_moved.get(), **places}), _check.set(check)
    try:
        yield
    finally:
        _moved.reset(tokens[0])
        _check.reset(tokens[1])


@contextmanager
def alone() -> Iterator[None]:
    """Inside, files import only modules of their own root and installed ones, as on another machine."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_private(module_name: str) -> bool:
    """Whether a module was loaded from a file, under a name that is valid only in this process."""
    return module_name.startswith(PREFIX)


def qualified_name(value: Any) -> str:
    """`package.module:NAME` of a class or function, or of an object's class; `path/file.py:NAME` if from a file."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    module = str(kind.__module__)
    if is_private(module) and (file := getattr(sys.modules.get(module), "__file__", None)) is not None:
        try:
            module = str(Path(file).relative_to(Path.cwd()))
        except ValueError:
            module = str(file)
    return f"{module}:{kind.__qualname__}"


_PRIVATE = re.compile(rf"{PREFIX}[0-9a-f]{{8}}(?:_\d+)?\.")

_MOST_NAMES = 20  # of a module, in a message


def public(text: str) -> str:
    """A text without the private packages of modules from files: `assay_source_1a2b3c4d.mine` becomes `mine`."""
    return _PRIVATE.sub("", text)


def why_not_imported(name: str, error: Exception, *, folder: Path | None = None) -> str:
    """The end of a message about `file.py:NAME` or `package.module:NAME` that could not be imported.

    Args:
        error: what `assay.sources.modules.attribute_of` raised.
        folder: folder that file names are relative to; None: the working directory.
    """
    place, _, attribute = name.rpartition(":")
    text = f"cannot be imported: {type(error).__name__}: {public(str(error))}"
    if isinstance(error, NoSuchFile):
        path = (folder or Path()) / place
        files = [file.name for file in path.parent.glob("*.py")]
        near = nearest(path.name, files)
        return f"does not exist: no such file: {path}{_hint(near and f'{Path(place).with_name(near)}:{attribute}')}"
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.name in attribute.split("."):
        names = [key for key, value in vars(error.obj).items() if callable(value) and not key.startswith("_")]
        near = nearest(error.name, names)
        hint = _hint(f"{place}:{near}") if near else f"; it has {', '.join(names[:_MOST_NAMES]) or 'no functions'}"
        return f"does not exist: {place} has no {error.name!r}{hint}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None and place.startswith(public(error.name)):
        return f"{text}{_hint((near := _near_module(place)) and f'{near}:{attribute}')}"
    return text


def _hint(near: str | None) -> str:
    return f". Did you mean {near!r}?" if near else ""


def _near_module(place: str) -> str | None:
    """A module next to one that does not exist, with a similar name."""
    package, _, last = place.rpartition(".")
    if package and package not in sys.modules:
        return None
    folders = sys.modules[package].__path__ if package else [str(Path.cwd())]
    near = nearest(last, [module.name for module in pkgutil.iter_modules(folders)])
    return near and (f"{package}.{near}" if package else near)
