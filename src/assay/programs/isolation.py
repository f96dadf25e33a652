"""Copies of programs, for runs and for candidates. Each run has one of its own, and sees nothing of another run.

Copied: attributes of the program and of the objects in it, class attributes reached through `self`, and default
arguments of the user's functions. Shared by all runs: what cannot be copied (locks, clients, connections), objects with
a finalizer, arrays from 1 MiB, objects of which a container, together with the containers in it, has more than 1,000,
such as the documents of a corpus, and whatever an object's own `__deepcopy__` returns. What is shared and can be read,
apart from arrays and such documents, is compared before and after a run; a run that changed it is refused, unless only
a number changed: programs count their calls.

Module globals and the variables that functions enclose are neither copied nor compared, but an enclosed program is.
"""

import copy
import functools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from types import CellType, FunctionType, GeneratorType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import dspy
import pydantic

from assay.errors import ProgramError
from assay.models.scope import settings_for_threads
from assay.programs.agent import BaseAgent, streaming_as
from assay.sources.files import is_user_file

_LARGE = 1_000  # entries of a container, together with those of its siblings
_LARGE_BYTES = 1 << 20
_PLANS = 32  # programs whose plans are kept
_CONTAINERS = (list, dict, set, frozenset, tuple, deque)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, type(Ellipsis))
_COUNTERS = ("__len__", "qsize", "total_changes")  # readable state of objects that cannot be copied, such as queues


@contextmanager
def running(program: dspy.Module) -> Iterator[dspy.Module]:
    """The copy of a program for one run. Inside, the histories of the copy and of its models are the run's own.

    The run's trace is added to the caller's at the end, with the predictors of `program` itself: optimizers find them
    by identity.

    Raises:
        ProgramError: the run changed an attribute that all runs share.
    """
    plan, own, copies = _planned(program, for_run=True)
    before = plan.begun()
    lm, trace = dspy.settings.lm, dspy.settings.trace
    settings: dict[str, Any] = {"disable_history": False, "caller_modules": []}
    if isinstance(lm, dspy.BaseLM):
        settings["lm"] = lm.copy()
    if trace is not None:
        settings["trace"] = type(trace)()
    try:
        with streaming_as(program, own), dspy.context(**settings), settings_for_threads():
            yield own
    finally:
        changed = plan.ended(before)
        if trace is not None:
            trace.extend((copies.get(id(part), part), *call) for part, *call in settings["trace"])
    if changed is not None:
        raise ProgramError(
            f"a run of {type(program).__name__} changed {changed}, which cannot be copied for each run: later runs "
            "would see data of earlier tasks. Create it in forward, or keep the data in an attribute of the instance "
            "that copy.deepcopy copies. A class whose __deepcopy__ returns self is shared without this check"
        )


def copied(program: dspy.Module) -> Any:
    """A copy of a program, to be changed. It shares what the copies of runs share, and its class has its attributes."""
    return _planned(program, for_run=False)[1]


