"""Writes the artifact of a job: once for trial before the first call, and with the result at the end.

Does not run a job: `assay.api.compile`, `assay.api.tune` and `assay.api.improve.run` do.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy

from assay.deployment import load_artifact, save_artifact
from assay.deployment.artifact import check_loads, source_of
from assay.errors import ArtifactError, ProgramError
from assay.evaluation import RecordedProgram
from assay.programs import program_version
from assay.rubrics.calling import definition_of
from assay.runs.jobs import Job
from assay.runs.rubric_files import portable_rubric
from assay.runs.shown_tasks import demonstrated_tasks
from assay.sources.files import FILES, SourceFiles
from assay.sources.modules import alone
from assay.sources.trust import trusting
from assay.support.package import __version__
from assay.support.scrubbing import error_text
from assay.traces.records import subject_digest

__all__ = ["keep_artifact", "rehearsed"]


def keep_artifact(job: Job, recorded: RecordedProgram, folder: Path, result: Mapping[str, Any], report: str) -> Path:
    """Writes a job's artifact.

    The store keeps the data subjects of its tasks, so that an erasure can name the artifact.
    """
    splits, manifest = job.splits, _program_manifest(job, recorded, result)
    manifest["shown"] = demonstrated_tasks(
        recorded.program, job.session.recorder, splits.train + splits.val, parent=job.artifact
    )
    path = save_artifact(
        folder.resolve(), recorded.program, manifest, splits=splits.manifest(), report=report, rubric=_rubric_files(job)
    )
    if (note := check_loads(path, recorded.program)) is not None:
        job.session.progress.say(f"note: {note}")
    tasks = splits.train + splits.val + splits.gate
    # gate too: its tasks decided what the artifact is
    subjects = {
        subject_digest(str(task.metadata["data_subject"])) for task in tasks if task.metadata.get("data_subject")
    }
    if subjects := subjects | set(manifest["shown"]["people"]):
        job.store.put_artifact(str(path), sorted(subjects))
    return path


def rehearsed(job: Job) -> list[str]:
    """Saves the unchanged program as an artifact, loads it as another machine would, and runs the first val task in it.

    Finds modules and files that would be missing on another machine, before the job spends anything. After a preflight
    the task is answered from the response cache.

    Returns:
        Notes for the report.
    """
    if not job.config.preflight:
        return []
    program, session = job.recorded.program, job.session
    notes = list(source_of(program, session.program_name, data=_data(job)).notes)
    _rubric_files(job)
    with tempfile.TemporaryDirectory(prefix="assay-") as scratch, trusting("once"):
        path = Path(scratch).resolve() / "artifact"
        try:
            save_artifact(path, program, _program_manifest(job, job.recorded, {}), splits={}, report="")
            with alone():  # without the modules of this process, as on another machine
                if (note := check_loads(path, program)) is not None:
                    notes.append(note.replace(f"{path}: ", ""))
                elif (
                    job.config.cache
                    and not session.recorder.unrecorded.calls
                    and (reason := _missing(job, path)) is not None
                ):
                    notes.append(
                        f"the program's artifact will not run on another machine: {reason}. Name the module or file in "
                        f"{FILES}"
                    )
        except (ArtifactError, ProgramError) as error:
            notes.append(f"the program's artifact will not load: {str(error).replace(f'{path}: ', '')}")
    for note in notes:
        session.progress.say(f"note: {note}")
    return notes


def _missing(job: Job, path: Path) -> str | None:
    """Error of the artifact's program on the first task if the program itself has none there; otherwise None."""
    session, inputs = job.session, dict(job.splits.val[0].inputs)
    artifact = load_artifact(path)
    copy = RecordedProgram(artifact.program, session, prompt_format=artifact.settings["adapter"])
    copy.set_parameters(artifact.settings["parameters"])
    with session.phase("preflight"), session.context():
        error = getattr(copy(**inputs), "_error", None)
        # an error that the program has here as well is not the artifact's
        if error is None or getattr(job.recorded(**inputs), "_error", None) is not None:
            return None
    return error_text(error)


def _data(job: Job) -> Path:
    return Path(job.config.data).resolve()


def _rubric_files(job: Job) -> dict[str, bytes]:
    """The rubric's file with everything it names; for a rubric made in Python, the source files of its checks."""
    if job.rubric_path is not None:
        return portable_rubric(job.rubric_path)
    source = SourceFiles()
    for check in [c.check for c in job.session.rubric.criteria if c.check is not None]:
        definition = definition_of(check)
        source.add(definition.__qualname__, definition.__module__, definition.__qualname__)
    return {f"code/{place}": content for place, content in source.files.items()}


def _program_manifest(job: Job, recorded: RecordedProgram, result: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of an artifact: where its program comes from, and the result.

    Args:
        result: the report of the job, JSON-ready.
    """
    config, rubric, engine = job.config, job.session.rubric, job.session.lm.recording.backend
    return {
        "assay": __version__,
        "dspy": dspy.__version__,
        "program": job.session.program_name,
        "version": program_version(recorded.program, recorded.settings["adapter"]),
        "settings": recorded.settings,
        "model": config.model,
        "api_base": config.api_base or job.session.lm.recording.address,
        "api_key_env": config.api_key_env,
        "weights": engine.weights,
        "adapters": list(engine.adapters),
        "rubric": {"name": rubric.name, "version": rubric.version, "criteria": [c.describe() for c in rubric.criteria]},
        "judge_model": config.judge_model if rubric.needs_judge else None,
        "data": {
            "spec": config.data,
            "salt": job.splits.salt,
            "sha256": job.splits.manifest()["sha256"],
            "sizes": job.splits.sizes(),
        },
        "seed": config.seed,
        "run": job.run_id,
        "parent": str(job.artifact.path) if job.artifact else None,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
    }
