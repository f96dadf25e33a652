"""The tools that an agent offers to a model: Python functions, tools of MCP servers, and schemas of a task.

A tool that only has a schema is not executed: its calls are recorded as the answer. Does not choose or call tools.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from assay.errors import NoJsonForm, ProgramError
from assay.support.values import json_value, value_text
from assay.traces.listening import has_side_effects, run_tool

# -- JSON schemas of tools: reduced to what engines can constrain, as a field type, and for checking arguments.
#
# The dialects of function calling (`dict`, `float`, `tuple`, `any`) become JSON schema. Schemas are data of others:
# they are bounded in size and depth, references are resolved within the schema only, and patterns are dropped.


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


RESULT_CHARACTERS = 20_000  # of a stored result; the recorder stores no more either
_RECORDED = "recorded"  # the result of a call that is not executed, in the trace
_NAME = 64  # characters of a label
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True)
class OfferedTool:
    """One tool.

    Attributes:
        name: as its calls are reported and executed.
        parameters: from `plain_schema`.
        run: executes a call with checked arguments; None if calls are only recorded.
        concurrent: calls may run in other threads. Python functions stay in the thread of the agent, because what
            they open (a connection of `sqlite3`) belongs to it.
        label: as the model sees it; unique among the tools of a run.
        assay_side_effects: a replay does not run it, see `assay.traces.listening`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[dict[str, Any]], Any] | None = None
    concurrent: bool = False
    label: str = ""
    assay_side_effects: bool = False

    @property
    def desc(self) -> str:
        """The description, under the name that `dspy.Tool` has for it."""
        return self.description

    def call(self, arguments: dict[str, Any]) -> str | None:
        """Executes a call and returns its result as text; None if calls of this tool are only recorded.

        Raises:
            BaseException: any exception of the tool.
        """
        if self.run is None:
            run_tool(self, arguments, lambda: _RECORDED)
            return None
        run = self.run
        return str(run_tool(self, arguments, lambda: cut(_text(run(arguments)), RESULT_CHARACTERS)))