@dataclass
class _Plan:
    """What the copies of a program share, and what they replace."""

    shared: dict[int, Any] = field(default_factory=dict)  # by id, as they are
    made: list[tuple[Any, Callable[[], Any]]] = field(default_factory=list)  # parts with a copy of another kind
    functions: list[FunctionType] = field(default_factory=list)  # with parts of the program, or default arguments
    parts: set[int] = field(default_factory=set)  # ids of all parts of the program
    class_attributes: list[tuple[Any, str, Any]] = field(default_factory=list)  # (object, name, value)
    watched: dict[str, Callable[[], Any]] = field(default_factory=dict)  # by name
    classes: set[type] = field(default_factory=set)  # of the user, whose attributes are watched
    runs: int = 0  # under way
    idle: dict[str, Any] = field(default_factory=dict)  # readings before the first of them

    def copy(self, program: dspy.Module, *, for_run: bool) -> tuple[dspy.Module, dict[int, dspy.Module]]:
        """A copy, and the modules of `program` by the id of their copies."""
        memo = self._memo()
        own: dspy.Module = copy.deepcopy(program, memo)
        self._fill(memo)
        for holder, name, value in self.class_attributes if for_run else ():
            if (other := memo.get(id(holder))) is not None and name not in vars(other):
                vars(other)[name] = copy.deepcopy(value, memo)
        copies = {}
        for part in memo.get(id(memo), ()):  # `copy.deepcopy` lists there what it has copied
            if isinstance(part, dspy.Module):
                other = memo[id(part)]
                other.callbacks = list(part.callbacks)  # DSPy leaves them out of a copy
                copies[id(other)] = part
        return own, copies

    def begun(self) -> dict[str, Any]:
        """Readings before a run, without counts: those of a pool are right only while no run has taken from it."""
        with _lock:
            if not self.runs:
                self.idle = self._readings(counts=True)
            self.runs += 1
            return self._readings(counts=False)

    def ended(self, before: Mapping[str, Any]) -> str | None:
        """Name of a value that changed in a run, or in the runs at the same time if it is the last of them."""
        with _lock:
            self.runs -= 1
            changed = _changed(before, self._readings(counts=False))
            return changed if changed or self.runs else _changed(self.idle, self._readings(counts=True))

    def _readings(self, *, counts: bool) -> dict[str, Any]:
        values = {name: read() for name, read in self.watched.items()}
        for kind in self.classes:  # also what a run has added to one
            values |= {f"the class attribute {kind.__name__}.{name}": v for name, v in _class_attributes(kind).items()}
        return {name: _reading(value, counts=counts) for name, value in values.items()}

    def _memo(self) -> dict[int, Any]:
        memo = self.shared | {id(part): make() for part, make in self.made}
        return memo | {id(function): self._like(function) for function in self.functions}

    def _like(self, function: FunctionType) -> FunctionType:
        """A function with the same code, with empty cells for parts of the program and the same cells otherwise."""
        closure = function.__closure__ and tuple(
            CellType() if self._is_own(cell) else cell for cell in function.__closure__
        )
        other = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        return update_wrapper(other, function)  # type: ignore[return-value]

    def _fill(self, memo: dict[int, Any]) -> None:
        """Gives the functions of a copy its own parts, and default arguments."""
        for function in self.functions:
            other = memo[id(function)]
            other.__defaults__ = copy.deepcopy(function.__defaults__, memo)
            other.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
            for cell, original in zip(other.__closure__ or (), function.__closure__ or (), strict=True):
                if cell is not original:
                    cell.cell_contents = copy.deepcopy(original.cell_contents, memo)

    def _is_own(self, cell: CellType) -> bool:
        content = _content(cell)
        return (not isinstance(content, FunctionType) and id(content) in self.parts) or content in self.functions

    def examine(self, value: Any) -> None:
        """Finds all parts of a value that a plain `copy.deepcopy` would not treat as a run needs it."""
        waiting, functions = deque([(value, "", 1)]), list[FunctionType]()
        while waiting:
            part, path, count = waiting.popleft()
            if isinstance(part, _ATOMS) or id(part) in self.parts:
                continue
            self.parts.add(id(part))
            count = _count_below(part, count)
            if (make := _copying(part, count)) is not None:
                self.made.append((part, make))
                continue
            if isinstance(part, dspy.BaseLM | ModuleType) or count * _bytes_of(part) >= _LARGE_BYTES:
                self.shared[id(part)] = part
                continue
            if _has_finalizer(part):
                self._share(part, path)
                continue
            if isinstance(part, FunctionType) and _is_user_function(part):
                functions.append(part)
            if isinstance(part, dspy.Module) or _is_user_class(type(part)):
                waiting += ((attribute, f"{path}.{name}", 1) for name, attribute in self._of_classes(part).items())
            waiting += ((inner, f"{path}{name}", count) for name, inner in _parts(part).items())
        found = functions
        while found:  # a function that encloses a function that is copied is copied too
            found = [
                function
                for function in functions
                if function not in self.functions
                and (_has_defaults(function) or any(map(self._is_own, function.__closure__ or ())))
            ]
            self.functions += found

    def _share(self, value: Any, path: str) -> None:
        """Shares a value that has no copies, and watches it."""
        self.shared[id(value)] = value
        self.watched[f"the attribute {path.lstrip('.') or 'self'}"] = lambda: value

    def _of_classes(self, holder: Any) -> dict[str, Any]:
        """Watches the class attributes of an object of the user's; returns those that its copies get for themselves."""
        values: dict[str, Any] = {}
        for kind in type(holder).__mro__:
            if not _is_user_class(kind):
                continue
            self.classes.add(kind)
            for value in tuple(vars(kind).values()):
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType) and _has_defaults(function):
                    self.watched[f"a default argument of {function.__qualname__}"] = partial(_defaults, function)
            for name, value in _class_attributes(kind).items():
                if not isinstance(value, _ATOMS):
                    values.setdefault(name, value)
        plain: Any = object.__setattr__  # objects that check their attributes, such as pydantic's, get none
        if isinstance(holder, dspy.Module) or type(holder).__setattr__ is plain:
            self.class_attributes += [(holder, *item) for item in values.items() if hasattr(holder, "__dict__")]
        return values

    def share_what_cannot_be_copied(self, value: Any, path: str, seen: set[int], depth: int = 20) -> None:
        """Shares the smallest parts of a value that prevent its copy, and watches them."""
        if isinstance(value, _ATOMS) or id(value) in seen or self._copies(value):
            return
        seen.add(id(value))
        for name, part in _own_parts(value).items() if depth else ():
            self.share_what_cannot_be_copied(part, f"{path}{name}", seen, depth - 1)
        if not self._copies(value):
            self._share(value, path)

    def _copies(self, value: Any) -> bool:
        try:
            copy.deepcopy(value, self._memo())
        except Exception:
            return False
        return True

    def finish(self, program: dspy.Module) -> None:
        self.examine(program)
        seen = set[int]()
        self.share_what_cannot_be_copied(program, "", seen)
        for function in self.functions:  # which are filled after the copy
            for part in _parts(function).values():
                self.share_what_cannot_be_copied(part, function.__qualname__, seen)
        self.class_attributes = [entry for entry in self.class_attributes if self._copies(entry[-1])]


