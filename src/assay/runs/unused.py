"""Settings that have no effect on a job, for a note.

They are not refused: a project file gives the models of all roles to all commands.
"""

from collections.abc import Collection, Sequence
from typing import Any

from assay.datasets import SPLITS
from assay.optimizers.prompts.halting import fits_thinking
from assay.optimizers.prompts.teleprompters import writes_instructions
from assay.programs.loading import BuiltFromTasks
from assay.rubrics import Rubric
from assay.runs.jobs import Job

__all__ = ["unused_settings"]


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
    """
    config, rubric, notes = job.config, job.session.rubric, list[str]()
    if not any(one.needs_judge for one in (rubric, *rubrics)) and (settings := _settings_of(config, "judge")):
        notes.append(f"{settings} has no effect: no criterion of the rubric {rubric.name!r} is decided by a judge")
    optimizer = getattr(config, "optimizer", None)  # only some jobs have one
    if "prompts" not in order:
        chosen = [f"optimizer={optimizer!r}"] if config.changed("optimizer") else []
        if settings := ", ".join([*chosen, *filter(None, [_settings_of(config, "reflection")])]):
            notes.append(f"{settings} has no effect: no step of order={','.join(order)!r} compiles prompts")
    elif (
        optimizer is not None
        and (settings := _settings_of(config, "reflection"))
        and not writes_instructions(optimizer)
    ):
        notes.append(
            f"{settings} has no effect: optimizer={optimizer!r} writes no instructions, unlike 'auto' and 'gepa'"
        )
    if getattr(config, "thinking_margin", None) is not None and not fits_thinking(job.recorded.program):
        notes.append(
            "thinking_margin has no effect: the program is neither an Agent with a thinking budget or policy, nor a "
            "Refine program"
        )
    # it is made of tasks of train and val
    if job.artifact is None and isinstance(job.recorded.program, BuiltFromTasks):
        read = {*read, "train", "val"}
    if other := {name: size for name, size in config.sizes.items() if name not in read}:
        notes.append(
            f"sizes={other!r} has no effect: only tasks of {', '.join(n for n in SPLITS if n in read)} are run"
        )
    for note in notes:
        job.session.progress.say(f"note: {note}")
    return notes


def _settings_of(config: Any, role: str) -> str:
    """The settings of a role's model that were given."""
    names = [f"{role}_{name}" for name in ("model", "api_base", "api_key_env", "thinking")]
    return ", ".join(f"{name}={value!r}" for name in names if (value := getattr(config, name, None)))
