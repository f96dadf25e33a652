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
from assay.traces.shown import Carried

__all__ = ["carried_by", "shown_by"]


def shown_by(
    program: dspy.Module, recorder: Recorder, tasks: Sequence[Task], *, parent: Artifact | None
) -> dict[str, Any]:
    """The entry of an artifact's manifest about the demonstrations of its program.

    Returns:
        `tasks`: content hashes of all tasks that may be shown. `by_demo`: the tasks that each demonstration shows, as
        far as known, in the order of the program's state. `people`: hashes of the names of their data subjects.
    """
    known = {task.content_hash: task for task in tasks}
    texts = [json.dumps(demo, ensure_ascii=False, default=str) for demo in _demos_in(program_state(program))]
    by_demo = [sorted(recorder.texts.within(_readable(text))) for text in texts]
    tasks_shown = {task for demo in by_demo for task in demo} | recorder.carried.tasks
    tasks_shown |= set(recorder.shown) & known.keys() if texts else set()
    people = {
        subject_digest(str(known[task].metadata["data_subject"]))
        for task in tasks_shown & known.keys()
        if known[task].metadata.get("data_subject")
    }
    before = (parent.manifest.get("shown") or {}) if parent else {}
    return {"tasks": sorted(tasks_shown), "by_demo": by_demo, "people": sorted(people | set(before.get("people", ())))}


def carried_by(artifact: Artifact) -> Carried:
    """The tasks that calls of a loaded program may show, with the text that identifies each demonstration."""
    shown = artifact.manifest.get("shown") or {}
    demos, by_demo = _demos_in(program_state(artifact.program)), shown.get("by_demo")
    if by_demo is None or len(by_demo) != len(demos):  # artifact of an older version
        return Carried(shown.get("tasks", ()))
    lines = [_readable(json.dumps(demo, ensure_ascii=False, default=str)).splitlines() for demo in demos]
    return Carried(shown.get("tasks", ()), list(zip(lines, by_demo, strict=True)))


def _readable(text: str) -> str:
    """The values of JSON text without escapes, one per line."""
    lines: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)
        else:
            lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    walk(json.loads(text))
    return "\n".join(lines)


def _demos_in(state: Any) -> list[Any]:
    """Demonstrations anywhere in a program's state."""
    if isinstance(state, dict):
        own = [
            demo for name in ("demos", "pool") for demo in state.get(name) or () if isinstance(state.get(name), list)
        ]
        return own + [demo for name, part in state.items() if name not in ("demos", "pool") for demo in _demos_in(part)]
    return [demo for part in state for demo in _demos_in(part)] if isinstance(state, list) else []
