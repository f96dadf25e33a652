"""Loads programs by name: `path/to/file.py:Class`, `package.module:Class`, or that of a shipped program."""

import ast
import difflib
import functools
import inspect
import json
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import dspy

from assay.datasets import Task
from assay.datasets.fields import Fields, allows_none
from assay.errors import ArtifactError, ProgramError
from assay.programs.agent import Agent, BaseAgent
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.foreign_agent import ForeignAgent, TextAgent
from assay.programs.isolation import copied
from assay.programs.wrapping import AgentProgram, FunctionProgram, as_module, takes_inputs, with_forward
from assay.sources.files import is_user_file
from assay.sources.modules import NoSuchFile, load_source, located, public, without_call
from assay.sources.opened import forget, watching
from assay.support.names import nearest
from assay.support.places import no_such_file, similar_name

# -- Reads the state of a program that DSPy's `program.save("x.json")` wrote.
#
# Nothing is unpickled: a `.pkl` file, and a folder that `save_program=True` wrote, are refused with the way out.


_LARGEST = 256 << 20  # bytes


def read_saved_state(path: Path) -> tuple[dict[str, Any], str]:
    """The state in a file, without its metadata, and where it comes from: the file, and another version that saved it.

    Raises:
        ProgramError: the file is not the state of a program; the message says what it is.
    """
    state = _read(path)
    saved_by = state.pop("metadata", {}).get("dependency_versions", {}).get("dspy")
    differs = saved_by and saved_by != dspy.__version__
    version = f" (saved by DSPy {saved_by}, this is {dspy.__version__})" if differs else ""
    return state, f"{path}{version}"


def models_in_state(path: Path) -> dict[str, str]:
    """Names of the models that a state has, by predictor. They are not loaded: a crafted state could name a server."""
    state, _ = read_saved_state(path)
    models = {name: part["lm"] for name, part in state.items() if isinstance(part, dict) and part.get("lm")}
    return {name: str(lm.get("model") if isinstance(lm, dict) else lm) for name, lm in models.items()}


def saved_program_hint(path: Path) -> str | None:
    """What to do with a file or folder that DSPy saved and that was given as the program; None for any other path."""
    if path.suffix == ".json":
        return (
            f"{str(path)!r} is not a program; if it is the state of one, give it beside its class: file.py:Class with "
            f"`state={str(path)!r}`"
        )
    if path.suffix in (".pkl", ".pickle") or (path / "program.pkl").is_file():
        return _pickled(path)
    return None


def _pickled(path: Path) -> str:
    how = (
        f"dspy.load({str(path)!r}, allow_pickle=True)"
        if path.is_dir()
        else f"program.load({str(path)!r}, allow_pickle=True)"
    )
    return (
        f"{str(path)!r} is a pickle, which is not loaded: it can run any code. If you trust it, load it in Python with "
        f"{how}, save its state with program.save('state.json'), and give that as the state (`state=…`) of "
        "file.py:Class"
    )


