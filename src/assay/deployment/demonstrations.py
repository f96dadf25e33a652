"""The tasks that the demonstrations of an artifact's program show, as its manifest names them."""

import json
from collections.abc import Mapping
from typing import Any

import dspy

from assay.programs import program_state
from assay.support.values import json_text
from assay.traces.carried import set_carried
from assay.traces.shown import Carried, demos_in


def with_demonstrations(program: dspy.Module, manifest: Mapping[str, Any]) -> dspy.Module:
    """The program of an artifact; the tasks that its demonstrations show are recorded with its calls."""
    set_carried(program, _carried(program, manifest.get("shown") or {}))
    return program


def _carried(program: dspy.Module, entry: Mapping[str, Any]) -> Carried:
    """The tasks that calls of a loaded program may show, with the text that identifies each demonstration."""
    demos, by_demo = demos_in(program_state(program)), entry.get("by_demo")
    if by_demo is None or len(by_demo) != len(demos):  # which demonstration shows which task is not known
        return Carried(entry.get("tasks", ()))
    lines = [readable_text(json_text(demo)).splitlines() for demo in demos]
    return Carried(entry.get("tasks", ()), list(zip(lines, by_demo, strict=True)))


def readable_text(text: str) -> str:
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
