"""State of a compiled program as JSON, its restoration, and its version."""

import copy
import hashlib
import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ProgramError
from assay.models.thinking import Thinking
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.isolation import copied
from assay.programs.loading import load_program, read_saved_state
from assay.programs.thinking import ThinkingPolicy
from assay.support.values import json_text

# -- Recovers the constructor arguments of a program object, so that an artifact can rebuild it.


_MISSING = object()


def constructor_config(program: dspy.Module) -> dict[str, Any]:
    """Returns constructor arguments that differ from their defaults, JSON-serializable.

    Arguments are found as attributes of the same name. A signature is converted to text if its names, types and order
    can be expressed that way; its instructions and descriptions are part of the state. Arguments that cannot be
    serialized (tools, clients) are omitted, so that rebuilding the program fails.
    """
    config = {}
    for parameter in _parameters(program):
        value = _stored(program, parameter.name)
        if value is _MISSING or (parameter.default is not parameter.empty and _same(value, parameter.default)):
            continue
        if isinstance(value, type) and issubclass(value, dspy.Signature):
            value = signature_text(value)
            if value is None:
                continue
        if _is_json(value):
            config[parameter.name] = value
    return config


def missing_arguments(program: dspy.Module) -> list[str]:
    """Names of the constructor's required arguments that `constructor_config` does not have."""
    config = constructor_config(program)
    return [p.name for p in _parameters(program) if p.default is p.empty and p.name not in config]


