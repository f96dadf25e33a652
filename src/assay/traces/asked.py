"""What a request asks of the answer, in any dialect: a schema to follow, or tools that must be called. Does not read answers."""

from collections.abc import Mapping
from typing import Any

from assay.traces import gemini

__all__ = ["asked_schema", "insisted_tool", "must_call"]


def asked_schema(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that the answer was constrained to, or was asked to follow; None without one."""
    config = request.get("body") or request.get("config") or {}
    if not isinstance(config, Mapping):
        return None
    if request.get("dialect") == "gemini":
        return gemini.asked_schema(config)
    nested = [told.get("format") for name in ("text", "output_config") if isinstance(told := config.get(name), Mapping)]  # Responses, Anthropic
    asked = next((found for found in (config.get("response_format"), config.get("output_format"), *nested) if isinstance(found, Mapping)), None)
    if asked is None:
        return None
    told = asked.get("json_schema")
    schema = (told.get("schema") if isinstance(told, Mapping) else None) or asked.get("schema")
    return schema if isinstance(schema, dict) else None


def insisted_tool(request: Mapping[str, Any]) -> str | None:
    """Name of the one tool that the model must call, as clients ask for typed answers."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function", choice)
    allowed = choice.get("allowed")  # DSPy's canonical form, and Gemini's
    listed = allowed[0] if isinstance(allowed, list | tuple) and len(allowed) == 1 and choice.get("mode") == "required" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return next((found for found in (name, listed) if isinstance(found, str) and found), None)


def must_call(request: Mapping[str, Any]) -> bool:
    """Whether the model may answer with tool calls only."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return choice == "required"
    return choice.get("type") == "any" or choice.get("mode") == "required" or insisted_tool(request) is not None


def _tool_choice(request: Mapping[str, Any]) -> Any:
    body = request.get("body", request.get("config"))
    if request.get("dialect") == "gemini":
        return gemini.tool_choice(body) if isinstance(body, Mapping) else None
    found = body.get("tool_choice") if isinstance(body, Mapping) else None
    inner = found.get("allowed_tools") if isinstance(found, Mapping) else None  # OpenAI's chat form of a restricted choice
    return inner if isinstance(inner, Mapping) else found