_plans: "OrderedDict[int, tuple[dspy.Module, _Plan]]" = OrderedDict()  # by id of the program, which may have no hash
_planning, _lock = threading.Lock(), threading.Lock()


def _planned(program: dspy.Module, *, for_run: bool) -> tuple[_Plan, dspy.Module, dict[int, dspy.Module]]:
    """The plan of a program, a copy, and the program's modules by the id of their copies."""
    plan = _plan_of(program)
    try:
        return plan, *plan.copy(program, for_run=for_run)
    except Exception:  # the program was given an attribute that cannot be copied
        plan = _plan_of(program, outdated=plan)
        return plan, *plan.copy(program, for_run=for_run)


def _plan_of(program: dspy.Module, outdated: _Plan | None = None) -> _Plan:
    with _planning:
        _, plan = _plans.get(id(program), (None, None))
        if plan is None or plan is outdated:
            plan = _Plan()
            plan.finish(program)
            _plans[id(program)] = program, plan
            while len(_plans) > _PLANS:
                _plans.popitem(last=False)
        return plan


def _count_below(value: Any, count: int) -> int:
    """How many objects are where the parts of a value are, if `count` are where the value is."""
    if isinstance(value, _CONTAINERS):
        if len(value) > _LARGE:
            return count * len(value)
        parts: Collection[Any] = [*value, *value.values()] if isinstance(value, dict) else value
    elif isinstance(value, dspy.Module) or not _is_user_class(type(value)):
        return count
    else:
        parts = _parts(value).values()
    return count * (sum(not isinstance(part, _ATOMS) for part in parts) or len(parts) or 1)


def _copying(part: Any, count_below: int) -> Callable[[], Any] | None:
    """How a part is copied that a deep copy cannot copy, or copies more of than is needed; None for other parts."""
    make: Callable[[], Any]
    if isinstance(part, dspy.BaseLM):
        make = part.copy
    elif isinstance(part, threading.local):  # empty, as in a new thread
        make = type(part)
    elif count_below > _LARGE:
        make = partial(copy.copy, part)
    else:
        return None
    try:
        make()
    except Exception:  # of the user's class, such as a model that makes a deep copy of its client
        return None
    return make


def _has_finalizer(part: Any) -> bool:
    """Whether an object releases something at its end, such as a client its connections: its copies would do so too."""
    kind = type(part)
    finalizes = isinstance(getattr(kind, "__del__", None), FunctionType) and not hasattr(kind, "__deepcopy__")
    return finalizes and not isinstance(part, dspy.Module | BaseAgent)


def _is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's code, a notebook included."""
    name = kind.__module__
    if name.partition(".")[0] in {"builtins", "assay", "dspy"}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_user_file(file)


