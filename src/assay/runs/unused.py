"""Settings that have no effect on a job, for a note.

They are not refused: a project file gives the models of all roles to all commands.
"""

from typing import Any

from assay.runs.jobs import Job

__all__ = ["unused_settings"]

_WITHOUT_INSTRUCTIONS = ("labeled", "bootstrap", "bootstrap-search", "knn", "ensemble", "optuna")


def unused_settings(job: Job, *, split: str | None = None) -> list[str]:
    """Notes about settings that were given and have no effect; they are also reported as progress.

    Args:
        split: the only one whose tasks are run; None if the job reads all splits.
    """
    config, rubric, notes = job.config, job.session.rubric, list[str]()
    if not rubric.needs_judge and (given := _given(config, "judge")):
        notes.append(f"{given} has no effect: no criterion of the rubric {rubric.name!r} is decided by a judge")
    optimizer = getattr(config, "optimizer", None)
    if optimizer in _WITHOUT_INSTRUCTIONS and (given := _given(config, "reflection")):
        notes.append(f"{given} has no effect: optimizer={optimizer!r} writes no instructions, unlike 'auto' and 'gepa'")
    if split is not None:
        made_of_tasks = job.artifact is None and hasattr(job.student.program, "from_tasks")  # of train and val
        read = {split, "train", "val"} if made_of_tasks else {split}
        if other := {name: size for name, size in config.sizes.items() if name not in read}:
            notes.append(f"sizes={other!r} has no effect: only tasks of {split} are run")
    for note in notes:
        job.session.progress.say(f"note: {note}")
    return notes


def _given(config: Any, role: str) -> str:
    """The settings of a role's model that were given."""
    names = [f"{role}_{name}" for name in ("model", "api_base", "api_key_env", "thinking")]
    return ", ".join(f"{name}={value!r}" for name in names if (value := getattr(config, name, None)))
