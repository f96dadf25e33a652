"""Reads the final answer of a run from its LM calls. Used by the gateway, in-process recording and importers.

The answer is the text of the last LM call, or the arguments of the tool call that ended the run: a tool that the model
had to call, a tool with which agent libraries end runs, or, if the model may not answer with text, a tool that was not
called before. If the last LM call requests other tools only, the run has no answer. Does not score.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.support.sections import SUBMIT, answer_fields, fields_in
from assay.support.values import json_text
from assay.traces.messages.dialects import Answer, answer_of, chat_messages, chat_tools, part_texts
from assay.traces.messages.prompts import answered_fields, arguments_of, asked_outputs
from assay.traces.messages.requested import insisted_tool, must_call
from assay.traces.records import Transition

NO_ANSWER = "the run ended without an answer: its last LM call asked for tools"
NOT_RECORDED = "the final answer was not recorded"
_FINAL = frozenset(
    {
        "final_result",  # pydantic-ai
        "final_answer",  # smolagents
        "submit",  # DSPy's ReActV2, Inspect
        "finish",
        "final_response",
        "final_output",
        "submit_answer",
        "submit_final_answer",
        "structured_output",
        "structuredoutput",
        "attempt_completion",
    }
)
_CODE = re.compile(
    r"(?:<code>|```(?:python|py)?\n)(.*?)(?:</code>|```|\Z)", re.DOTALL
)  # the end is missing if a stop sequence cut it off
_FINAL_OF_UNION = ("final_result_",)  # pydantic-ai has one tool per union member, such as `final_result_City`


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Args:
        value: The answer; None without one. A mapping of its fields if the prompt of an adapter named them.
        known: False if the answer was not recorded.
    """

    value: Any = None
    known: bool = True


def ends_run(tool: str) -> bool:
    """Whether agent libraries use a tool of this name to end a run."""
    name = tool.casefold().replace("-", "_")
    return name in _FINAL or name.startswith(_FINAL_OF_UNION)


def argument_value(arguments: Any) -> Any:
    """The answer in the arguments of a tool call: the value of the only field, else the arguments as JSON text."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    if isinstance(parsed, Mapping) and len(parsed) == 1:
        value = next(iter(parsed.values()))
        return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value
    return arguments if isinstance(arguments, str) else json_text(parsed)


def prediction_of(answer: Any, field: str = "answer") -> dict[str, Any] | None:
    """Convert an answer to a prediction: its fields, else one field. None without an answer.

    Args:
        answer: the value of an `Ending`, or a text.
        field: Name of the field of an answer without fields.
    """
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        return dict(answer)
    fields = fields_in(answer) if isinstance(answer, str) and answer.lstrip().startswith("[[ ## ") else {}
    return fields or {field: answer}


def answered_with(request: Mapping[str, Any], answer: Answer, called: Collection[str] = ()) -> Ending:
    """How a run ended whose last LM call is this one.

    There is no answer if the call only requests tools whose results are still missing.

    Args:
        request: Request of the call.
        answer: Its answer.
        called: Names of the tools that earlier calls of the run requested.
    """
    required_tool, offered_tools = (
        insisted_tool(request),
        [str(tool["function"]["name"]) for tool in chat_tools(request)],
    )
    final = [call for call in answer.tools if call[1] == required_tool] or [
        call for call in answer.tools if ends_run(call[1])
    ]
    only_tools = must_call(request) or any(map(ends_run, offered_tools))  # text next to tool calls is then reasoning
    if not final and len(answer.tools) == 1 and must_call(request) and not any(map(ends_run, offered_tools)):
        final = [call for call in answer.tools if call[1] not in called]
    if final:
        submitted = final[0][1] == SUBMIT and asked_outputs(chat_messages(request))
        return Ending(answer_fields("", arguments_of(answer)) if submitted else argument_value(final[0][2]))
    if not answer.tools:
        return _by_code(request, answer.output) or Ending(answered_fields(request, answer) or answer.output)
    return Ending(answer.output if answer.output and not only_tools else None)


def _by_code(request: Mapping[str, Any], text: str) -> Ending | None:
    """How code ended a run whose instructions require a call of `final_answer`, as in smolagents.

    The answer is the argument of the call if it is a literal; a computed value is not recorded.

    Returns:
        None if the run has no such instructions or the text no code.
    """
    blocks = _CODE.findall(text)
    if not blocks or not any("final_answer(" in part_texts(m.get("content")) for m in chat_messages(request)[:1]):
        return None
    for block in blocks:
        try:
            calls = [node for node in ast.walk(ast.parse(block.strip())) if isinstance(node, ast.Call)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "final_answer":
                return _of_literal([*call.args, *(keyword.value for keyword in call.keywords)])
    return Ending(None)


def _of_literal(arguments: Sequence[ast.expr]) -> Ending:
    try:
        return Ending(argument_value({"answer": ast.literal_eval(arguments[0])}))
    except (ValueError, IndexError, RecursionError, MemoryError):
        return Ending(known=False)


def final_answer(transitions: Sequence[Transition]) -> Ending:
    """How a run ended.

    The answer is unknown if there are no calls, the last call failed, or its answer was not recorded.

    Args:
        transitions: LM calls of the run, in order.
    """
    if not transitions or transitions[-1].error is not None:
        return Ending(known=False)
    last, request = transitions[-1], transitions[-1].request
    answer = _answer(last)
    if answer is None or (answer.empty and _unrecorded(last)):
        return Ending(known=False)
    called = {tool.name for earlier in transitions[:-1] for tool in earlier.tools}
    return answered_with(request, answer, called)


def _answer(transition: Transition) -> Answer | None:
    response = transition.response
    if not isinstance(response, Mapping):
        return Answer(text=transition.output) if transition.output else None
    dialect = transition.request.get("dialect")
    body = response.get("body", response) if dialect else response
    return answer_of(dialect, body) if isinstance(body, Mapping) else None


def _unrecorded(transition: Transition) -> bool:
    """Whether an empty answer was not recorded, as opposed to a model that returned nothing."""
    return bool(transition.completion_tokens) or not chat_messages(transition.request)
