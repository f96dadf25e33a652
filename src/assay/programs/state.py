"""State of a compiled program as JSON, its restoration, and its version."""

import copy
import hashlib
import json
from typing import Any

import dspy

from assay.models.thinking import Thinking
from assay.programs.allocation import ThinkingPolicy
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.loading import load_program

__all__ = ["program_state", "program_version", "restore_program"]


def program_state(program: dspy.Module) -> dict[str, Any]:
    """Returns instructions and demonstrations of all predictors, JSON-serializable, also for composites.

    Models and traces are not included.
    """
    if isinstance(program, NearestDemos):
        return {
            "kind": "nearest",
            "inner": program_state(program.program),
            "pool": program.pool,
            "k": program.k,
            "embedding": program.embedding,
        }
    if isinstance(program, EnsembleProgram):
        return {"kind": "ensemble", "members": [program_state(member) for member in program.members]}
    # a predictor with its own model, as SIMBA creates them, cannot be dumped unchanged
    has_own_model = any(getattr(part, "lm", None) is not None for _, part in program.named_parameters())
    state = (
        {name: _without_lm(part).dump_state() for name, part in program.named_parameters()}
        if has_own_model
        else program.dump_state()
    )
    for name, part in state.items():  # remove data of runs, and the model, which the artifact's manifest names
        if isinstance(part, dict) and "demos" in part:
            state[name] = {**part, "traces": [], "train": [], "lm": None}
    thinking = getattr(program, "thinking", None)
    policy = getattr(program, "policy", None)
    budget: dict[str, Any] = {"thinking": thinking.value} if isinstance(thinking, Thinking) else {}
    budget |= {"policy": policy.to_dict()} if isinstance(policy, ThinkingPolicy) else {}
    return {"kind": "program", "state": state, **budget}


def _without_lm(part: Any) -> Any:
    copied = copy.copy(part)
    copied.lm = None
    return copied


def program_version(program: dspy.Module, prompt_format: str | None) -> str:
    """Returns 12 hex digits that identify prompts and prompt format. Agent parameters are not included."""
    text = json.dumps([program_state(program), prompt_format], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def restore_program(
    name: str, config: dict[str, Any], state: dict[str, Any], fresh: dspy.Module | None = None
) -> dspy.Module:
    """Restores a program from its state.

    Args:
        name: name of the program, as for `load_program`.
        config: its constructor arguments.
        fresh: an instance to copy instead of loading by name.
    Raises:
        ProgramError: the program cannot be built.
    """
    if state["kind"] == "nearest":
        inner = restore_program(name, config, state["inner"], fresh)
        return NearestDemos(inner, state["pool"], k=state["k"], embedding=state.get("embedding", "trigrams"))
    if state["kind"] == "ensemble":
        return EnsembleProgram([restore_program(name, config, member, fresh) for member in state["members"]])
    program = load_program(name, config=config) if fresh is None else fresh.deepcopy()
    settings = {path: (predictor.lm, predictor.config) for path, predictor in program.named_predictors()}
    program.load_state(_without_models(state["state"]))
    if "thinking" in state:
        program.thinking = Thinking.of(state["thinking"])
    if "policy" in state:
        program.policy = ThinkingPolicy.of(state["policy"])
    # Models and call settings of predictors come from the program's code, never from the state: a crafted state could
    # name a server.
    for path, predictor in program.named_predictors():
        predictor.lm, predictor.config = settings.get(path, (None, {}))
    return program


def _without_models(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a predictor or module without models, which a crafted state could name."""
    parts = {
        name: {**part, "lm": None} if isinstance(part, dict) and "lm" in part else part for name, part in state.items()
    }
    return {**parts, "lm": None} if "lm" in parts else parts
