"""Arguments of the Python functions: programs and models as objects."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import dspy

from assay.datasets.curriculum import PREFIX
from assay.datasets.memory import data_spec, names_splits, with_rest
from assay.datasets.sources import iter_rows
from assay.datasets.splits import SPLITS
from assay.datasets.tasks import SPLIT_ALIASES
from assay.deployment.artifact import with_model_of
from assay.errors import AssayError, ConfigError, DataError, ProgramError
from assay.evaluation.statistics import fewest_to_accept
from assay.jobs.agents import program_or_agent
from assay.jobs.groups import AgentJob, ProgramJob
from assay.jobs.loading import load_rubric
from assay.models.lm import has_provider
from assay.programs.foreign_agent import foreign_agent_in
from assay.programs.loading import BuiltFromTasks, full_name, load_program, program_class, read_saved_state
from assay.programs.state import with_saved_state
from assay.programs.wrapping import FunctionProgram, as_module, takes_inputs, wrapped
from assay.rubrics.loading import RubricSource, rubric_name
from assay.sources.artifact_files import is_artifact
from assay.sources.modules import qualified_name, without_call

_MODELS = ("model", "judge_model", "judge_api_base", "judge_api_key_env")
_Settings = TypeVar("_Settings", bound=ProgramJob)


def resolve_program(program: Any) -> Any:
    """The program as a name (with its class, if it is a path) or as a `dspy.Module` made of a function or agent."""
    return full_name(str(program)) if isinstance(program, str | Path) else as_module(program)


def check_state(program: Any, state: str | Path | None) -> None:
    """Refuses a saved state that does not fit its program. One that is built from the tasks is not built here.

    Raises:
        ConfigError: the program is an artifact.
        ProgramError: see `with_saved_state`.
    """
    if state is None:
        return
    if isinstance(program, str | Path) and is_artifact(program):
        raise ConfigError(
            f"`state={str(state)!r}` is not for an artifact: {program} has a state of its own. Give the program's "
            "class, or leave the state out"
        )
    if isinstance(program, str | Path):
        program = None if _built_from_tasks(str(program)) else load_program(str(program))
    if program is None:
        read_saved_state(Path(state))
    else:
        with_saved_state(as_module(program), state)


def refuse_function(program: Any) -> None:
    """Refuses to compile a plain function, before its data is read: it has no prompts.

    Raises:
        ProgramError: it is a function of a task's inputs.
    """
    if isinstance(program, FunctionProgram):
        inputs, name = takes_inputs(program.function) or [], qualified_name(program.function)
    elif isinstance(program, str) and not is_artifact(program) and without_call(program) == program:
        inputs, name = takes_inputs(program_class(program)) or [], program
        if not inputs:
            return  # a class, a program, or a function with defaults: building it shows whether it returns a program
    else:
        return
    called = f"{name}({', '.join(f'{argument}=…' for argument in inputs)})"
    raise ProgramError(
        f"{name} is a function, which has no prompts to compile. Write its calls as dspy.Predict in the forward of a "
        "dspy.Module and compile that; the function itself can be evaluated. If it returns a program, give it with its "
        f"arguments: {called}"
    )


def resolve_lm(lm: dspy.LM | None, options: Mapping[str, Any]) -> dspy.LM | None:
    """The model object to use: `lm`; None if `options` names a model; otherwise the one set in DSPy.

    Raises:
        ConfigError: `lm` is not a `dspy.LM`.
    """
    if lm is not None and not isinstance(lm, dspy.LM):
        raise ConfigError(f"lm={lm!r} must be a dspy.LM, such as assay.get_lm(NAME); a name goes into `model=NAME`")
    if lm is not None or options.get("model") is not None:
        return lm
    return dspy.settings.lm


def resolve_model(
    program: Any, lm: dspy.LM | None, options: Mapping[str, Any]
) -> tuple[dspy.LM | None, dict[str, Any]]:
    """The model object of a run, and the options with the model's name and address.

    In this order: the model that is passed or named, that of the artifact, the one set in DSPy, the program's own if
    each predictor has one and it is not to be replaced.

    Raises:
        ConfigError: `lm` is not a `dspy.LM`; or no model is named, and the artifact's model was an object without a
            name that can be loaded.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    if lm is None and "model" not in settings and isinstance(program, str) and is_artifact(program):
        settings = with_model_of(program, settings)
        if not has_provider(settings["model"]):
            raise ConfigError(
                f"{program} was made with the model {settings['model']!r}, an object that no name stands for: "
                "give a model (`model=NAME`, in Python also lm=…)"
            )
    lm = resolve_lm(lm, settings)
    if lm is None and not any(settings.get(name) for name in ("model", "api_base", "api_key_env", "replace_lms")):
        with suppress(AssayError):  # the job says why the program cannot be loaded
            lm = own_model(program)
    return lm, settings


