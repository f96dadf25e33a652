"""State of a compiled program as JSON, its restoration, and its version."""

import copy
import hashlib
from collections.abc import Iterable
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.models.thinking import Thinking
from assay.programs.allocation import ThinkingPolicy
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.isolation import copied
from assay.programs.loading import load_program
from assay.support.values import json_text

__all__ = ["program_state", "program_version", "restore_program"]


def program_state(program: dspy.Module) -> dict[str, Any]:
    """Returns instructions and demonstrations of all predictors, JSON-serializable, also for composites.

    Models and traces are not included.
    """
    if isinstance(program, NearestDemos):
        return {"kind": "nearest", "inner": program_state(program.program), "pool": program.pool, "k": program.k}
    if isinstance(program, EnsembleProgram):
        return {"kind": "ensemble", "members": [program_state(member) for member in program.members]}
    frozen = {name: _module_state(module) for name, module in _frozen_modules(program).items()}
    thinking = getattr(program, "thinking", None)
    policy = getattr(program, "policy", None)
    budget: dict[str, Any] = {"thinking": thinking.value} if isinstance(thinking, Thinking) else {}
    budget |= {"policy": policy.to_dict()} if isinstance(policy, ThinkingPolicy) else {}
    return {"kind": "program", "state": _module_state(program), **({"frozen": frozen} if frozen else {}), **budget}


def _module_state(module: dspy.Module) -> dict[str, Any]:
    # a predictor with its own model, as SIMBA creates them, cannot be dumped unchanged
    has_own_model = any(getattr(part, "lm", None) is not None for _, part in module.named_parameters())
    state: dict[str, Any] = (
        {name: _without_lm(part).dump_state() for name, part in module.named_parameters()}
        if has_own_model
        else module.dump_state()
    )
    for name, part in state.items():  # remove data of runs, and the model, which the artifact's manifest names
        if isinstance(part, dict) and "demos" in part:
            state[name] = {**part, "traces": [], "train": [], "lm": None}
    return state


def _frozen_modules(program: dspy.Module) -> dict[str, dspy.Module]:
    """The modules in a program that DSPy's optimizers leave as they are (`_compiled`), by name.

    `named_parameters` of the program leaves out their predictors.
    """
    return {
        name.removeprefix("self."): module
        for name, module in program.named_sub_modules(dspy.Module)
        if module is not program and getattr(module, "_compiled", False)
    }


def _without_lm(part: Any) -> Any:
    copied = copy.copy(part)
    copied.lm = None
    return copied


def program_version(program: dspy.Module, prompt_format: str | None) -> str:
    """Returns 12 hex digits that identify prompts and prompt format. Agent parameters are not included."""
    text = json_text([program_state(program), prompt_format], sort_keys=True)
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
        return NearestDemos(inner, state["pool"], k=state["k"])
    if state["kind"] == "ensemble":
        return EnsembleProgram([restore_program(name, config, member, fresh) for member in state["members"]])
    program = load_program(name, config=config) if fresh is None else copied(fresh)
    frozen = _frozen_modules_of(program, state.get("frozen", {}))
    _load_module_state(program, state["state"])
    for name, module in frozen.items():
        _load_module_state(module, state["frozen"][name])
    if "thinking" in state:
        program.thinking = Thinking.of(state["thinking"])
    if "policy" in state:
        program.policy = ThinkingPolicy.of(state["policy"])
    return program


def _frozen_modules_of(program: dspy.Module, names: Iterable[str]) -> dict[str, dspy.Module]:
    """Freezes the modules of these names, also if the program's code does not."""
    modules = {name.removeprefix("self."): module for name, module in program.named_sub_modules(dspy.Module)}
    if missing := sorted(set(names) - modules.keys()):
        raise ProgramError(f"the program has no module {missing[0]!r} any more, which was frozen when it was compiled")
    for name in names:
        modules[name]._compiled = True
    return {name: modules[name] for name in names}


def _load_module_state(module: dspy.Module, state: dict[str, Any]) -> None:
    """Models and call settings of predictors come from the program's code, never from the state: a crafted state could
    name a server.
    """
    settings = {path: (predictor.lm, predictor.config) for path, predictor in module.named_predictors()}
    module.load_state(_without_models(state))
    for path, predictor in module.named_predictors():
        predictor.lm, predictor.config = settings.get(path, (None, {}))


def _without_models(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a predictor or module without models, which a crafted state could name."""
    parts = {
        name: {**part, "lm": None} if isinstance(part, dict) and "lm" in part else part for name, part in state.items()
    }
    return {**parts, "lm": None} if "lm" in parts else parts
