"""Shipped checks of scope `step`. They grade one recorded LM call, `prediction["transition"]`.

Checks of tool calls raise `NoGrade` for a transition without tool calls.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.errors import FailureKind
from assay.rubrics.criteria import Grade, NoGrade
from assay.support.sections import LINES, answer_fields, prompt_fields
from assay.support.values import json_text
from assay.traces.messages.dialects import chat_messages, part_texts
from assay.traces.messages.final_answer import output_schema
from assay.traces.records import Rollout, ToolCall, Transition

__all__ = [
    "answered",
    "eligible",
    "not_repeated",
    "parsed",
    "refinement_gain",
    "result_used",
    "shortened",
    "tool_executed",
]

# -- Syntax tests for tool arguments: whether a text is well formed in a language, without running it.


_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.Call,
    ast.Name,
    ast.Load,
)
_SQL = re.compile(r"\s*(select|with|insert|update|delete|create|drop|alter|pragma|explain|values)\b", re.IGNORECASE)


def _arithmetic(text: str) -> bool:
    expression = text.split("=")[0].replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip()
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ARITHMETIC) for node in nodes) and any(
        isinstance(node, ast.Constant) for node in nodes
    )


def _python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _sql(text: str) -> bool:
    """Starts with a statement keyword, and quotes and parentheses are balanced."""
    unquoted = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", "", text)
    balanced = unquoted.count("(") == unquoted.count(")") and not re.search(r"['\"]", unquoted)
    return bool(_SQL.match(text)) and balanced


SYNTAX: dict[str, Callable[[str], bool]] = {"arithmetic": _arithmetic, "json": _json, "python": _python, "sql": _sql}

# sections of dspy.ReAct's field `trajectory`
_TRAJECTORY = re.compile(r"(thought|tool_name|tool_args|observation)_\d+")
# punctuation of lists and mappings in the notations of Python, JSON and DSPy
_MARKS = re.compile(r"\[\d+\] «|\\[nt\"']|[\"'«»\[\](){}]|[,:](?=\s|$)")


_LANGUAGES = {"expression": "arithmetic", "code": "python", "sql": "sql", "json": "json"}  # by argument name


def step_of(prediction: Mapping[str, Any]) -> Transition:
    """The LM call that a step check grades.

    Raises:
        NoGrade: there is none: the check is of another scope.
    """
    transition = prediction.get("transition")
    if not isinstance(transition, Transition):
        raise NoGrade("a step check needs a transition")
    return transition


def _with_tools(prediction: dict[str, Any]) -> Transition:
    transition = step_of(prediction)
    if not transition.tools:
        raise NoGrade("the step called no tool")
    return transition


def answered(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the model answered without an error."""
    return Grade.of(_has_answered(step_of(prediction)))


def _has_answered(transition: Transition) -> bool:
    return transition.error is None and bool(transition.output.strip() or transition.tools)


def parsed(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    *,
    fields: Sequence[str] = (),
    tools_only: bool = False,
) -> Grade:
    """Grade 1 if the output is valid by the requested schema and all required fields are present and not empty.

    Every prompt format is parsed. If neither a schema nor fields are known, a step counts as parsed unless its failure
    kind is `parse`.

    Args:
        fields: required fields; by default those the schema requires.
        tools_only: grade only steps with a tool call.
    """
    transition = _with_tools(prediction) if tools_only else step_of(prediction)
    schema = output_schema(transition.request)
    required = list(fields) or list((schema or {}).get("required", ()))
    if not required and not (schema and transition.output.strip()):
        return Grade.of(_has_answered(transition) and transition.failure is not FailureKind.PARSE)
    calls = [(tool.name, tool.arguments) for tool in transition.tools]
    values = answer_fields(transition.output, calls, list((schema or {}).get("properties", ())) or required)
    if missing := [name for name in required if values.get(name) in (None, "", [], {})]:
        return Grade.of(False, f"missing or empty: {', '.join(missing)}")
    if schema is not None and not schema.get(LINES):
        wrong = _violation(schema, values)
        return Grade.of(wrong is None, (wrong or "")[:200])
    return Grade(value=1.0)


def _violation(schema: dict[str, Any], value: Any) -> str | None:
    """Why a value is invalid by a schema from recorded data; None if it is valid.

    The schema is untrusted: references are not fetched and patterns are not run.
    """
    import jsonschema
    import referencing

    try:
        validator = jsonschema.Draft202012Validator(_without_patterns(schema), registry=referencing.Registry())
        error = next(validator.iter_errors(value), None)
    except Exception:  # the schema itself is unusable (an unresolved reference, a wrong type)
        return None
    return None if error is None else error.message


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_patterns(part)
            for key, part in schema.items()
            if key not in ("pattern", "patternProperties", "format")
        }
    return [_without_patterns(part) for part in schema] if isinstance(schema, list) else schema


