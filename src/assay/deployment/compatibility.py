"""Whether a candidate can replace the champion: inputs, outputs, tools, model, prompt format, context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.deployment.artifact import Artifact
from assay.programs import program_fields


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """What a candidate breaks for its callers, and what else changes.

    Attributes:
        outputs: what it breaks by the outputs that the programs declare; None if one of them declares none. What the
            programs answered says more, where it is known.
    """

    breaks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None


def compatibility(champion: Artifact, candidate: Artifact) -> Compatibility:
    """Compares the interface of two loaded artifacts.

    Other inputs, missing outputs and missing or changed tools break callers. Another model, prompt format, adapters or
    context length are changes. Runs neither program.
    """
    breaks, changes = [], []
    before, after = program_fields(champion.program), program_fields(candidate.program)
    if before and after and (after.missing(before.required) or before.inputs.keys() - after.inputs.keys()):
        breaks.append(f"inputs: the champion takes {sorted(before.inputs)}, the candidate {sorted(after.inputs)}")
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
    return Compatibility(breaks=tuple(breaks), changes=tuple(changes), outputs=_missing(champion, candidate))


def _missing(champion: Artifact, candidate: Artifact) -> tuple[str, ...] | None:
    before, after = _outputs(champion), _outputs(candidate)
    if before is None or after is None:
        return None
    missing = sorted(before - after)
    return (f"outputs: the candidate has no {', '.join(missing)}",) if missing else ()


def _outputs(artifact: Artifact) -> set[str] | None:
    """Output fields of the last predictor, which usually answers; None for a program without one."""
    predictors = artifact.program.predictors()
    return set(predictors[-1].signature.output_fields) if predictors else None


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
            "prompt format": artifact.prompt_format,
            "context_length": settings["parameters"].get("context_length"),
        }

    of_candidate = facts(candidate)
    return {name: (value, of_candidate[name]) for name, value in facts(champion).items()}
