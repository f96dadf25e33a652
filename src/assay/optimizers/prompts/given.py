"""Teleprompters that assay has no name for: an object, or the class, function or object that a name refers to.

Such an optimizer has `compile(student, trainset=…)` and takes what it names of `valset`, `metric`, `teacher`, `seed`
and `num_threads`. It runs as a copy, with the job's metric and models where it has none of its own, on a student whose
runs are recorded. What it returns must be the student's program with other instructions and demonstrations, because an
artifact stores nothing else.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ArtifactError, AssayError, ConfigError, OptimizerError, ProgramError
from assay.evaluation.session import RecordedProgram
from assay.optimizers.prompts.named import OF_COMPILE, OFFERED, Proposal, classes_of, signature_of, taken_by
from assay.programs import program_version
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.loading import arguments_in
from assay.sources.modules import attribute_of, qualified_name, why_not_imported, without_call
from assay.support.awaited import completed
from assay.support.names import one_of
from assay.support.scrubbing import is_credential, message

_METRICS = ("metric", "metric_fn")
_MODELS = ("prompt_model", "task_model", "reflection_lm")
_MARK = "assay_teleprompter"  # DSPy setting of threads that have the session's settings
_LONGEST = 60  # characters of a setting in a name
_MIPRO_BATCH = 35  # default of MIPROv2's minibatch_size
_STUDENT = ("student", "program", "module")
_WHERE_REQUIRED: dict[str, Callable[[Proposal], Any]] = {
    "teacher": Proposal.teacher,
    "max_demos": lambda p: 2 * p.demos,
}
_given: dict[str, Any] = {}  # objects of this process by their names


def optimizer_name(value: Any) -> str:
    """The name of an optimizer: a string as it is, an object by its class and settings, without credentials.

    The object can be found by this name until the process ends; the same settings give the same name, so that a job
    with the object can be resumed.

    Raises:
        ValueError: the value is empty, or has no `compile` and is not a function that makes such an object.
    """
    if isinstance(value, str | Path):
        if not str(value).strip():
            raise ValueError("must not be empty")
        return str(value)
    if not callable(getattr(value, "compile", None)) and not inspect.isroutine(value):
        raise ValueError(
            "must be the name of an optimizer, or an object with compile(student, trainset=…), such as dspy.SIMBA(…)"
        )
    name = _public_name(value if isinstance(value, type) or inspect.isroutine(value) else type(value))
    if not isinstance(value, type) and not inspect.isroutine(value):
        name = f"{name}({', '.join(f'{key}={text}' for key, text in _settings_of(value).items())})"
    _given[name] = value
    return name


def title_of(name: str) -> str:
    """The name of an optimizer for candidates, files and notes: without its settings."""
    return without_call(name)


def _public_name(value: Any) -> str:
    """`dspy:GEPA` of what DSPy exports, `package.module:NAME` or `file.py:NAME` of anything else."""
    name = getattr(value, "__name__", "")
    is_dspys = str(value.__module__).partition(".")[0] == "dspy" and getattr(dspy, name, None) is value
    return f"dspy:{name}" if is_dspys else qualified_name(value)


def _settings_of(optimizer: Any) -> dict[str, str]:
    """The attributes of an optimizer that describe it and are not the defaults of its constructor."""
    defaults = {p.name: p.default for p in signature_of(type(optimizer))}
    texts = {
        name: _text(name, value)
        for name, value in getattr(optimizer, "__dict__", {}).items()
        if not name.startswith("_") and value is not defaults.get(name, inspect.Parameter.empty)
    }
    return {name: text for name, text in texts.items() if text is not None}


def _text(name: str, value: Any) -> str | None:
    """A setting as text; None for what has no short and lasting one."""
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        shortened = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
        return "…" if is_credential(name, value) else repr(message(shortened))
    if isinstance(value, dspy.BaseLM):
        return str(value.model)
    if isinstance(value, type) or inspect.isroutine(value):
        return qualified_name(value)
    return type(value).__name__ if callable(value) else None


def target_of(name: str, known: tuple[str, ...] = ()) -> Any:
    """The class, function or object that an optimizer's name refers to.

    Args:
        known: names of optimizers, for the message about a name that is none.
    Raises:
        ConfigError: there is nothing of that name, or it is not an optimizer.
    """
    if name in _given:
        return _given[name]
    module, colon, _ = without_call(name).rpartition(":")
    if not colon or not module:
        other = "a .toml file of settings, package.module:NAME, file.py:NAME"
        raise ConfigError(f"`optimizer={name!r}` {one_of(name, known, other=other)}")
    try:
        arguments_in(name)
    except ProgramError as error:
        raise ConfigError(f"optimizer {error}") from error
    try:
        target = attribute_of(name)
    except ArtifactError:
        raise
    except Exception as error:
        raise ConfigError(f"optimizer {title_of(name)} {why_not_imported(title_of(name), error)}") from error
    if not callable(getattr(target, "compile", None)) and not inspect.isroutine(target):
        what = "class" if isinstance(target, type) else f"value of type {type(target).__name__}"
        raise ConfigError(
            f"optimizer {title_of(name)} is a {what} without compile: an optimizer is a class or an object with "
            "compile(student, trainset=…), or a function that returns one"
        )
    return target


def check_arguments(name: str, target: Any, settings: Mapping[str, Any]) -> None:
    """Refuses an optimizer that requires arguments which nobody gives, as far as its signatures show that.

    Args:
        target: the class, function or object of this name.
    Raises:
        ConfigError: names them, and says where to give them.
    """
    if isinstance(target, type) or inspect.isroutine(target):
        try:
            offered = dict.fromkeys(taken_by(target) & {*OFFERED, *settings})
            inspect.signature(target).bind(**{**offered, **_arguments_in(name)})
        except ValueError:  # of a class in C
            pass
        except TypeError as error:
            raise ConfigError(
                f"optimizer {title_of(name)} cannot be built: {error}. Give its arguments in the name, "
                f"{title_of(name)}(NAME=VALUE), or name a function without arguments that returns the optimizer"
            ) from error
    if hasattr(target, "compile"):
        function = inspect.getattr_static(target, "compile")
        bound = isinstance(target, type) and inspect.isfunction(function)
        _check_compile(title_of(name), target, signature_of(target.compile)[bound:], settings)


def _arguments_in(name: str) -> dict[str, Any]:
    return arguments_in(name) if name not in _given else {}


def _check_compile(
    title: str, optimizer: Any, parameters: Sequence[inspect.Parameter], settings: Mapping[str, Any]
) -> None:
    by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {*by_place[:1], *_STUDENT, *OF_COMPILE, *_WHERE_REQUIRED, *settings}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given
    ]
    if "MIPROv2" in classes_of(optimizer) and getattr(optimizer, "auto", "") is None and "num_trials" not in settings:
        missing.append("num_trials")  # where auto is None
    if missing:
        raise ConfigError(f"optimizer {title}: compile requires {', '.join(missing)}: give it in `optimizer_settings`")


def compiled_by(name: str, p: Proposal, *, configured: Any = None) -> RecordedProgram:
    """What an optimizer by class, function or object makes of the student.

    Args:
        configured: the model set in DSPy outside of the job. Teleprompters take it where none is named, so that it
            stands for the job's.
    Raises:
        ConfigError: it cannot be built, or `compile` requires an argument that nobody gives.
        OptimizerError: it returned something else than the student's program with other prompts.
    """
    title, student = title_of(name), Student.of(p.student)
    optimizer = built(name, p, configured)
    p.notes.append(f"{title}: {_who_scores(optimizer, p)}; val, gate and test are scored by the rubric")
    positional, named = _arguments(optimizer, student, title, p)
    named |= _fitted_batches(optimizer, title, p)
    try:
        with dspy.context(**{_MARK: True}):
            result = completed(optimizer.compile(*positional, **named))
    except SystemExit as error:
        raise OptimizerError(f"compile ended the process with sys.exit({error.code!r})") from error
    return _recorded(result, student, title, p)


def built(name: str, p: Proposal, configured: Any = None) -> Any:
    """The optimizer by its name, with the job's metric and models where it has none of its own.

    Args:
        configured: see `compiled_by`.
    Raises:
        ConfigError: it cannot be built, or what a function returns is not an optimizer.
    """
    target = target_of(name)
    if isinstance(target, type) or inspect.isroutine(target):
        try:
            optimizer = p.build(target, **_arguments_in(name))
        except AssayError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"optimizer {title_of(name)} cannot be built: {type(error).__name__}: {error}") from error
        if not callable(getattr(optimizer, "compile", None)):
            raise ConfigError(
                f"optimizer {title_of(name)} returned a {type(optimizer).__name__}, which has no "
                "compile(student, trainset=…)"
            )
    else:
        optimizer = target
    if optimizer is not target and isinstance(target, type):
        return optimizer
    own = copy.copy(optimizer)  # the user's stays as it is, for another compile
    for attribute in (*_METRICS, *_MODELS, "max_errors"):
        value = getattr(own, attribute, own)  # itself: there is no such attribute
        if value is None or (attribute in _MODELS and value is configured):
            setattr(own, attribute, OFFERED["metric" if attribute in _METRICS else attribute](p))
        elif value is p.session.given_lm:
            setattr(own, attribute, p.session.lm)
    return own


def _fitted_batches(optimizer: Any, title: str, p: Proposal) -> dict[str, Any]:
    """Makes batches of DSPy's optimizers smaller that have more tasks than there are, which they would refuse.

    Returns:
        Arguments of `compile`.
    """
    kinds = classes_of(optimizer)
    if "SIMBA" in kinds and optimizer.bsize > len(p.train):
        p.notes.append(f"{title}: bsize is {len(p.train)}, the number of train tasks, and not {optimizer.bsize}")
        optimizer.bsize = len(p.train)
    large = p.settings.get("minibatch_size", _MIPRO_BATCH) > len(p.val)
    return {"minibatch": False} if "MIPROv2" in kinds and optimizer.auto is None and large else {}


def _who_scores(optimizer: Any, p: Proposal) -> str:
    """Which metric the optimizer uses, for a note."""
    metric = next((value for name in _METRICS if (value := getattr(optimizer, name, None)) is not None), None)
    if metric is None:
        takes = any(parameter.name == "metric" for parameter in signature_of(optimizer.compile))
        return "its metric is the rubric" if takes else "it has no metric"
    if getattr(metric, "rubric", None) is p.session.rubric:
        return "its metric is the rubric"
    return f"it searched with a metric of its own, {_text('metric', metric) or type(metric).__name__}"


def _arguments(optimizer: Any, student: "Student", title: str, p: Proposal) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of `compile`, by position and by name."""
    parameters = signature_of(optimizer.compile)
    _check_compile(title, optimizer, parameters, p.settings)
    values = {**OF_COMPILE, **dict.fromkeys(p.settings)}
    positional, named = list[Any](), dict[str, Any]()

    def value_of(name: str) -> Any:
        return p.settings[name] if name in p.settings else {**_WHERE_REQUIRED, **OF_COMPILE}[name](p)

    for parameter in parameters:
        name, required = parameter.name, parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [] if positional else [student]
        elif parameter.kind is parameter.VAR_KEYWORD:
            further = {"trainset", "valset", *p.settings} - {other.name for other in parameters}
            named |= {key: value_of(key) for key in further - taken_by(type(optimizer))}
        elif parameter.kind is not parameter.KEYWORD_ONLY and not positional:
            positional.append(student)
        elif name in _STUDENT:
            named[name] = student
        elif name == "seed" and getattr(optimizer, "seed", None) is not None and name not in p.settings:
            continue
        elif name in values or required:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value_of(name))
            else:
                named[name] = value_of(name)
    return positional, named


