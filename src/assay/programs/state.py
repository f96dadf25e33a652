"""What a compiled program is made of: its state as JSON, the program again from it, and the version that names it."""

import copy
import hashlib
import json
from typing import Any

import dspy

from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.loading import load_program

__all__ = ["program_state", "program_version", "restore_program"]


def program_state(program: dspy.Module) -> dict[str, Any]:
    """JSON-ready: instructions and demonstrations of every predictor, composites included; no model, no traces."""
    if isinstance(program, NearestDemos):
        return {"kind": "nearest", "inner": program_state(program.program), "pool": program.pool, "k": program.k, "embedding": program.embedding}
    if isinstance(program, EnsembleProgram):
        return {"kind": "ensemble", "members": [program_state(member) for member in program.members]}
    # a predictor with a model of its own, as SIMBA's samples have, cannot be dumped as it is
    own = any(getattr(part, "lm", None) is not None for _, part in program.named_parameters())
    state = {name: _without_lm(part).dump_state() for name, part in program.named_parameters()} if own else program.dump_state()
    for name, part in state.items():  # what a run leaves behind goes, and the model, which an artifact names itself
        if isinstance(part, dict) and "demos" in part:
            state[name] = {**part, "traces": [], "train": [], "lm": None}
    return {"kind": "program", "state": state}


def _without_lm(part: Any) -> Any:
    copied = copy.copy(part)
    copied.lm = None
    return copied


def program_version(program: dspy.Module, adapter: str | None) -> str:
    """12 hex digits that are the same for the same prompts under the same adapter; parameters are told apart by themselves."""
    text = json.dumps([program_state(program), adapter], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def restore_program(name: str, config: dict[str, Any], state: dict[str, Any], fresh: dspy.Module | None = None) -> dspy.Module:
    """The program of a state: built by its name, or into a copy of `fresh`.

    Raises:
        ProgramError: it cannot be built by that name.
    """
    if state["kind"] == "nearest":
        inner = restore_program(name, config, state["inner"], fresh)
        return NearestDemos(inner, state["pool"], k=state["k"], embedding=state.get("embedding", "trigrams"))
    if state["kind"] == "ensemble":
        return EnsembleProgram([restore_program(name, config, member, fresh) for member in state["members"]])
    program = load_program(name, config=config) if fresh is None else fresh.deepcopy()
    own = {path: predictor.lm for path, predictor in program.named_predictors() if predictor.lm is not None}
    program.load_state(state["state"])
    for path, predictor in program.named_predictors():
        predictor.lm = own.get(path)  # a model that the program gives one of its predictors is part of its code
    return program
