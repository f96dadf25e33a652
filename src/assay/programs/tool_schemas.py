"""JSON schemas of tools: reduced to what engines can constrain, as a field type, and for checking arguments.

The dialects of function calling (`dict`, `float`, `tuple`, `any`) become JSON schema. Schemas are data of others: they
are bounded in size and depth, references are resolved within the schema only, and patterns are dropped.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["arguments_type", "checked_arguments", "names_type", "plain_schema", "signature_line", "type_text"]

_DEPTH = 8  # of nested objects and arrays; deeper parts accept any value
_PARTS = 400  # of one schema; further parts accept any value
_ENUM = 200  # choices that are constrained; a longer enum accepts any value of its type
_TEXT = 300  # characters of a description
_TYPES = {
    **dict.fromkeys(("object", "dict", "hashmap", "map"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "arraylist", "set"), "array"),
    **dict.fromkeys(("string", "str", "char"), "string"),
    **dict.fromkeys(("integer", "int", "long", "short"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    "null": "null",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_LIMITS = ("minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")


def plain_schema(schema: Any) -> dict[str, Any]:
    """A tool's parameters as a self-contained object schema of bounded size; open if there is no usable schema.

    Objects with properties are closed. Properties that are not required stay so: `arguments_type` makes them nullable
    in what is sent to an engine.
    """
    root = schema if isinstance(schema, Mapping) else {}
    plain = _Reduction(root).part(root, 0)
    return plain if plain.get("type") == "object" else {"type": "object"}


class _Reduction:
    """One schema being reduced; counts its parts."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.left = root, _PARTS

    def part(self, schema: Any, depth: int) -> dict[str, Any]:
        self.left -= 1
        if not isinstance(schema, Mapping) or depth > _DEPTH or self.left < 0:
            return {}
        schema = self._resolved(schema)
        choices = schema.get("anyOf") or schema.get("oneOf")
        plain: dict[str, Any] = {}
        if isinstance(schema.get("description"), str) and schema["description"].strip():
            plain["description"] = " ".join(schema["description"].split())[:_TEXT]
        if isinstance(choices, list) and choices and "properties" not in schema:
            options = [self.part(option, depth + 1) for option in choices[:20]]
            return plain | ({"anyOf": options} if all(options) else {})
        kinds = _types_of(schema)
        if kinds:
            plain["type"] = kinds[0] if len(kinds) == 1 else kinds
        enum = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(enum, list) and kinds not in (["array"], ["object"]):
            fitting = [value for value in enum if not kinds or any(_is_of(value, kind) for kind in kinds)]
            plain |= {"enum": fitting} if 0 < len(fitting) <= _ENUM else {}
        plain |= {name: schema[name] for name in _LIMITS if _is_of(schema.get(name), "number")}
        if "object" in kinds:
            plain |= self._object(schema, depth)
        if "array" in kinds:
            items = self.part(schema.get("items"), depth + 1)
            plain |= {"items": items} if items else {}
        return plain

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        is_open = not properties and schema.get("additionalProperties") not in (None, False)
        if not isinstance(properties, Mapping) or is_open or self.left < 0:
            return {}
        required = schema.get("required")
        names = {str(name) for name in required} if isinstance(required, list) else set()
        parts = {str(name): self.part(value, depth + 1) for name, value in properties.items()}
        return {
            "properties": parts,
            "required": [name for name in parts if name in names],
            "additionalProperties": False,
        }

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema without a reference on top: the part of the root that it names, or an empty schema."""
        for _ in range(_DEPTH):
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                only = schema.get("allOf")
                if not isinstance(only, list) or len(only) != 1 or not isinstance(only[0], Mapping):
                    return schema
                schema = {**only[0], **{name: value for name, value in schema.items() if name != "allOf"}}
                continue
            target: Any = self.root
            for name in reference.removeprefix("#").strip("/").split("/"):
                target = target.get(name) if isinstance(target, Mapping) and name else target
            if not reference.startswith("#") or not isinstance(target, Mapping):
                return {}
            schema = target
        return {}


def _types_of(schema: Mapping[str, Any]) -> list[str]:
    """JSON types of a schema, of which there may be none (any value)."""
    written = schema.get("type")
    names = written if isinstance(written, list) else [written]
    kinds = [_TYPES[name.casefold()] for name in names if isinstance(name, str) and name.casefold() in _TYPES]
    if not kinds and written is None and isinstance(schema.get("properties"), Mapping):
        return ["object"]
    return list(dict.fromkeys(kinds))


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and (isinstance(value, bool) == (kind == "boolean"))


def arguments_type(schema: Mapping[str, Any]) -> Any:
    """A type for the DSPy field of a call's arguments, whose JSON schema is the plain schema.

    As engines want closed schemas with all properties required, optional properties are nullable; `checked_arguments`
    drops the nulls. Any value is accepted as the answer: `checked_arguments` explains what is wrong with it.
    """
    return _type_of(json.dumps(_sent(schema), ensure_ascii=False), "dict")


def names_type(names: Sequence[str], most: int) -> Any:
    """A type for the DSPy field of a list of names, at most `most`. Any value is accepted as the answer."""
    schema = {"type": "array", "items": {"type": "string", "enum": list(names)}, "maxItems": most}
    return _type_of(json.dumps(schema, ensure_ascii=False), "list")


@functools.lru_cache(maxsize=512)
def _type_of(text: str, name: str) -> Any:
    from pydantic_core import core_schema

    class Typed:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            return core_schema.no_info_plain_validator_function(lambda value: value)

        @classmethod
        def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
            return json.loads(text)

    Typed.__name__ = name  # DSPy's prompts name the type
    return Typed


def _sent(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as it is sent to an engine: without descriptions, which the prompt has, and with nullable options."""
    sent = {name: value for name, value in schema.items() if name != "description"}
    if "properties" in schema:
        required = schema["required"]
        sent["properties"] = {
            name: part if name in required else _nullable(part)
            for name, part in ((name, _sent(value)) for name, value in schema["properties"].items())
        }
        sent["required"] = list(sent["properties"])
    if "items" in schema:
        sent["items"] = _sent(schema["items"])
    if "anyOf" in schema:
        sent["anyOf"] = [_sent(option) for option in schema["anyOf"]]
    return sent


