"""Checks of a job's settings and data that call no model.

Settings that have no effect on a job are refused, or noted. The model of a role that the job does not call is refused
where it was given for this job. It is noted where a project file gave it, which has the models of all roles for all
commands, and in the jobs that another job runs. A model in training must not judge its own rollouts.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from assay.datasets import SPLITS
from assay.errors import ConfigError
from assay.jobs.job import Job
from assay.jobs.loading import load_judge, load_rubric
from assay.jobs.project_file import is_of_project
from assay.optimizers.prompts.teleprompters import writes_instructions
from assay.optimizers.prompts.thinking import fits_thinking
from assay.programs.loading import BuiltFromTasks
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource

_noted_only: ContextVar[bool] = ContextVar("noted_only", default=False)


@contextmanager
def settings_of_another_job() -> Iterator[None]:
    """Inside, settings without effect are noted: those of an improvement are for all of its steps."""
    token = _noted_only.set(True)
    try:
        yield
    finally:
        _noted_only.reset(token)


def unused_settings(
    job: Job,
    *,
    read: Collection[str] = SPLITS,
    rubrics: Sequence[Rubric] = (),
    order: Sequence[str] = ("prompts",),
) -> list[str]:
    """Notes about settings that were given and have no effect; they are also reported as progress.

    Args:
        read: the splits whose tasks are run.
        rubrics: those that the job scores with besides its own.
        order: the steps of an improvement; any other job that has the settings of an optimizer compiles prompts.
    Raises:
        ConfigError: the model of a role, or a setting of it, that the job does not call, unless a project file gave it.
    """
    config, rubric, notes = job.config, job.session.rubric, list[str]()
    if not any(one.takes_model for one in (rubric, *rubrics)):
        notes += _of_role(config, "judge", f"no criterion of the rubric {rubric.name!r} is decided by a judge")
    optimizer = getattr(config, "optimizer", None)  # only some jobs have one
    if "prompts" not in order:
        reason = f"no step of `order={','.join(order)}` compiles prompts"
        notes += [f"`optimizer={optimizer!r}` has no effect: {reason}"] if config.changed("optimizer") else []
        notes += _of_role(config, "reflection", reason)
    elif optimizer is not None and not writes_instructions(optimizer):
        reason = f"`optimizer={optimizer!r}` writes no instructions, unlike 'auto' and 'gepa'"
        notes += _of_role(config, "reflection", reason)
    if getattr(config, "thinking_margin", None) is not None and not fits_thinking(job.recorded.program):
        notes.append(
            "`thinking_margin` has no effect: the program is neither an Agent with a thinking budget or policy, nor a "
            "Refine program"
        )
    # it is made of tasks of train and val
    if job.artifact is None and isinstance(job.recorded.program, BuiltFromTasks):
        read = {*read, "train", "val"}
    if other := {name: size for name, size in config.sizes.items() if name not in read}:
        sizes = _assigned({f"{name}_size": size for name, size in other.items()})
        notes.append(f"{sizes} has no effect: only tasks of {', '.join(n for n in SPLITS if n in read)} are run")
    for note in notes:
        job.session.progress.say(f"note: {note}")
    return notes


def _of_role(config: Any, role: str, reason: str) -> list[str]:
    """The note about the settings of a role's model; none if none was given. Refuses those that were given here."""
    names = [f"{role}_{name}" for name in ("model", "api_base", "api_key_env", "thinking")]
    values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    typed = {name: value for name, value in values.items() if not is_of_project(name, value)}
    if typed and not _noted_only.get():
        raise ConfigError(f"{_assigned(typed)} would have no effect: {reason}")
    return [f"{_assigned(values)} has no effect: {reason}"] if values else []


def _assigned(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in values.items())


def independent(rubric: RubricSource, judge: str | None, model: str, *, forced: bool = False) -> Rubric:
    """Loads the rubric and checks that the model in training does not judge it.

    Raises:
        ConfigError: the model would judge itself and `forced` is false; or a judge compares outputs, but rollouts are
            scored one by one.
    """
    loaded = load_rubric(rubric)
    judges = [
        load_judge(c.judge.use, own_model=judge is None) if c.judge.use else None
        for c in loaded.criteria
        if c.judge is not None
    ]
    if compared := [loaded_judge for loaded_judge in judges if loaded_judge is not None and loaded_judge.compares]:
        raise ConfigError(
            f"the rubric {loaded.name!r} has a judge that compares outputs ({compared[0].spec.text[:80]!r}), and a "
            "training scores each rollout alone: use a judge that grades single outputs"
        )
    judging_models = {name for loaded_judge in judges for name in _models_of(loaded_judge, judge or model)}
    if model in judging_models and not forced:
        raise ConfigError(
            f"the rubric {loaded.name!r} would be judged by {model}, the model in training, which would learn to "
            "satisfy itself as a judge. Name another with `judge_model=…` (or in the judge's own file), or, for the "
            "rubric that is trained on, set `judged_by_itself=True`"
        )
    return loaded


def _models_of(judge: Any, default: str) -> Iterator[str]:
    """Names of the models that a judge asks, those of a jury's or a cascade's members included."""
    model = getattr(judge, "model", None) or default
    members = [
        *getattr(judge, "members", ()),
        *(part for name in ("first", "second") if (part := getattr(judge, name, None)) is not None),
    ]
    for member in members:
        yield from _models_of(member, model)
    if not members:
        yield model
