"""Checks of scope `step`: `prediction["transition"]` is the LM call that is graded, by what was recorded of it.

A transition without a tool call gives no grade for what only tool calls can earn.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.errors import FailureKind
from assay.models.embedded import LINES
from assay.rubrics.criteria import Grade, NoGrade
from assay.traces.asked import asked_schema
from assay.traces.dialects import chat_messages, part_texts
from assay.traces.records import Rollout, ToolCall, Transition

__all__ = ["answered", "eligible", "not_repeated", "parsed", "result_used", "shortened", "tool_executed"]

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop, ast.Call, ast.Name, ast.Load)
_TRAJECTORY = re.compile(r"(thought|tool_name|tool_args|observation)_\d+")  # sections of dspy.ReAct's field `trajectory`
_MARKS = re.compile(r"\[\d+\] «|\\[nt\"']|[\"'«»\[\](){}]|[,:](?=\s|$)")  # of lists and mappings, as Python, JSON and DSPy write them
_SQL = re.compile(r"\s*(select|with|insert|update|delete|create|drop|alter|pragma|explain|values)\b", re.IGNORECASE)


def _transition(prediction: dict[str, Any]) -> Transition:
    found = prediction.get("transition")
    if not isinstance(found, Transition):
        raise NoGrade("a step check needs a transition")
    return found


def _with_tools(prediction: dict[str, Any]) -> Transition:
    transition = _transition(prediction)
    if not transition.tools:
        raise NoGrade("the step called no tool")
    return transition


def answered(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where the model answered without an error."""
    transition = _transition(prediction)
    return Grade(value=float(transition.error is None and bool(transition.output.strip() or transition.tools)))


def parsed(task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, fields: Sequence[str] = (), tools_only: bool = False) -> Grade:
    """1 where the output could be read: held against the schema that was asked for, the named fields present and not empty.

    JSON, `name: value` lines and DSPy's `[[ ## name ## ]]` sections are read. Where neither a schema nor fields are known, a
    step counts as parsed unless its failure kind is `parse`.

    Args:
        tools_only: only steps that called a tool are graded.
    """
    transition = _with_tools(prediction) if tools_only else _transition(prediction)
    schema = asked_schema(transition.request)
    wanted = list(fields) or list((schema or {}).get("required", ()))
    if not wanted and not (schema and transition.output.strip()):
        unread = transition.failure is FailureKind.PARSE
        return Grade(value=float(transition.error is None and not unread and bool(transition.output.strip() or transition.tools)))
    found = _fields_in(transition)
    if missing := [name for name in wanted if found.get(name) in (None, "", [], {})]:
        return Grade(value=0.0, reason=f"missing or empty: {', '.join(missing)}")
    if schema is not None and not schema.get(LINES):
        wrong = _violation(schema, found)
        return Grade(value=float(wrong is None), reason=(wrong or "")[:200])
    return Grade(value=1.0)


def _violation(schema: dict[str, Any], value: Any) -> str | None:
    """How a value breaks a schema that came with recorded data: nothing is fetched for it, and its patterns are not run."""
    import jsonschema
    import referencing

    try:
        validator = jsonschema.Draft202012Validator(_without_patterns(schema), registry=referencing.Registry())
        error = next(validator.iter_errors(value), None)
    except Exception:  # the schema itself cannot be used (a reference, its types): it says nothing
        return None
    return None if error is None else error.message


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_patterns(part) for key, part in schema.items() if key not in ("pattern", "patternProperties", "format")}
    return [_without_patterns(part) for part in schema] if isinstance(schema, list) else schema


def _fields_in(transition: Transition) -> dict[str, Any]:
    found = fields_in(transition.output)
    for tool in transition.tools:
        found = {**tool.arguments, **found}
    return found


def fields_in(text: str) -> dict[str, Any]:
    """The fields that an output holds: of JSON, of DSPy's `[[ ## name ## ]]` sections, else of `name: value` lines."""
    text = text.strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        sections = re.split(r"\[\[ ## (\w+) ## \]\]", text)
        found = dict(zip(sections[1::2], (part.strip() for part in sections[2::2]), strict=False))
        found = found or {name: value.strip() for name, value in re.findall(r"(?m)^(\w+):[ \t]*(.*)$", text)}
    return found if isinstance(found, dict) else {}


