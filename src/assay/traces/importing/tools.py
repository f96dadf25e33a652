"""Definitions of tools, in the forms of each API and tracer, in OpenAI's form."""

from collections.abc import Iterator
from typing import Any

from assay.traces.gemini import plain_types
from assay.traces.importing.values import as_text, parsed

__all__ = ["tools_of"]


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Definitions of tools in OpenAI's form: nested, flat, Anthropic's, OpenInference's, or by name."""
    told = parsed(value)
    if isinstance(told, dict):
        by_name = [(name, parsed(given)) for name, given in told.items()]
        told = [{"name": name, **(given if isinstance(given, dict) else {"description": as_text(given)})} for name, given in by_name]
    return [found for item in told for found in _tool(parsed(item))] if isinstance(told, list) else []


_SCHEMAS = ("parameters", "input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema")


def _tool(told: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(told, dict):
        return
    inner = told.get("tool")
    if isinstance(inner, dict):
        yield from _tool(parsed(inner.get("json_schema")) if inner.get("json_schema") else inner)
    elif isinstance(told.get("function"), dict):
        yield dict(told)
    elif isinstance(declared := told.get("function_declarations", told.get("functionDeclarations")), list):  # Gemini
        for one in declared:
            yield from _tool(one)
    elif isinstance(told.get("toolSpec"), dict):  # Bedrock
        yield from _tool(told["toolSpec"])
    elif told.get("name"):
        schema = next((parsed(told[key]) for key in _SCHEMAS if told.get(key)), None)
        if isinstance(schema, dict) and isinstance(schema.get("json"), dict):
            schema = schema["json"]
        schema = plain_types(schema)
        described = {"description": told["description"]} if told.get("description") else {}
        yield {"type": "function", "function": {"name": told["name"], **described, **({"parameters": schema} if schema else {})}}
