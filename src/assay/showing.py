"""Which tasks a program's demonstrations show, as its artifact says and as calls of the loaded program are recorded."""

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


def shown_by(program: dspy.Module, recorder: Recorder, tasks: Sequence[Task], *, parent: Artifact | None) -> dict[str, Any]:
    """What an artifact says of the demonstrations of its program.

    Returns:
        `tasks`, content hashes of all that may be shown; `by_demo`, those that each demonstration shows, where it is known, in the order of
        the program's state; `people`, hashes of the names of those they are of.
    """
    known = {task.content_hash: task for task in tasks}
    texts = [json.dumps(demo, ensure_ascii=False, default=str) for demo in _demos_in(program_state(program))]
    by_demo = [sorted(recorder.texts.within(_readable(text))) for text in texts]
    found = {task for shown in by_demo for task in shown} | recorder.carried.tasks
    found |= set(recorder.shown) & known.keys() if texts else set()
    people = {subject_digest(str(known[task].metadata["data_subject"])) for task in found & known.keys() if known[task].metadata.get("data_subject")}
    before = (parent.manifest.get("shown") or {}) if parent else {}
    return {"tasks": sorted(found), "by_demo": by_demo, "people": sorted(people | set(before.get("people", ())))}


def carried_by(artifact: Artifact) -> Carried:
    """The tasks that a loaded program's calls may show, with the text by which each demonstration is found in a prompt."""
    shown = artifact.manifest.get("shown") or {}
    demos, by_demo = _demos_in(program_state(artifact.program)), shown.get("by_demo")
    if by_demo is None or len(by_demo) != len(demos):  # of an older version
        return Carried(shown.get("tasks", ()))
    lines = [_readable(json.dumps(demo, ensure_ascii=False, default=str)).splitlines() for demo in demos]
    return Carried(shown.get("tasks", ()), list(zip(lines, by_demo, strict=True)))


def _readable(text: str) -> str:
    """JSON text with its strings as they read, one a line."""
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
        own = [demo for name in ("demos", "pool") for demo in state.get(name) or () if isinstance(state.get(name), list)]
        return own + [demo for name, part in state.items() if name not in ("demos", "pool") for demo in _demos_in(part)]
    return [demo for part in state for demo in _demos_in(part)] if isinstance(state, list) else []
