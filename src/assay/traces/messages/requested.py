"""Requirements of a request on its answer, in any dialect: an output schema, or tools that must be called."""

from collections.abc import Mapping
from typing import Any

from assay.traces.messages import gemini


def output_schema(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """JSON schema that the answer must or should follow; None without one."""
    config = request.get("body") or request.get("config") or {}
    if not isinstance(config, Mapping):
        return None
    if request.get("dialect") == "gemini":
        return gemini.output_schema(config)
    nested = [
        json_schema.get("format")
        for name in ("text", "output_config")
        if isinstance(json_schema := config.get(name), Mapping)
    ]  # Responses, Anthropic
    output_format = next(
        (
            candidate
            for candidate in (config.get("response_format"), config.get("output_format"), *nested)
            if isinstance(candidate, Mapping)
        ),
        None,
    )
    if output_format is None:
        return None
    json_schema = output_format.get("json_schema")
    schema = (json_schema.get("schema") if isinstance(json_schema, Mapping) else None) or output_format.get("schema")
    return schema if isinstance(schema, dict) else None


def insisted_tool(request: Mapping[str, Any]) -> str | None:
    """Name of the only tool that the model must call, which clients use for typed answers; None if it may choose."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function", choice)
    allowed = choice.get("allowed")  # DSPy's canonical form, and Gemini's
    only_allowed = (
        allowed[0]
        if isinstance(allowed, list | tuple) and len(allowed) == 1 and choice.get("mode") == "required"
        else None
    )
    name = function.get("name") if isinstance(function, Mapping) else None
    return next((candidate for candidate in (name, only_allowed) if isinstance(candidate, str) and candidate), None)


def must_call(request: Mapping[str, Any]) -> bool:
    """Whether the model must answer with a tool call."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return choice == "required"
    return choice.get("type") == "any" or choice.get("mode") == "required" or insisted_tool(request) is not None


def _tool_choice(request: Mapping[str, Any]) -> Any:
    body = request.get("body", request.get("config"))
    if request.get("dialect") == "gemini":
        return gemini.tool_choice(body) if isinstance(body, Mapping) else None
    choice = body.get("tool_choice") if isinstance(body, Mapping) else None
    inner = (
        choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    )  # OpenAI's chat form of a restricted choice
    return inner if isinstance(inner, Mapping) else choice
