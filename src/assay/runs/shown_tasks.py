"""The tasks that a program's demonstrations show, for the manifest of its artifact."""

from collections.abc import Sequence
from typing import Any

import dspy

from assay.datasets import Task
from assay.deployment import Artifact
from assay.deployment.artifact import readable_text
from assay.programs import program_state
from assay.support.values import json_text
from assay.traces import Recorder
from assay.traces.records import subject_digest
from assay.traces.shown import demos_in


def demonstrated_tasks(
    program: dspy.Module, recorder: Recorder, tasks: Sequence[Task], *, parent: Artifact | None
) -> dict[str, Any]:
    """The entry of an artifact's manifest about the demonstrations of its program.

    Returns:
        `tasks`: keys of all tasks that may be shown. `by_demo`: the tasks that each demonstration shows, as
        far as known, in the order of the program's state. `people`: hashes of the names of their data subjects.
    """
    tasks_by_hash = {task.key: task for task in tasks}
    texts = [json_text(demo) for demo in demos_in(program_state(program))]
    by_demo = [sorted(recorder.texts.within(readable_text(text))) for text in texts]
    hashes = {task for demo in by_demo for task in demo} | recorder.carried.tasks
    hashes |= set(recorder.demonstrated_tasks) & tasks_by_hash.keys() if texts else set()
    subjects = {
        subject_digest(str(tasks_by_hash[task].metadata["data_subject"]))
        for task in hashes & tasks_by_hash.keys()
        if tasks_by_hash[task].metadata.get("data_subject")
    }
    before = (parent.manifest.get("shown") or {}) if parent else {}
    return {"tasks": sorted(hashes), "by_demo": by_demo, "people": sorted(subjects | set(before.get("people", ())))}