def _parameters(program: dspy.Module) -> list[inspect.Parameter]:
    """The parameters of a program's constructor that have names."""
    try:
        parameters = list(inspect.signature(type(program).__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _stored(program: dspy.Module, name: str) -> Any:
    if name == "signature" and isinstance(program, dspy.ChainOfThought):
        return program.predict.signature.delete("reasoning")
    return vars(program).get(name, _MISSING)


def signature_text(signature: type[dspy.Signature]) -> str | None:
    """Returns a signature as text, `question: str, n: int -> answer: bool`; None if a type cannot be expressed."""
    sides = []
    for fields in (signature.input_fields, signature.output_fields):
        parts = [(name, _type_text(field.annotation)) for name, field in fields.items()]
        if any(text is None for _, text in parts):
            return None
        sides.append(", ".join(f"{name}: {text}" for name, text in parts))
    text = " -> ".join(sides)
    try:
        again = dspy.Signature(text)
    except Exception:  # any exception of DSPy's parser means that the text is not valid
        return None
    same = {name: field.annotation for name, field in again.fields.items()} == {
        name: field.annotation for name, field in signature.fields.items()
    }
    return text if same else None


def _type_text(annotation: Any) -> str | None:
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__ if annotation.__module__ == "builtins" else None
    return str(annotation).replace("typing.", "").replace("NoneType", "None")


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and _is_json(value) and bool(value == default))


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


_GENERATION = {
    "frequency_penalty", "max_completion_tokens", "max_tokens", "n", "presence_penalty", "reasoning_effort", "seed",
    "stop", "temperature", "top_k", "top_p",
}  # fmt: skip
_PARTS = {"config", "demos", "fields", "lm", "signature", "traces", "train"}  # of the state of a predictor


def program_state(program: dspy.Module) -> dict[str, Any]:
    """Returns instructions, demonstrations and generation settings of all predictors, JSON-serializable, also for
    composites.

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
    config = {path: kept for path, predictor in program.named_predictors() if (kept := _generation(predictor.config))}
    parts = {"frozen": frozen, "config": config}
    return {
        "kind": "program", "state": _module_state(program), **{name: part for name, part in parts.items() if part},
        **budget,
    }  # fmt: skip


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a predictor's calls that are numbers or texts about the sampling. Not those of the connection."""
    return {
        name: value
        for name, value in config.items()
        if name in _GENERATION and isinstance(value, bool | int | float | str)
    }


def _module_state(module: dspy.Module) -> dict[str, Any]:
    # a predictor with its own model, as SIMBA creates them, cannot be dumped unchanged
    has_own_model = any(getattr(part, "lm", None) is not None for _, part in module.named_parameters())
    state: dict[str, Any] = (
        _without_lm(module).dump_state()
        if has_own_model and isinstance(module, dspy.Predict)
        else {name: _without_lm(part).dump_state() for name, part in module.named_parameters()}
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
        ProgramError: the program cannot be built, or has other predictors or fields than the state.
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
    for path, predictor in program.named_predictors():
        predictor.config = {**predictor.config, **_generation(state.get("config", {}).get(path, {}))}
    if "thinking" in state:
        program.thinking = Thinking.of(state["thinking"])
    if "policy" in state:
        program.policy = None if state["policy"] is None else ThinkingPolicy.of(state["policy"])
    return program


def with_saved_state(program: dspy.Module, path: str | Path) -> dspy.Module:
    """A copy of a program with the instructions, field texts and demonstrations that `program.save(path)` wrote.

    Raises:
        ProgramError: the file is not such a state, or it is the state of a program with other predictors or fields.
    """
    state, origin = read_saved_state(Path(path))
    loaded: dspy.Module = copied(program)
    _load_module_state(loaded, state, origin=origin)
    return loaded


def _frozen_modules_of(program: dspy.Module, names: Iterable[str]) -> dict[str, dspy.Module]:
    """Freezes the modules of these names, also if the program's code does not."""
    modules = {name.removeprefix("self."): module for name, module in program.named_sub_modules(dspy.Module)}
    if missing := sorted(set(names) - modules.keys()):
        raise ProgramError(f"the program has no module {missing[0]!r} any more, which was frozen when it was compiled")
    for name in names:
        modules[name]._compiled = True
    return {name: modules[name] for name in names}


def _load_module_state(module: dspy.Module, state: dict[str, Any], *, origin: str = "the state") -> None:
    """Loads a state into a module with the same predictors and fields.

    Models and call settings of predictors come from the program's code, never from the state: a crafted state could
    name a server.

    Args:
        origin: where the state comes from, for messages.
    Raises:
        ProgramError: the state is not of this form, or of a program with other predictors or fields.
    """
    if differences := _differences(module, state):
        raise ProgramError(
            f"{origin} does not fit the program {type(module).__name__}: {'; '.join(differences)}. Load it into the "
            "program that it was saved from, with the DSPy version that saved it, or compile the program anew"
        )
    settings = {path: (predictor.lm, predictor.config) for path, predictor in module.named_predictors()}
    module.load_state(_without_models(state))
    for path, predictor in module.named_predictors():
        predictor.lm, predictor.config = settings.get(path, (None, {}))


def _differences(module: dspy.Module, state: dict[str, Any]) -> list[str]:
    """What a state has that the module lacks, or the reverse. DSPy would leave it out, or raise a `KeyError`."""
    parts = dict(module.named_parameters())
    if any(part is module for part in parts.values()):  # a predictor as the program: its state is not in an object
        return _differences_of_part("the predictor", module, state)
    unknown, missing = sorted(state.keys() - parts.keys()), sorted(parts.keys() - state.keys())
    differences = [
        f"{what} {', '.join(map(repr, names[:10]))}"
        for what, names in (("it has", unknown), ("it lacks", missing))
        if names
    ]
    if unknown or missing:
        return [*differences, f"the program's predictors are {', '.join(map(repr, parts)) or 'none'}"]
    return [text for name, part in parts.items() for text in _differences_of_part(repr(name), part, state[name])]


def _differences_of_part(name: str, part: Any, state: Any) -> list[str]:
    """Differences of one predictor; other parameters have states of their own forms."""
    if not isinstance(part, dspy.Predict):
        return [] if isinstance(state, dict) else [f"{name} is not an object"]
    signature = state.get("signature") if isinstance(state, dict) else None
    fields = signature.get("fields") if isinstance(signature, dict) else None
    texts = [] if not isinstance(fields, list) else fields
    wrong = (
        not isinstance(fields, list)
        or not isinstance(signature, dict)
        or not isinstance(signature.get("instructions"), str)
        or not all(isinstance(f, dict) and _are_texts(f.get("prefix"), f.get("description")) for f in texts)
        or not isinstance(state.get("demos"), list)
        or not all(isinstance(demo, dict) for demo in state["demos"])
    )
    if wrong:
        return [f"{name} is not the state of a predictor"]
    if unknown := sorted(state.keys() - _PARTS):
        return [f"{name} has the unknown parts {', '.join(map(repr, unknown[:10]))}"]
    here = part.signature.fields
    if len(texts) == len(here) and all(map(_is_field, texts, here.items())):
        return []
    saved = [_name_of(field) for field in texts]
    return [f"{name} has the fields {', '.join(saved) or 'none'}, and those of the program are {', '.join(here)}"]


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_field(saved: dict[str, str], field: tuple[str, Any]) -> bool:
    """Whether saved texts are those of a field. Its name is not saved: DSPy's default texts contain it, and an
    optimizer replaces one of the two at most."""
    name, info = field
    prefix, description = saved["prefix"], saved["description"]
    if description.startswith("${") and description.endswith("}"):
        return description == f"${{{name}}}"
    here = info.json_schema_extra
    return prefix in (here["prefix"], dspy.signatures.infer_prefix(name) + ":") or description == here["desc"]


def _name_of(saved: dict[str, str]) -> str:
    description, prefix = saved["description"], saved["prefix"]
    if description.startswith("${") and description.endswith("}"):
        return description[2:-1]
    return prefix.rstrip(": ").lower().replace(" ", "_")[:80]


def _without_models(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a predictor or module without models, which a crafted state could name."""
    parts = {
        name: {**part, "lm": None} if isinstance(part, dict) and "lm" in part else part for name, part in state.items()
    }
    return {**parts, "lm": None} if "lm" in parts else parts