def eligible(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, syntax: Mapping[str, str] | None = None
) -> Grade:
    """Share of the step's tool calls with valid arguments, checked without running them.

    Arguments are valid if they are an object, none is empty, they match the tool's schema (if the request has one), and
    they are well formed in the language given by `syntax`.

    Args:
        syntax: argument name -> `arithmetic`, `json`, `python` or `sql`. Default: `expression` is arithmetic, `code`
            Python, `sql` SQL and `json` JSON.
    """
    transition = _with_tools(prediction)
    reasons = [_invalid_arguments(tool, transition.request, syntax) for tool in transition.tools]
    return Grade(
        value=sum(reason is None for reason in reasons) / len(reasons), reason=next((r for r in reasons if r), "")
    )


def _invalid_arguments(tool: ToolCall, request: Mapping[str, Any], syntax: Mapping[str, str] | None) -> str | None:
    """Why the arguments of a tool call are invalid; None if they are valid."""
    if not tool.arguments and tool.error is not None:
        return f"{tool.name}: the arguments could not be parsed"
    if empty := [
        name
        for name, value in tool.arguments.items()
        if value is None or (isinstance(value, str) and not value.strip())
    ]:
        return f"{tool.name}: {', '.join(empty)} is empty"
    schema = _tool_schema(tool.name, request)
    if schema is not None:
        wrong = _violation(schema, tool.arguments)
        if wrong is not None:
            return f"{tool.name}: {wrong[:200]}"
    languages = _LANGUAGES if syntax is None else syntax
    for name, value in tool.arguments.items():
        is_valid = SYNTAX.get(languages.get(name, ""))
        if is_valid is not None and not (isinstance(value, str) and is_valid(value)):
            return f"{tool.name}: {name} is not valid {languages[name]}: {str(value)[:80]!r}"
    return None


