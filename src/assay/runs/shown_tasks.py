"""The tasks that a program's demonstrations show: for its artifact, and for recording calls of the loaded program."""

import json
from collections.abc import Sequence
from typing import Any

import dspy

from assay.datasets import Task
from assay.deployment import Artifact
from assay.programs import program_state
from assay.traces import Recorder
from assay.traces.records import subject_digest
from assay.traces.shown import Carried, demos_in

__all__ = ["carried_by", "demonstrated_tasks"]


def demonstrated_tasks(
    program: dspy.Module, recorder: Recorder, tasks: Sequence[Task], *, parent: Artifact | None
) -> dict[str, Any]:
    """The entry of an artifact's manifest about the demonstrations of its program.

    Returns:
        `tasks`: content hashes of all tasks that may be shown. `by_demo`: the tasks that each demonstration shows, as
        far as known, in the order of the program's state. `people`: hashes of the names of their data subjects.
    """
    tasks_by_hash = {task.content_hash: task for task in tasks}
    texts = [json.dumps(demo, ensure_ascii=False, default=str) for demo in demos_in(program_state(program))]
    by_demo = [sorted(recorder.texts.within(_readable(text))) for text in texts]
    hashes = {task for demo in by_demo for task in demo} | recorder.carried.tasks
    hashes |= set(recorder.demonstrated_tasks) & tasks_by_hash.keys() if texts else set()
    subjects = {
        subject_digest(str(tasks_by_hash[task].metadata["data_subject"]))
        for task in hashes & tasks_by_hash.keys()
        if tasks_by_hash[task].metadata.get("data_subject")
    }
    before = (parent.manifest.get("shown") or {}) if parent else {}
    return {"tasks": sorted(hashes), "by_demo": by_demo, "people": sorted(subjects | set(before.get("people", ())))}


def carried_by(artifact: Artifact) -> Carried:
    """The tasks that calls of a loaded program may show, with the text that identifies each demonstration."""
    entry = artifact.manifest.get("shown") or {}
    demos, by_demo = demos_in(program_state(artifact.program)), entry.get("by_demo")
    if by_demo is None or len(by_demo) != len(demos):  # artifact of an older version
        return Carried(entry.get("tasks", ()))
    lines = [_readable(json.dumps(demo, ensure_ascii=False, default=str)).splitlines() for demo in demos]
    return Carried(entry.get("tasks", ()), list(zip(lines, by_demo, strict=True)))


def _readable(text: str) -> str:
    """The values of JSON text without escapes, one per line."""
    lines: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, list):
            for part in value:
                collect(part)
        else:
            lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    collect(json.loads(text))
    return "\n".join(lines)