class Student(RecordedProgram):
    """A recorded program that other code can treat as the program itself.

    Class, attributes, predictors' names and state are those of the program; `type(student)()` is a recorded program
    too. Each copy has signatures of its own: an instruction that is set in a signature's class would change the
    baseline too. A run in a thread that DSPy's settings do not reach has the session's.
    """

    _first: "Student"  # of the classes that `of` makes

    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__ |= {**vars(self._first), "program": type(self._first.program)(*args, **options)}
        self._separate_signatures()

    @classmethod
    def of(cls, recorded: RecordedProgram) -> "Student":
        student, kind = copy.deepcopy(recorded), type(recorded.program)
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        student.__class__ = type(kind.__name__, (cls,), {**names, "_first": student})
        assert isinstance(student, cls)
        student._separate_signatures()
        return student

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self.program)

    def _separate_signatures(self) -> None:
        for predictor in self.program.predictors():
            predictor.signature = predictor.signature.with_instructions(predictor.signature.instructions)

    def __deepcopy__(self, memo: object) -> "Student":
        other = super().__deepcopy__(memo)
        assert isinstance(other, Student)
        other._separate_signatures()
        return other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "program" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.program, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name) or "program" not in vars(self)
        if own or name not in vars(self.program):
            super().__setattr__(name, value)
        else:
            setattr(self.program, name, value)

    def named_parameters(self) -> Any:
        return self.program.named_parameters()

    def forward(self, *args: Any, **inputs: Any) -> dspy.Prediction:
        if args:
            names = [p.name for p in signature_of(self.program.forward)]
            inputs = {**dict(zip(names, args, strict=False)), **inputs}
        if dspy.settings.get(_MARK):
            return super().forward(**inputs)
        with self.session.context(), dspy.context(**{_MARK: True}):
            return super().forward(**inputs)

    async def aforward(self, *args: Any, **inputs: Any) -> dspy.Prediction:
        return await asyncio.to_thread(self.forward, *args, **inputs)