def _nullable(part: dict[str, Any]) -> dict[str, Any]:
    options = part["anyOf"] if set(part) == {"anyOf"} else [part]
    return {"anyOf": [*options, {"type": "null"}]} if part else {}


def checked_arguments(schema: Mapping[str, Any], written: Any) -> tuple[dict[str, Any], str | None]:
    """Arguments of a call as the tool takes them, and what is wrong with them (None if nothing is).

    Nulls of optional properties are dropped, and texts that are a number or boolean are converted where the schema asks
    for one.

    Args:
        schema: from `plain_schema`.
        written: the model's output.
    """
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError):
            pass
    if not isinstance(written, Mapping):
        return {}, f"the arguments must be a JSON object, found {str(written)[:100]!r}"
    arguments = _converted(schema, dict(written))
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(dict(schema)).iter_errors(arguments))
    if error is None:
        return arguments, None
    where = ".".join(str(part) for part in error.absolute_path)
    return arguments, f"invalid arguments: {f'{where}: ' if where else ''}{error.message[:300]}"


def _converted(schema: Mapping[str, Any], value: Any) -> Any:
    kind = schema.get("type")
    if isinstance(value, Mapping) and "properties" in schema:
        return {
            str(name): _converted(schema["properties"].get(name, {}), part)
            for name, part in value.items()
            if part is not None or name in schema["required"] or name not in schema["properties"]
        }
    if isinstance(value, list) and "items" in schema:
        return [_converted(schema["items"], part) for part in value]
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and kind in ("integer", "number", "boolean"):
        return _from_text(value.strip(), kind)
    return value


def _from_text(text: str, kind: str) -> Any:
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.casefold(), text)
    if re.fullmatch(r"[-+]?\d{1,300}", text):
        return int(text)
    return float(text) if kind == "number" and re.fullmatch(r"[-+]?\d{0,300}\.\d{1,300}", text) else text


def signature_line(name: str, schema: Mapping[str, Any]) -> str:
    """`name(a: integer, b?: string)`: a tool's parameters in one line; `?` marks optional ones."""
    required: Sequence[str] = schema.get("required", ())
    parts = [
        f"{parameter}{'' if parameter in required else '?'}: {type_text(part)}"
        for parameter, part in schema.get("properties", {}).items()
    ]
    return f"{name}({', '.join(parts)})"


def type_text(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, for prompts: `integer`, `array of string`, `"a" | "b"`."""
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"][:20])
    if "anyOf" in schema:
        return " | ".join(type_text(option) for option in schema["anyOf"])
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"array of {type_text(schema['items'])}"
    if kind == "object" and schema.get("properties"):
        return signature_line("object", schema)
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