def own_model(program: Any) -> dspy.LM | None:
    """The model of a program's first predictor, if each predictor has one of its own; else None.

    Args:
        program: a module, or the name of one.
    Raises:
        AssayError: the program cannot be loaded.
    """
    if isinstance(program, str):
        program = None if _built_from_tasks(program) else load_program(program)
    if program is None:
        return None
    models = [predictor.lm for predictor in program.predictors()]
    return models[0] if models and all(isinstance(model, dspy.LM) for model in models) else None


def _built_from_tasks(program: str) -> bool:
    """Whether a program is built from the data, so after it."""
    target = program_class(full_name(program))
    return isinstance(target, type) and isinstance(target, BuiltFromTasks)


def split_data(data: Any, trainset: Any, valset: Any, *, need: Sequence[str] = SPLITS) -> Any:
    """The data of a job that may name its splits: `trainset` and `valset`, or a mapping from splits to rows.

    Splits that are not named are taken from `data`, without the rows of the named ones.

    Raises:
        ConfigError: a split is named twice.
        DataError: no rows are left for a split in `need`.
    """
    parts = {name: part for name, part in (("train", trainset), ("val", valset)) if part is not None}
    if names_splits(data):
        for name, part in data.items():
            if (split := SPLIT_ALIASES.get(name, name)) in parts:
                raise ConfigError(f"{split} is given twice: as {split}set, or as two splits of data")
            parts[split] = part
        data = None
    if not parts:
        return data
    rows = None if data is None else with_rest({name: _rows_in(part) for name, part in parts.items()}, _rows_in(data))
    there = parts.keys() if rows is None else {row["split"] for row in rows}
    if missing := [name for name in need if name not in there]:
        raise DataError(
            f"no rows are left for {', '.join(missing)}: give further rows in `data=…`, or as these splits of data. A "
            f"decision needs at least {fewest_to_accept()} rows of gate and {fewest_to_accept()} of test; 20 of each "
            "are usual"
        )
    return parts if rows is None else rows


def _rows_in(data: Any) -> Any:
    """The rows of a path or spec; of a mapping of splits, each part so. Other data is unchanged."""
    if names_splits(data):
        return {name: _rows_in(part) for name, part in data.items()}
    return [dict(row) for _, row in iter_rows(str(data))] if isinstance(data, str | Path) else data


def program_settings(
    kind: type[_Settings],
    program: str | dspy.Module,
    rubric: RubricSource,
    data: Any,
    lm: dspy.LM | None,
    options: Mapping[str, Any],
) -> _Settings:
    """The settings of a job. Program, rubric and model may be objects; the settings hold their names.

    Args:
        data: None for that of the stages of a curriculum.
        options: the other settings by field name.
    Raises:
        ConfigError: a criterion has a judge, and neither the program's model nor the judge's was named.
    """
    if data is None:
        if options.get("curriculum") is None:
            raise ConfigError("data is missing: give the tasks, or a curriculum whose stages name them")
        data = f"{PREFIX}{options['curriculum']}"
    agent = foreign_agent_in(program)
    own_name = agent.name if agent is not None else None
    name = program if isinstance(program, str) else own_name or qualified_name(wrapped(program))
    model = {} if lm is None else {"model": lm.model}
    if not any({**options, **model}.get(name) is not None for name in _MODELS):  # the default model does not judge
        load_rubric(rubric).require_judges()
    names = {
        "program": name,
        **({"agent": own_name} if options.get("agent") is not None else {}),
        "rubric": rubric_name(rubric),
        "data": data_spec(_rows_in(data) if names_splits(data) else data),
    }
    return kind(**{**options, **model, **names})


_Job = TypeVar("_Job", bound=ProgramJob)


def named(command: _Job) -> tuple[Any, dspy.LM | None, _Job]:
    """The program and the model of a command, and its settings with names in place of objects, see `resolve_model`."""
    program: Any
    if isinstance(command, AgentJob) and (command.agent is not None or command.program is None):
        program = program_or_agent(command.agent, command.program, texts=command.texts, options=command.delivered)
    else:
        program = resolve_program(command.program)
    lm, settings = resolve_model(program, command.lm, vars(command))
    return program, lm, program_settings(type(command), program, command.rubric, command.data, lm, settings)