def _tool_schema(name: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    for tool in (request.get("body") or request).get("tools") or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        schema = function.get("parameters") or function.get("input_schema")
        if function.get("name") == name and isinstance(schema, dict):
            return schema
    return None


def tool_executed(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of the step's tool calls that ran without an error.

    A call without a recorded result counts as not run. If no call has a recorded result, `NoGrade` is raised.
    """
    tools = _with_tools(prediction).tools
    if all(tool.result is None and tool.error is None for tool in tools):
        raise NoGrade("no result of a tool call was recorded")
    ran = sum(tool.error is None and tool.result is not None for tool in tools)
    return Grade(value=ran / len(tools), reason=next((t.error for t in tools if t.error), ""))


def result_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of the step's tool results that are used later.

    A result is used if it occurs in later tool arguments, in a later output, in the answer, or as an input of a later
    LM call (see `passed_on`). Of a list or an object, one value is enough that is not an argument of the call.
    """
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("later steps are unknown without a rollout")
    following = [other for other in rollout.transitions if other.t > transition.t]
    later = [rollout.prediction or {}]
    for other in following:
        later += [{"output": other.output}, *(tool.arguments for tool in other.tools)]
    used = sum(tool.error is None and (is_used(tool, later) or passed_on(tool, following)) for tool in transition.tools)
    return Grade(value=used / len(transition.tools))


def is_used(call: ToolCall, later: Sequence[Any]) -> bool:
    """Whether a tool's result occurs in one of the later values, as a whole word or number.

    A list or mapping, also as JSON, counts too if one of its values occurs that is not an argument of the call.
    """
    texts = [plain_text(value) for value in later]
    forms = _forms(call.result) | (_leaves(_structure(call.result)) - _leaves(call.arguments))
    return any(_contains(text, form) for form in forms for text in texts)


def _leaves(value: Any) -> set[str]:
    """Plain texts of the values in a structure, at any depth. Those that say little by themselves are left out: single
    characters, booleans, null."""
    if isinstance(value, Mapping | list | tuple):
        return set[str]().union(*map(_leaves, value.values() if isinstance(value, Mapping) else value))
    return set() if value is None or isinstance(value, bool) or len(text := plain_text(value)) < 2 else {text}


def passed_on(call: ToolCall, following: Sequence[Transition]) -> bool:
    """Whether the program passed a tool's result to a later LM call as an input.

    An input field that also contains the call (its arguments, or its name if it has none) is the history of a loop. A
    loop keeps every result in its history, so a result there is no evidence of use.
    """
    if call.result is None or call.error is not None:
        return False
    arguments = [part for value in call.arguments.values() if (part := _unmarked(value))] or [_unmarked(call.name)]
    forms = {_unmarked(form) for form in _forms(call.result)} - {""}
    for transition in following:
        for text in map(_unmarked, _input_fields(transition.request)):
            contexts = [rest for form in forms if (rest := _without(text, form)) is not None]
            if any(not all(_contains(rest, part) for part in arguments) for rest in contexts):
                return True
    return False


def _unmarked(value: Any) -> str:
    """Plain text without the punctuation of lists and mappings, so that notations compare as equal."""
    return plain_text(_MARKS.sub(" ", value if isinstance(value, str) else plain_text(value)))


def _input_fields(request: Mapping[str, Any]) -> list[str]:
    """Values of the input fields in the last user message.

    A text without fields is one field. A trajectory of DSPy's ReAct is one field.
    """
    messages = [message for message in chat_messages(request) if message.get("role") == "user"]
    text = part_texts(messages[-1].get("content")) if messages else ""
    fields: list[str] = []
    for name, value in (prompt_fields(text) or {"": text}).items():
        if _TRAJECTORY.fullmatch(name) and fields:
            fields[-1] += f"\n{value}"
        else:
            fields.append(value)
    return fields


def _forms(result: Any) -> set[str]:
    """Plain texts of a result: of the text itself, and of its values if it is a list or mapping."""
    return {plain_text(form) for form in (result, _structure(result)) if form is not None} - {""}


def _contains(text: str, form: str) -> bool:
    return _without(text, form) is not None


def _without(text: str, form: str) -> str | None:
    """The text without the first occurrence of `form` as whole words or numbers; None if it does not occur."""
    match = re.search(rf"(?<![\w.]){re.escape(form)}(?![\w]|\.\d)", text)
    return None if match is None else text[: match.start()] + " " + text[match.end() :]


def _structure(result: Any) -> Any:
    """The list, tuple or mapping that a result recorded as text represents; None otherwise."""
    if not isinstance(result, str) or not result.startswith(("[", "(", "{")):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(result)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def plain_text(value: Any) -> str:
    """Normalized text for comparison: lower case, single spaces, no final period; values only for structures."""
    if isinstance(value, Mapping):
        text = " ".join(plain_text(part) for part in value.values())
    else:
        text = " ".join(plain_text(part) for part in value) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.casefold().split()).rstrip(".")


def not_repeated(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if no tool call of the step repeats a call with the same arguments, in this step or an earlier one."""
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("earlier calls are unknown without a rollout")
    calls = [_call_key(tool) for tool in transition.tools]
    earlier = {_call_key(tool) for tool in _tools_before(rollout, transition.t)}
    return Grade.of(len(set(calls)) == len(calls) and not earlier & set(calls))


def refinement_gain(task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, losses: bool = False) -> Grade:
    """Gain of a round of `assay.programs.Refine` over the best round before it; graded for the round's last call.

    The grade is the gain if it is positive, otherwise 0. Calls of round 0, of rounds that the verifier could not decide
    and of rollouts without rounds are not graded.

    Args:
        losses: grade the size of a negative gain instead, for a criterion of negative weight.
    """
    transition = step_of(prediction)
    for entry in ((rollout.prediction or {}) if rollout is not None else {}).get("rounds") or ():
        calls, gain = entry.get("calls"), entry.get("gain")
        if gain is not None and calls and calls[1] > calls[0] and calls[1] - 1 == transition.t:
            return Grade(value=min(1.0, max(0.0, -gain if losses else gain)))
    raise NoGrade("the call did not end a round of refinement")


def shortened(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the step made progress: one of its tool calls returned a result that no earlier call had returned.

    If the task's metadata has `tool_calls` (the number of calls it needs), results beyond that number do not count.
    """
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("earlier results are unknown without a rollout")
    known = _results(_tools_before(rollout, transition.t))
    new = _results(transition.tools) - known
    needed = getattr(task, "metadata", {}).get("tool_calls")
    return Grade.of(bool(new) and (not isinstance(needed, int) or len(known) < needed))


def _results(tools: Sequence[ToolCall]) -> set[str]:
    return {plain_text(tool.result) for tool in tools if tool.error is None and tool.result is not None}


def _tools_before(rollout: Rollout, t: int) -> list[ToolCall]:
    return rollout.early_tools + [tool for earlier in rollout.transitions if earlier.t < t for tool in earlier.tools]


def _call_key(tool: ToolCall) -> tuple[str, str]:
    return tool.name, json_text(tool.arguments, sort_keys=True)
