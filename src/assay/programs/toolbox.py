"""The tools that an agent offers to a model: Python functions, tools of MCP servers, and schemas of a task.

A tool that only has a schema is not executed: its calls are recorded as the answer. Does not choose or call tools.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from assay.errors import NoJsonForm, ProgramError
from assay.programs.tool_schemas import plain_schema, signature_line, type_text
from assay.support.values import json_value, value_text
from assay.traces.listening import run_tool
from assay.traces.replaying import has_side_effects

__all__ = ["OfferedTool", "cut", "function_tool", "listing", "schema_tool", "with_labels"]

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
        assay_side_effects: a replay does not run it, see `assay.traces.replaying`.
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