def _recorded(result: Any, student: Student, title: str, p: Proposal) -> RecordedProgram:
    """The program that `compile` returned, under recording; of None, the student if it was changed in place."""
    returned = student if result is None else result
    if not isinstance(returned, dspy.Module):
        raise OptimizerError(f"compile returned a {type(returned).__name__}, not a program")
    program = returned.program if isinstance(returned, RecordedProgram) else returned
    before = p.student.program
    if result is None and program_version(program, None) == program_version(before, None):
        raise OptimizerError("compile returned None, and the student is as it was")
    _drop_logs(program, before)
    if (why := _other_structure(returned, program, before)) is not None:
        raise OptimizerError(
            f"compile returned {why}, which an artifact cannot hold: it has the instructions and demonstrations of the "
            "program's own predictors. Write such a program as a class, and compile that"
        )
    own = {name for name, predictor in before.named_predictors() if predictor.lm is not None}
    for name, predictor in program.named_predictors():
        if predictor.lm is not None and name not in own:
            p.notes.append(f"{title} set a model for {name}: it is left out, as an artifact has one model")
    changed = [name for name, value in vars(before).items() if _is_plain(value) and vars(program).get(name) != value]
    if changed and not isinstance(program, dspy.Predict):  # whose attributes are DSPy's
        p.notes.append(
            f"{title} changed {', '.join(changed)}: an artifact has a program's attributes only as arguments of its "
            "constructor"
        )
    return RecordedProgram(program, p.session, prompt_format=p.student.prompt_format)