def _read(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `ProgramError` for any other file, with what it is."""
    if path.is_dir():
        if (path / "manifest.json").is_file():
            raise ProgramError(f"`state={str(path)!r}` is an artifact: give its folder as the program, without a state")
        raise ProgramError(
            saved_program_hint(path) or f"`state={str(path)!r}` is a folder, not a file of program.save()"
        )
    if path.suffix in (".pkl", ".pickle"):
        raise ProgramError(_pickled(path))
    try:
        if path.stat().st_size > _LARGEST:
            raise ProgramError(f"`state={str(path)!r}` is larger than {_LARGEST >> 20} MiB: not the state of a program")
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ProgramError(f"state: {no_such_file(path)}") from None
    except OSError as error:
        raise ProgramError(f"`state={str(path)!r}` cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ProgramError(
            f"`state={str(path)!r}` is not JSON; a state is what program.save('state.json') wrote"
        ) from None
    if isinstance(state, dict) and "kind" in state and {"state", "members", "inner"} & state.keys():
        raise ProgramError(f"`state={str(path)!r}` is a part of an artifact: give the artifact's folder as the program")
    metadata = state.get("metadata", {}) if isinstance(state, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("dependency_versions", {}), dict):
        raise ProgramError(
            f"`state={str(path)!r}` is not the state of a program: program.save('state.json') writes an object with an "
            "entry for each predictor"
        )
    return dict(state)


SHIPPED: Mapping[str, str] = {
    name: f"assay.shipped.programs.{name}.program:{kind}"
    for name, kind in {
        "math_qa": "MathQA",
        "classify": "Classify",
        "extract": "Extract",
        "code_repair": "CodeRepair",
        "tool_user": "ToolUser",
        "answer_from_documents": "AnswerFromDocuments",
        "nim": "NimPlayer",
        "experiment": "Experimenter",
        "text_to_sql": "TextToSQL",
        "converse": "Converse",
    }.items()
}
"""Name of a shipped program -> its class, as `package.module:Class`."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@runtime_checkable
class BuiltFromTasks(Protocol):
    """Interface of a program class that reads its labels or output fields from the data, such as `Classify`."""

    def from_tasks(self, tasks: Sequence[Task]) -> dspy.Module:
        """A class method that returns a program for these tasks."""


def program_class(name: str) -> Any:
    """Returns the class, factory or instance that a program's name refers to.

    Raises:
        ProgramError: the file, module or attribute does not exist; the message names the missing part.
    """
    name = SHIPPED.get(name, name)
    module_name, colon, attribute = without_call(name).rpartition(":")
    if not colon:
        path = Path(name)
        if path.suffix == ".py":
            return program_class(full_name(name))
        if (hint := saved_program_hint(path)) is not None:
            raise ProgramError(hint)
        if path.is_dir():
            raise ProgramError(
                f"the folder {name!r} is not an artifact: it has no manifest.json. "
                "Pass a folder that `assay compile` wrote, or file.py:Class"
            )
        if len(path.parts) > 1:
            raise ProgramError(
                f"no artifact or program at {name!r}: there is no such file or folder{similar_name(path)}"
            )
        if path.is_file():
            raise ProgramError(f"{name!r} is not a program: pass path/to/file.py:Class or the folder of an artifact")
        made = [str(made) for made in [Path(".assay/artifacts") / name] if made.is_dir()]
        near = made or difflib.get_close_matches(name, SHIPPED, 1)
        hint = f". Did you mean {near[0]!r}?" if near else similar_name(path)
        raise ProgramError(
            f"unknown program {name!r}: pass path/to/file.py:Class, package.module:Class, the folder of an artifact, "
            f"or one of {', '.join(SHIPPED)}{hint}"
        )
    try:
        module, attribute = located(name)
    except NoSuchFile:
        raise ProgramError(no_such_file(module_name)) from None
    except ArtifactError:
        raise
    except Exception as error:
        raise ProgramError(f"{module_name!r} cannot be imported: {_describe(error)}") from error
    try:
        target = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        classes = [
            k
            for k, v in vars(module).items()
            if inspect.isclass(v) and issubclass(v, dspy.Module) and v.__module__ == module.__name__
        ]
        similar = nearest(attribute, classes)
        hint = f". Did you mean {f'{module_name}:{similar}'!r}?" if similar else ""
        raise ProgramError(
            f"{module_name} has no {attribute!r}; its programs are {', '.join(classes) or 'none'}{hint}"
        ) from None
    part_of_dspy = type(target).__module__.partition(".")[0] == "dspy" and not isinstance(target, dspy.Module | type)
    if not callable(target) or part_of_dspy:  # `dspy.Parallel` and `dspy.KNN` can be called, but not with a task
        raise ProgramError(
            f"{name!r} is a {type(target).__name__}; a program is a dspy.Module, its class, or a function returning one"
        )
    if isinstance(target, dspy.Module | type):
        with_forward(target if isinstance(target, type) else type(target))
    return target


def full_name(name: str) -> str:
    """Adds the program's name to `file.py`, if the file has exactly one. Other names are returned unchanged.

    Raises:
        ProgramError: the file does not exist, cannot be imported, or has no or several programs.
    """
    return f"{name}:{_only_program(Path(name))}" if name.endswith(".py") else name


def _only_program(path: Path) -> str:
    """Name of the only program of a file: a class of a `dspy.Module` or an agent, else an instance of a `dspy.Module`.

    Base classes of others are ignored.
    """
    if not path.is_file():
        raise ProgramError(no_such_file(path))
    try:
        module = load_source(path)
    except ArtifactError:
        raise
    except Exception as error:
        raise ProgramError(f"{str(path)!r} cannot be imported: {_describe(error)}") from error
    classes = [
        v
        for v in vars(module).values()
        if inspect.isclass(v) and v.__module__ == module.__name__ and not inspect.isabstract(v)
    ]
    programs = [v for v in classes if issubclass(v, dspy.Module) or _is_agent_class(v)]
    names = [
        kind.__name__
        for kind in programs
        if not any(issubclass(other, kind) and other is not kind for other in programs)
    ] or [name for name, value in vars(module).items() if isinstance(value, dspy.Module)]
    if not names:
        raise ProgramError(
            f"{path} has no class or instance of a dspy.Module, and no class of an agent with execute and "
            f"set_parameters; a function that is or returns a program is named, as in {path}:NAME"
        )
    if len(names) > 1:
        raise ProgramError(f"{path} has several programs; pass one of {', '.join(f'{path}:{name}' for name in names)}")
    return names[0]


def _is_agent_class(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("execute", "set_parameters"))


def _describe(error: Exception) -> str:
    """The error with the line of the user's own file that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(Path(f.filename))]
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {public(str(error))}{location}"


def load_program(name: str, *, tasks: Sequence[Task] = (), config: dict[str, Any] | None = None) -> Any:
    """Creates a program by name.

    Args:
        tasks: data for programs that read their labels or fields from it (`BuiltFromTasks`).
        config: constructor arguments from an artifact; `tasks` is then ignored.
    Raises:
        ProgramError: the program cannot be found or built, or is not a `dspy.Module`, agent or function.
    """
    name = full_name(name)
    target, arguments = program_class(name), arguments_in(name)
    from_artifact = config is not None  # whose files are those that it carries
    config = {**arguments, **(config or {})} if arguments else config
    if not from_artifact:
        forget(name)
    try:
        with nullcontext() if from_artifact else watching(name):  # what its constructor reads
            program = _built(target, tasks, config)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"{name!r} cannot be built: {_describe(error)}{_how_to_give(name, target, config)}"
        ) from error
    if not isinstance(program, dspy.Module):
        raise ProgramError(
            f"{name!r} is a {type(program).__name__}; a program is a dspy.Module, "
            "an agent with execute and set_parameters, or a function"
        )
    with_forward(type(program))
    if name not in SHIPPED:
        module, attribute = located(name)
        program._assay_origin = (module.__name__, attribute)  # an artifact copies the source from there
    return program


def arguments_in(name: str) -> dict[str, Any]:
    """The arguments in a program's name: those of `file.py:NAME(k=3)`; literals, given by name.

    Raises:
        ProgramError: they are not.
    """
    if (base := without_call(name)) == name:
        return {}
    try:
        call = ast.parse(f"f{name[len(base) :]}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ProgramError(f"{name!r}: arguments are literals that are given by name, such as {base}(k=3, path='a.txt')")


def _how_to_give(name: str, target: Any, config: Mapping[str, Any] | None) -> str:
    """How to give a class or factory the arguments that it requires; empty if it has all of them."""
    try:  # the signature of a module's class is that of DSPy's metaclass
        called = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = [
        parameter.name
        for parameter in list(parameters)[isinstance(target, type) :]
        if parameter.default is parameter.empty and parameter.kind in _BY_NAME and parameter.name not in (config or {})
    ]
    if not needed:
        return ""
    example = ", ".join(f"{argument}=…" for argument in needed)
    return (
        f". Give the arguments in the name, '{without_call(name)}({example})', if they are literals; otherwise name a "
        "function without arguments that returns the program"
    )


def _built(target: Any, tasks: Sequence[Task], config: dict[str, Any] | None) -> Any:
    if isinstance(target, dspy.Module):
        program = copied(target)  # the module's instance is not modified
    elif config:
        program = target(**config)
    elif isinstance(target, BuiltFromTasks):
        program = target.from_tasks(tasks)
    elif isinstance(target, type):
        program = target()
    else:
        program = as_module(target)
    if not isinstance(program, dspy.Module) and isinstance(program, BaseAgent):
        return AgentProgram(program)
    return program


def program_fields(program: Any) -> Fields | None:
    """Returns a program's inputs and outputs with their declared types; None if its inputs are unknown.

    The inputs are those of `program_inputs`, and the other arguments of its function (`forward`, `solve` of an agent,
    the function itself) that have a default. A function with `**` takes all inputs of the program's signatures. The
    type of an input is the annotation of the argument, otherwise that of the signatures' inputs of this name.
    """
    if isinstance(program, ForeignAgent | TextAgent):
        return None  # the agent takes whatever a task has
    if isinstance(program, NearestDemos):
        return program_fields(program.program)
    if isinstance(program, EnsembleProgram):
        return program_fields(program.members[0])
    if isinstance(program, dspy.BestOfN | dspy.Refine):
        return program_fields(program.module)
    if (signature := _own_signature(program)) is not None:
        return Fields(
            required={name: info.annotation for name, info in signature.input_fields.items() if not _is_optional(info)},
            optional={name: info.annotation for name, info in signature.input_fields.items() if _is_optional(info)},
            outputs=_declared([signature.output_fields]),
        )
    required = program_inputs(program)
    predictors = program.predictors() if isinstance(program, dspy.Module) else []
    declared = _declared([predictor.signature.input_fields for predictor in predictors])
    outputs = _declared([predictor.signature.output_fields for predictor in predictors])
    function = _function_of(program)
    parameters = {} if function is None else _arguments_of(function, program)
    hints = _hints(function)
    optional = [
        name
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty and parameter.kind in _BY_NAME
    ]
    if required is None:
        needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind in _BY_NAME]
        required = needed or None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any and not isinstance(program, Agent):
        produced = outputs.keys() if len(predictors) > 1 else ()
        optional += [name for name in declared if name not in produced and name not in (required or ())]
    if required is not None and len(predictors) == 1 and not set(required) & parameters.keys():
        fields = predictors[0].signature.input_fields  # the inputs are the signature's own
        optional += [name for name in required if name in fields and _is_optional(fields[name])]
        required = [name for name in required if name not in optional]
    if required is None and not optional:
        return None
    types = {name: hints.get(name, declared.get(name, Any)) for name in [*(required or ()), *optional]}
    return Fields(
        required={name: types[name] for name in required or ()},
        optional={name: types[name] for name in optional if name not in (required or ())},
        outputs=outputs,
    )


def _function_of(program: Any) -> Callable[..., Any] | None:
    """The function that gets a program's inputs; None for the generic one of a class that names them otherwise."""
    if isinstance(program, FunctionProgram):
        return program.function
    if isinstance(program, AgentProgram | dspy.Predict):
        return None
    kind = program if isinstance(program, type) else type(program)
    if issubclass(kind, dspy.Module):
        function: Callable[..., Any] = inspect.getattr_static(kind, "solve" if issubclass(kind, Agent) else "forward")
        return function
    return program if callable(program) and not isinstance(program, type) else None


def _arguments_of(function: Callable[..., Any], program: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a program's function by name, without the instance of a method, whatever its name is."""
    parameters = inspect.signature(function).parameters
    method = isinstance(program, dspy.Module | type) and not isinstance(program, FunctionProgram)
    return dict(list(parameters.items())[method and not isinstance(function, staticmethod) :])


def _hints(function: Callable[..., Any] | None) -> dict[str, Any]:
    try:
        return {} if function is None else typing.get_type_hints(function, include_extras=True)
    except Exception:  # an annotation that cannot be evaluated here
        return {}


def _declared(signatures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Types of the fields of several signatures by name; `Any` where they differ."""
    declared: dict[str, Any] = {}
    for fields in signatures:
        for name, info in fields.items():
            declared[name] = info.annotation if declared.get(name, info.annotation) == info.annotation else Any
    return declared


def _own_signature(program: Any) -> type[dspy.Signature] | None:
    """The signature of a module whose `forward` takes the inputs as `**`, such as `dspy.ReAct` and `dspy.RLM`.

    The signatures of its predictors also have fields that the module itself fills: a history, tools, a trajectory.
    """
    signature = getattr(program, "signature", None) if isinstance(program, dspy.Module) else None
    if isinstance(program, Agent) or not (isinstance(signature, type) and issubclass(signature, dspy.Signature)):
        return None
    if isinstance(program, dspy.Predict):
        return signature
    parameters = inspect.signature(object.__getattribute__(program, "forward")).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    needs = any(parameter.default is parameter.empty and parameter.kind in _BY_NAME for parameter in parameters)
    return signature if takes_any and not needs else None


def _is_optional(info: Any) -> bool:
    return not info.is_required() or allows_none(info.annotation)


def program_inputs(program: Any) -> list[str] | None:
    """Returns the input names of a program, None if unknown.

    These are an Agent's `input_names`, otherwise the arguments of `forward`, otherwise those of the signature that the
    program was made with, otherwise its only predictor's inputs.
    """
    if isinstance(program, FunctionProgram):
        return takes_inputs(program.function)
    if not isinstance(program, dspy.Module | type):
        return takes_inputs(program)
    if isinstance(program, type) and not issubclass(program, dspy.Module):
        return None
    if isinstance(program, type) and issubclass(program, Agent):
        return list(program.input_names) or None
    if isinstance(program, Agent) and program.input_names:
        return list(program.input_names)
    if isinstance(program, NearestDemos):
        return program_inputs(program.program)
    if isinstance(program, EnsembleProgram):
        return program_inputs(program.members[0])
    if isinstance(program, dspy.BestOfN | dspy.Refine):
        return program_inputs(program.module)
    if (signature := _own_signature(program)) is not None:
        return list(signature.input_fields)
    if isinstance(program, type):
        parameters = _arguments_of(inspect.getattr_static(program, "forward"), program)
    else:
        parameters = dict(inspect.signature(object.__getattribute__(program, "forward")).parameters)
    input_names = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    required = [p.name for p in input_names if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if required:
        return required
    if isinstance(program, dspy.Module) and len(program.predictors()) == 1:
        return list(program.predictors()[0].signature.input_fields)
    return None
