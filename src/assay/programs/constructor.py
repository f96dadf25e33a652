"""Recovers the constructor arguments of a program object, so that an artifact can rebuild it."""

import inspect
import json
import typing
from typing import Any

import dspy

_MISSING = object()


def constructor_config(program: dspy.Module) -> dict[str, Any]:
    """Returns constructor arguments that differ from their defaults, JSON-serializable.

    Arguments are found as attributes of the same name. A signature is converted to text if its names, types and order
    can be expressed that way; its instructions and descriptions are part of the state. Arguments that cannot be
    serialized (tools, clients) are omitted, so that rebuilding the program fails.
    """
    try:
        parameters = list(inspect.signature(type(program).__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    config = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
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
    try:
        parameters = list(inspect.signature(type(program).__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    config = constructor_config(program)
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in config
    ]


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
