"""The final answer of a run, read from its LM calls: one rule for the gateway, for recordings in process and for imports.

A run ends with its last LM call. Its answer is that call's text, else the arguments of the tool call that ended the run: a tool that the
model had to call, one that agent libraries end runs with, or, where the model may not answer with text, one that was not called before.
A last call that only asks for other tools is no answer: the agent stopped before it gave one. Does not score.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.traces.asked import insisted_tool, must_call
from assay.traces.dialects import Answer, answer_of, chat_messages, chat_tools, part_texts
from assay.traces.prompts import sections_of
from assay.traces.records import Transition

__all__ = ["NOT_RECORDED", "NO_ANSWER", "Ending", "answered_with", "argument_value", "ends_run", "final_answer", "prediction_of"]

NO_ANSWER = "the run ended without an answer: its last LM call asked for tools"
NOT_RECORDED = "the final answer was not recorded"
_FINAL = frozenset({
    "final_result",  # pydantic-ai
    "final_answer",  # smolagents
    "submit",  # DSPy's ReActV2, Inspect
    "finish", "final_response", "final_output", "submit_answer", "submit_final_answer", "structured_output", "structuredoutput",
    "attempt_completion",
})  # fmt: skip
_CODE = re.compile(r"(?:<code>|```(?:python|py)?\n)(.*?)(?:</code>|```|\Z)", re.DOTALL)  # a stop sequence may have cut the end off
_FINAL_OF_UNION = ("final_result_",)  # pydantic-ai, one tool a member: `final_result_City`


@dataclass(frozen=True)
class Ending:
    """How a run ended. `value` is its answer, None without one; `known` is False where the record does not say what the answer was."""

    value: Any = None
    known: bool = True


def ends_run(tool: str) -> bool:
    """Whether a tool's name is one that agent libraries give to the tool that ends a run."""
    name = tool.casefold().replace("-", "_")
    return name in _FINAL or name.startswith(_FINAL_OF_UNION)


def argument_value(arguments: Any) -> Any:
    """The answer that the arguments of a tool call hold: the value of a single field, else the arguments as JSON text."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    if isinstance(found, Mapping) and len(found) == 1:
        value = next(iter(found.values()))
        return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value
    return arguments if isinstance(arguments, str) else json.dumps(found, ensure_ascii=False, default=str)


def prediction_of(answer: Any, field: str = "answer") -> dict[str, Any] | None:
    """An answer as a prediction: the fields of a text in DSPy's sections, else one field. None without an answer."""
    if answer is None:
        return None
    fields = sections_of(answer) if isinstance(answer, str) and answer.lstrip().startswith("[[ ## ") else {}
    return fields or {field: answer}


def answered_with(request: Mapping[str, Any], answer: Answer, called: Collection[str] = ()) -> Ending:
    """How a run ended, if this LM call is its last. Without an answer where it only asks for tools whose results are to come.

    Args:
        called: names of the tools that earlier calls of the run asked for.
    """
    insisted, offered = insisted_tool(request), [str(tool["function"]["name"]) for tool in chat_tools(request)]
    final = [call for call in answer.tools if call[1] == insisted] or [call for call in answer.tools if ends_run(call[1])]
    only_tools = must_call(request) or any(map(ends_run, offered))  # text beside calls is then a thought
    if not final and len(answer.tools) == 1 and must_call(request) and not any(map(ends_run, offered)):
        final = [call for call in answer.tools if call[1] not in called]
    if final:
        return Ending(argument_value(final[0][2]))
    if not answer.tools:
        return _by_code(request, answer.output) or Ending(answer.output)
    return Ending(answer.output if answer.output and not only_tools else None)


def _by_code(request: Mapping[str, Any], text: str) -> Ending | None:
    """How code ended a run that is told to answer by calling `final_answer`, as agents of smolagents are; None where this is no code of such a run.

    The argument is the answer where it stands there as a value; what the code worked out is not on record.
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
                return _of_literal([*call.args, *(given.value for given in call.keywords)])
    return Ending(None)


def _of_literal(arguments: Sequence[ast.expr]) -> Ending:
    try:
        return Ending(argument_value({"answer": ast.literal_eval(arguments[0])}))
    except (ValueError, IndexError, RecursionError, MemoryError):
        return Ending(known=False)


def final_answer(transitions: Sequence[Transition]) -> Ending:
    """How a run ended whose LM calls are these, in order.

    The answer is not known where there are no calls, the last one failed, or nothing of what it answered was recorded.
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
        if not transition.output:
            return None
        found = Answer()
        found.text = transition.output
        return found
    dialect = transition.request.get("dialect")
    body = response.get("body", response) if dialect else response
    return answer_of(dialect, body) if isinstance(body, Mapping) else None


def _unrecorded(transition: Transition) -> bool:
    """Whether an answer is empty because its content was not recorded, not because the model said nothing."""
    return bool(transition.completion_tokens) or not chat_messages(transition.request)