def eligible(task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, syntax: Mapping[str, str] | None = None) -> Grade:
    """The share of the step's tool calls whose arguments could be run, seen without running them: they are an object, none is
    empty, they meet the tool's schema where the request carried one, and they are well formed where the language is known.

    Args:
        syntax: argument's name -> `arithmetic`, `json`, `python` or `sql`; by default expressions, code and queries go by their
            usual names.
    """
    transition = _with_tools(prediction)
    reasons = [_ineligible(tool, transition.request, syntax) for tool in transition.tools]
    return Grade(value=sum(reason is None for reason in reasons) / len(reasons), reason=next((r for r in reasons if r), ""))


def _ineligible(tool: ToolCall, request: Mapping[str, Any], syntax: Mapping[str, str] | None) -> str | None:
    if not tool.arguments and tool.error is not None:
        return f"{tool.name}: no arguments could be read"
    if empty := [name for name, value in tool.arguments.items() if value is None or (isinstance(value, str) and not value.strip())]:
        return f"{tool.name}: {', '.join(empty)} is empty"
    schema = _tool_schema(tool.name, request)
    if schema is not None:
        wrong = _violation(schema, tool.arguments)
        if wrong is not None:
            return f"{tool.name}: {wrong[:200]}"
    known = {"expression": "arithmetic", "code": "python", "query": "", "sql": "sql", "json": "json"} if syntax is None else syntax
    for name, value in tool.arguments.items():
        check = _SYNTAX.get(known.get(name, ""))
        if check is not None and not (isinstance(value, str) and check(value)):
            return f"{tool.name}: {name} is no {known[name]}: {str(value)[:80]!r}"
    return None


def _tool_schema(name: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    for tool in (request.get("body") or request).get("tools") or ():
        told = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        schema = told.get("parameters") or told.get("input_schema")
        if told.get("name") == name and isinstance(schema, dict):
            return schema
    return None


def _arithmetic(text: str) -> bool:
    try:
        tree = ast.parse(text.split("=")[0].replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)) and any(isinstance(node, ast.Constant) for node in ast.walk(tree))


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
    quotes = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", "", text)
    return bool(_SQL.match(text)) and quotes.count("(") == quotes.count(")") and not re.search(r"['\"]", quotes)


_SYNTAX: dict[str, Callable[[str], bool]] = {"arithmetic": _arithmetic, "json": _json, "python": _python, "sql": _sql}


