"""Whether a candidate can replace the champion: inputs, outputs, tools, model, prompt format, context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.deployment.artifact import Artifact
from assay.programs import program_inputs

__all__ = ["Compatibility", "compatibility"]


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """What a candidate breaks for its callers, and what else changes."""

    breaks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def compatibility(champion: Artifact, candidate: Artifact) -> Compatibility:
    """Compares the interface of two loaded artifacts.

    Other inputs, missing outputs and missing or changed tools break callers. Another model, prompt format, adapters or
    context length are changes.
    """
    breaks, changes = [], []
    before, after = program_inputs(champion.program), program_inputs(candidate.program)
    if before is not None and after is not None and set(before) != set(after):
        breaks.append(f"inputs: the champion takes {sorted(before)}, the candidate {sorted(after)}")
    if missing := sorted(_outputs(champion) - _outputs(candidate)):
        breaks.append(f"outputs: the candidate has no {', '.join(missing)}")
    tools, others = _tools(champion), _tools(candidate)
    if missing := sorted(tools.keys() - others.keys()):
        breaks.append(f"tools: the candidate has no {', '.join(missing)}")
    breaks += [
        f"tools: {name} takes {others[name]}, the champion's {tools[name]}"
        for name in sorted(tools.keys() & others.keys())
        if tools[name] != others[name]
    ]
    for name, values in _compared(champion, candidate).items():
        if values[0] != values[1]:
            changes.append(f"{name}: {values[0]!r} becomes {values[1]!r}")
    return Compatibility(breaks=tuple(breaks), changes=tuple(changes))


def _outputs(artifact: Artifact) -> set[str]:
    """Output fields of the last predictor, which answers; empty for a program without one."""
    predictors = artifact.program.predictors()
    return set(predictors[-1].signature.output_fields) if predictors else set()


def _tools(artifact: Artifact) -> dict[str, Any]:
    """Argument names of each tool."""
    tools = getattr(artifact.program, "tools", None) or ()
    tools = tools.values() if isinstance(tools, Mapping) else tools
    return {
        str(tool.name): sorted(getattr(tool, "args", None) or ())
        for tool in tools
        if isinstance(getattr(tool, "name", None), str)
    }


def _compared(champion: Artifact, candidate: Artifact) -> dict[str, tuple[Any, Any]]:
    def facts(artifact: Artifact) -> dict[str, Any]:
        settings = artifact.settings
        return {
            **{name: artifact.manifest.get(name) for name in ("model", "adapters")},
            "prompt format": settings.get("adapter"),
            "context_length": settings["parameters"].get("context_length"),
        }

    of_candidate = facts(candidate)
    return {name: (value, of_candidate[name]) for name, value in facts(champion).items()}
