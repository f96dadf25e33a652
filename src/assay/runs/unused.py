"""Settings that have no effect on a job, for a note.

They are not refused: a project file gives the models of all roles to all commands.
"""

from collections.abc import Collection, Sequence
from typing import Any

from assay.datasets import SPLITS
from assay.optimizers.prompts.halting import fits_thinking
from assay.optimizers.prompts.teleprompters import writes_instructions
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
    if not any(one.needs_judge for one in (rubric, *rubrics)) and (given := _given(config, "judge")):
        notes.append(f"{given} has no effect: no criterion of the rubric {rubric.name!r} is decided by a judge")
    optimizer = getattr(config, "optimizer", None)  # only some jobs have one
    if "prompts" not in order:
        chosen = [f"optimizer={optimizer!r}"] if config.changed("optimizer") else []
        if given := ", ".join([*chosen, *filter(None, [_given(config, "reflection")])]):
            notes.append(f"{given} has no effect: no step of order={','.join(order)!r} compiles prompts")
    elif optimizer is not None and (given := _given(config, "reflection")) and not writes_instructions(optimizer):
        notes.append(f"{given} has no effect: optimizer={optimizer!r} writes no instructions, unlike 'auto' and 'gepa'")
    if getattr(config, "thinking_margin", None) is not None and not fits_thinking(job.student.program):
        notes.append(
            "thinking_margin has no effect: the program is neither an Agent with a thinking budget or policy, nor a "
            "Refine program"
        )
    if job.artifact is None and hasattr(job.student.program, "from_tasks"):  # it is made of tasks of train and val
        read = {*read, "train", "val"}
    if other := {name: size for name, size in config.sizes.items() if name not in read}:
        notes.append(
            f"sizes={other!r} has no effect: only tasks of {', '.join(n for n in SPLITS if n in read)} are run"
        )
    for note in notes:
        job.session.progress.say(f"note: {note}")
    return notes


def _given(config: Any, role: str) -> str:
    """The settings of a role's model that were given."""
    names = [f"{role}_{name}" for name in ("model", "api_base", "api_key_env", "thinking")]
    return ", ".join(f"{name}={value!r}" for name in names if (value := getattr(config, name, None)))
