"""Converts tool definitions of all APIs and tracers to OpenAI's format."""

from collections.abc import Iterator
from typing import Any

from assay.traces.importers.values import as_text, parsed
from assay.traces.messages.gemini import plain_types

__all__ = ["tools_of"]


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Tool definitions in OpenAI's format, from nested or flat ones, Anthropic's, OpenInference's, or a mapping by
    name.
    """
    definitions = parsed(value)
    if isinstance(definitions, dict):
        by_name = [(name, parsed(definition)) for name, definition in definitions.items()]
        definitions = [
            {"name": name, **(definition if isinstance(definition, dict) else {"description": as_text(definition)})}
            for name, definition in by_name
        ]
    return [tool for item in definitions for tool in _tool(parsed(item))] if isinstance(definitions, list) else []


_SCHEMAS = ("parameters", "input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema")


def _tool(definition: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(definition, dict):
        return
    inner = definition.get("tool")
    if isinstance(inner, dict):
        yield from _tool(parsed(inner.get("json_schema")) if inner.get("json_schema") else inner)
    elif isinstance(definition.get("function"), dict):
        yield dict(definition)
    elif isinstance(
        declared := definition.get("function_declarations", definition.get("functionDeclarations")), list
    ):  # Gemini
        for declaration in declared:
            yield from _tool(declaration)
    elif isinstance(definition.get("toolSpec"), dict):  # Bedrock
        yield from _tool(definition["toolSpec"])
    elif definition.get("name"):
        schema = next((parsed(definition[key]) for key in _SCHEMAS if definition.get(key)), None)
        if isinstance(schema, dict) and isinstance(schema.get("json"), dict):
            schema = schema["json"]
        schema = plain_types(schema)
        described = {"description": definition["description"]} if definition.get("description") else {}
        yield {
            "type": "function",
            "function": {"name": definition["name"], **described, **({"parameters": schema} if schema else {})},
        }