@contextmanager
def kept_configuration() -> Iterator[None]:
    """Undoes the `dspy.configure` of an optimizer at the end: in the job's context it would set the job's own model."""
    before = dspy.settings.copy()
    try:
        yield
    finally:
        changed = [name for name, value in dspy.settings.copy().items() if value is not before.get(name)]
        if changed:
            dspy.configure(**{name: before.get(name) for name in changed})


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _drop_logs(program: dspy.Module, before: dspy.Module) -> None:
    """Removes what an optimizer has added to a program besides modules: its candidates, scores and statistics."""
    for name in vars(program).keys() - vars(before).keys():
        if not isinstance(vars(program)[name], dspy.Module) and name != "forward":
            delattr(program, name)


def _other_structure(returned: dspy.Module, program: dspy.Module, before: dspy.Module) -> str | None:
    """How a program differs from the student in more than its prompts; None if it does not."""
    if any(_is_replaced(vars(module).get("forward")) for module in (returned, program)):
        return "a program with another forward"
    if isinstance(program, NearestDemos | EnsembleProgram):
        return None
    if qualified_name(program) != qualified_name(before):
        return f"a {type(program).__name__} and not a {type(before).__name__}"
    added = [name for name, value in vars(returned).items() if isinstance(value, dspy.Module) and name != "program"]
    if _fields_of(program) != _fields_of(before) or (returned is not program and added):
        return f"a {type(program).__name__} with other predictors or fields"
    return None


def _is_replaced(forward: Any) -> bool:
    """Whether a program's own `forward` is not that of its class, which the protection of GEPA's programs wraps."""
    return forward is not None and not getattr(forward, "_assay_guard", False)


def _fields_of(program: dspy.Module) -> dict[str, tuple[str, ...]]:
    return {
        name: (type(predictor).__name__, *predictor.signature.input_fields, "->", *predictor.signature.output_fields)
        for name, predictor in program.named_predictors()
    }