def tool_executed(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """The share of the step's tool calls that ran without an error. A call whose result was never seen did not run; where none was seen,
    there is no grade."""
    tools = _with_tools(prediction).tools
    if all(tool.result is None and tool.error is None for tool in tools):
        raise NoGrade("the result of no tool call was seen")
    ran = sum(tool.error is None and tool.result is not None for tool in tools)
    return Grade(value=ran / len(tools), reason=next((t.error for t in tools if t.error), ""))


def result_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """The share of the step's tool results that are used later: in a tool call's arguments, an output, the answer, or as an input that the
    program passed on to another LM call (see `passed_on`)."""
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("a rollout is needed to see what was used later")
    following = [other for other in rollout.transitions if other.t > transition.t]
    later = [rollout.prediction or {}]
    for other in following:
        later += [{"output": other.output}, *(tool.arguments for tool in other.tools)]
    used = sum(tool.error is None and (is_used(tool, later) or passed_on(tool, following)) for tool in transition.tools)
    return Grade(value=used / len(transition.tools))


def is_used(call: ToolCall, later: Sequence[Any]) -> bool:
    """Whether a tool's result stands in any of what came later, as a word or number of its own; a list or mapping by its values."""
    said = [plain_text(value) for value in later]
    return any(_holds(text, form) for form in _forms(call.result) for text in said)


def passed_on(call: ToolCall, following: Sequence[Transition]) -> bool:
    """Whether the program gave a tool's result to one of the LM calls after it as an input.

    A field that holds the call itself beside the result (its arguments, or its name where it has none) is the history of a loop. A loop keeps
    every result in its history, so a result there says nothing about its use.
    """
    if call.result is None or call.error is not None:
        return False
    given = [part for value in call.arguments.values() if (part := _unmarked(value))] or [_unmarked(call.name)]
    forms = {_unmarked(form) for form in _forms(call.result)} - {""}
    for transition in following:
        for text in map(_unmarked, _input_fields(transition.request)):
            around = [rest for form in forms if (rest := _without(text, form)) is not None]
            if any(not all(_holds(rest, part) for part in given) for rest in around):
                return True
    return False


def _unmarked(value: Any) -> str:
    """A plain text without the marks of lists and mappings: a result reads the same however a prompt writes it."""
    return plain_text(_MARKS.sub(" ", value if isinstance(value, str) else plain_text(value)))


def _input_fields(request: Mapping[str, Any]) -> list[str]:
    """The values of the input fields in the last user message: of DSPy's sections or `name: value` lines, else the whole text. A trajectory of
    DSPy's ReAct is one field."""
    asked = [message for message in chat_messages(request) if message.get("role") == "user"]
    text = part_texts(asked[-1].get("content")) if asked else ""
    sections = re.split(r"\[\[ ## (\w+) ## \]\]", text)
    if len(sections) < 3:
        return re.split(r"(?m)^\w+: ", text)
    found: list[str] = []
    for name, value in zip(sections[1::2], sections[2::2], strict=False):
        if _TRAJECTORY.fullmatch(name) and found:
            found[-1] += value
        else:
            found.append(value)
    return found


def _forms(result: Any) -> set[str]:
    """How a result reads: as its text, and where that is a list or a mapping as its values."""
    return {plain_text(form) for form in (result, _structure(result)) if form is not None} - {""}


def _holds(text: str, form: str) -> bool:
    return _without(text, form) is not None


def _without(text: str, form: str) -> str | None:
    """The text around a form that is in it as words or numbers of its own; None where it is not."""
    found = re.search(rf"(?<![\w.]){re.escape(form)}(?![\w]|\.\d)", text)
    return None if found is None else text[: found.start()] + " " + text[found.end() :]


def _structure(result: Any) -> Any:
    """What a result that was kept as text was, where it was a list or a mapping."""
    if not isinstance(result, str) or not result.startswith(("[", "(", "{")):
        return None
    try:
        return ast.literal_eval(result)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def plain_text(value: Any) -> str:
    """A text to compare by: of a structure the texts of its values."""
    if isinstance(value, Mapping):
        text = " ".join(plain_text(part) for part in value.values())
    else:
        text = " ".join(plain_text(part) for part in value) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.casefold().split()).rstrip(".")


def not_repeated(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where no tool call of the step was made before with the same arguments, in this step or an earlier one."""
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("a rollout is needed to see what was called before")
    made = [_call_key(tool) for tool in transition.tools]
    before = {_call_key(tool) for tool in _tools_before(rollout, transition.t)}
    return Grade(value=float(len(set(made)) == len(made) and not before & set(made)))


def shortened(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where the step brought the answer nearer: a tool call of it ran, gave what no call before had given, and was still
    needed: fewer such calls were made before than the task's `tool_calls` says it needs, where it says so."""
    transition = _with_tools(prediction)
    if rollout is None:
        raise NoGrade("a rollout is needed to see what was known before")
    known = {plain_text(tool.result) for tool in _tools_before(rollout, transition.t) if tool.error is None and tool.result is not None}
    new = {plain_text(tool.result) for tool in transition.tools if tool.error is None and tool.result is not None} - known
    needed = getattr(task, "metadata", {}).get("tool_calls")
    return Grade(value=float(bool(new) and (not isinstance(needed, int) or len(known) < needed)))


def _tools_before(rollout: Rollout, t: int) -> list[ToolCall]:
    return rollout.early_tools + [tool for earlier in rollout.transitions if earlier.t < t for tool in earlier.tools]


def _call_key(tool: ToolCall) -> tuple[str, str]:
    return tool.name, json.dumps(tool.arguments, sort_keys=True, default=str)