def cut(text: str, most: int) -> str:
    """The beginning of a text, with its full length if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters in all)"


def _text(result: Any) -> str:
    if isinstance(result, str):
        return str.__str__(result)
    try:
        return value_text(json_value(result))
    except NoJsonForm:
        return str(result)  # an object of the tool's own, which says itself how it reads


def function_tool(function: Any) -> OfferedTool:
    """A Python function or `dspy.Tool` as a tool. Parameters with a default are optional, `*args` and `**kwargs` are
    left out where the function has other parameters.

    Raises:
        ProgramError: it is neither, its parameters cannot be read, or it yields its results.
    """
    if isinstance(function, OfferedTool):
        return function
    if not isinstance(function, dspy.Tool) and (isinstance(function, type) or not callable(function)):
        raise ProgramError(f"a tool is a function or a dspy.Tool, got a {type(function).__name__}: {function!r}")
    if inspect.isbuiltin(function) or isinstance(function, functools.partial):
        kind = "builtin" if inspect.isbuiltin(function) else "partial"
        raise ProgramError(f"the tool {function!r} is a {kind}, which names no types: wrap it in a function with 'def'")
    written = inspect.unwrap(function.func if isinstance(function, dspy.Tool) else function)
    if inspect.isgeneratorfunction(written) or inspect.isasyncgenfunction(written):
        raise ProgramError(f"the tool {function!r} yields its results, which are not read: return them as a list")
    try:
        tool = function if isinstance(function, dspy.Tool) else dspy.Tool(function)
        parameters = inspect.signature(tool.func).parameters
    except Exception as error:  # pydantic, `inspect` and annotations of the user raise whatever they raise
        raise ProgramError(f"the parameters of the tool {function!r} cannot be read: {error}") from error
    collecting = {name for name, parameter in parameters.items() if parameter.kind in _COLLECTING}
    named = {name: part for name, part in tool.args.items() if part or name not in collecting}
    optional = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    names = [name for name, part in named.items() if name not in optional and "default" not in part]
    schema = {"type": "object", "properties": named, "required": names}
    return OfferedTool(
        name=str(tool.name),
        description=inspect.cleandoc(tool.desc or ""),
        parameters=plain_schema(schema) if named else _no_parameters(tool),
        run=lambda arguments: _unrecorded(tool)(**arguments),
        assay_side_effects=has_side_effects(tool),
    )


def _no_parameters(tool: dspy.Tool) -> dict[str, Any]:
    closed = {} if tool.has_kwargs else {"properties": {}, "required": [], "additionalProperties": False}
    return {"type": "object", **closed}


def _unrecorded(tool: dspy.Tool) -> Callable[..., Any]:
    """The call of a tool without the notification of listeners: `OfferedTool.call` notifies them."""

    def call(**arguments: Any) -> Any:
        from assay.support.awaited import completed

        values = tool._validate_and_parse_args(**arguments)
        parameters = inspect.signature(tool.func).parameters.values()
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY and one.name in values]
        first = [values.pop(name) for name in names]
        return completed(tool.func(*first, **values))

    return call


def schema_tool(schema: Any) -> OfferedTool:
    """A tool of a task: a JSON schema as in BFCL (`name`, `description`, `parameters`) or OpenAI's (in `function`).

    A schema with a `simulation` is executed: its calls have the results of `simulated_result`.

    Raises:
        ValueError: it has no name, or its simulation is not a list of cases with a result or an error.
    """
    inner: Any = schema.get("function", schema) if isinstance(schema, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"a tool needs a name, got {str(schema)[:200]!r}")
    parameters = next((inner[key] for key in ("parameters", "input_schema", "inputSchema") if key in inner), None)
    description, cases = inner.get("description"), inner.get("simulation")
    if cases is not None and not _are_cases(cases):
        raise ValueError(
            f"the simulation of tool {name!r} must be a list of cases, each with 'result' or 'error' and optionally "
            f"'arguments', got {str(cases)[:200]}"
        )
    return OfferedTool(
        name=name,
        description=description if isinstance(description, str) else "",
        parameters=plain_schema(parameters),
        run=None if cases is None else functools.partial(simulated_result, cases),
    )


def _are_cases(cases: Any) -> bool:
    return isinstance(cases, list | tuple) and all(
        isinstance(case, Mapping)
        and case.keys() & {"result", "error"}
        and isinstance(case.get("arguments", {}), Mapping)
        for case in cases
    )


def with_labels(tools: Iterable[OfferedTool], reserved: str) -> dict[str, OfferedTool]:
    """The tools by label: their name without white space and punctuation of prompts, made unique with a number.

    Tools with equal name, description and parameters are one tool; of these, one that is executed is preferred.
    """
    labelled: dict[str, OfferedTool] = {}
    for tool in sorted(tools, key=lambda tool: tool.run is None):
        if any(
            (tool.name, tool.description, tool.parameters) == (other.name, other.description, other.parameters)
            for other in labelled.values()
        ):
            continue
        stem = label = re.sub(r"[\s\x00-\x1f\"'`{}\[\],:<>|]+", "_", tool.name)[:_NAME] or "tool"
        number = 1
        while label in labelled or label == reserved:
            number += 1
            label = f"{stem}_{number}"
        labelled[label] = OfferedTool(**{**vars(tool), "label": label})
    return labelled


def listing(tools: Sequence[OfferedTool], most: int) -> str:
    """The tools for a prompt, one a line, in at most `most` characters if the names alone fit.

    Descriptions are shortened first, then left out, then the parameters.
    """
    text = ""
    for words in (400, 120, 0, None):
        lines = []
        for tool in tools:
            head = tool.label if words is None else signature_line(tool.label, tool.parameters)
            description = " ".join(tool.description.split())
            lines.append(f"{head}: {description[:words]}" if words and description else head)
        text = "\n".join(lines)
        if len(text) <= most:
            break
    return text


def details(tool: OfferedTool, most: int) -> str:
    """One tool for a prompt: its description, then a line for each parameter with its type and description."""
    lines = [f"{tool.label}: {' '.join(tool.description.split())[:1000]}".rstrip(": ")]
    required = tool.parameters.get("required", ())
    for name, part in tool.parameters.get("properties", {}).items():
        kind = type_text(part) + ("" if name in required else ", optional")
        lines.append(f"- {name} ({kind}): {part.get('description', '')}".rstrip(": "))
    text = "\n".join(lines)
    return text if len(text) <= most else signature_line(tool.label, tool.parameters)[: max(most, 200)]


def simulated_result(cases: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """The result of a call of a simulated tool: that of the first case whose arguments all match.

    Args:
        cases: each has `arguments` (name -> value; others may have any value) and `result` or `error`.
    Raises:
        LookupError: the case has an error, or no case matches.
    """
    for case in cases:
        if all(_same(arguments.get(name), value) for name, value in case.get("arguments", {}).items()):
            if "error" in case:
                raise LookupError(str(case["error"]))
            return str(case["result"])
    raise LookupError("nothing was found for these arguments")


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return value.strip().lower() == wanted.lower()
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)