def _class_attributes(kind: type) -> dict[str, Any]:
    """The attributes that a class has itself, without its methods and those of Python."""
    return {
        name: value
        for name, value in tuple(vars(kind).items())
        if not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__"))
    }


_is_user_file = functools.cache(lambda file: is_user_file(Path(file)))  # asked for every object of every run


def _bytes_of(value: Any) -> int:
    """Size of an array, a tensor or a table, or of what an object of C code is copied by; 0 of anything else."""
    kind: Any = type(value)
    if not hasattr(kind, "__array__"):
        if kind.__getstate__ is object.__getstate__ or not isinstance(kind.__getstate__, MethodDescriptorType):
            return 0
        with suppress(Exception):  # for example a closed buffer
            state = value.__getstate__()
            return len(state) if isinstance(state, bytes) else 0
        return 0
    size = getattr(value, "nbytes", None)
    if size is None and isinstance(count := getattr(value, "size", None), int):  # a table of pandas
        size = 8 * count
    return size if isinstance(size, int) else 0


def _parts(value: Any) -> dict[str, Any]:
    """What `copy.deepcopy` copies of a value, by its place; empty if the value's class has its own `__deepcopy__`."""
    if isinstance(value, dict):
        parts = {f"[{key!r}]": item for key, item in value.items()}
        return parts | {f" key {key!r}": key for key in value if not isinstance(key, _ATOMS)}
    if isinstance(value, _CONTAINERS):
        return {f"[{place}]": item for place, item in enumerate(value)}
    if isinstance(value, MethodType):
        return {"": value.__self__}
    if isinstance(value, FunctionType):
        enclosed = [_content(cell) for cell in value.__closure__ or ()]
        programs = [part for part in enclosed if isinstance(part, FunctionType | dspy.Module)]
        return {str(place): part for place, part in enumerate((*programs, *_defaults(value)))}
    if isinstance(value, partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if getattr(type(value), "__deepcopy__", None) not in (None, pydantic.BaseModel.__deepcopy__):
        return {}
    return {f".{name}": part for name, part in _attributes(value).items()}


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in `__slots__` included."""
    state = object.__getstate__(value)
    slots = state[1] if isinstance(state, tuple) else {}
    return {**getattr(value, "__dict__", {}), **slots}


def _own_parts(value: Any) -> dict[str, Any]:
    """The parts of which some can be shared and others copied. Objects of libraries are copied whole or not at all."""
    divisible = isinstance(value, (*_CONTAINERS, MethodType, FunctionType, partial, dspy.Module, pydantic.BaseModel))
    return _parts(value) if divisible or _is_user_class(type(value)) else {}


def _is_user_function(function: FunctionType) -> bool:
    path = Path(function.__code__.co_filename)
    return is_user_file(path) or not path.is_file()


def _defaults(function: FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _has_defaults(function: FunctionType) -> bool:
    """Whether a default argument can be changed."""
    return not all(isinstance(value, _ATOMS) for value in _defaults(function))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _reading(value: Any, depth: int = 6, count: int = 1, *, counts: bool) -> Any:
    """What can be compared of a value: its contents, as far as they are texts, or objects of the user's with them."""
    if isinstance(value, _ATOMS):
        return repr(value) if isinstance(value, str | bytes | None) else ""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else [frame.f_lasti, _reading(frame.f_locals, depth - 1, counts=counts)]
    contains = isinstance(value, _CONTAINERS)
    parts = value if contains else _attributes(value) if _is_user_class(type(value)) else ()
    count *= len(parts)
    if depth and parts and count <= _LARGE:
        read = partial(_reading, depth=depth - 1, count=count, counts=counts)
        if isinstance(parts, dict):
            return {repr(name) if contains else f".{name}": read(part) for name, part in parts.items()}
        return [*map(read, parts)]
    if contains:
        return len(value)
    return [id(value), *(_count(value, name) for name in _COUNTERS if counts)]


def _count(value: Any, name: str) -> Any:
    with suppress(Exception):  # for example a connection that was closed, or that belongs to another thread
        count = getattr(value, name)
        return count() if callable(count) else count


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Name of a value that changed. One that was None or not there may be set once: programs build an index at their
    first run."""
    for name, value in before.items():
        other = after.get(name)
        if value == other or value == repr(None):
            continue
        if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
            return f"{name}{_changed(value, other) or ''}"
        return name
    return None
