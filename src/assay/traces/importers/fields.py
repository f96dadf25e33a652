"""Converts the inputs, outputs and tool arguments of traces to named fields. Does not read files."""

from typing import Any

from assay.traces.importers.chat import Message, conversation_of, text_of
from assay.traces.importers.values import parsed
from assay.traces.messages.final_answer import argument_value, ends_run

__all__ = ["as_arguments", "as_inputs", "as_prediction"]


def as_inputs(value: Any) -> dict[str, Any]:
    """Fields of an input.

    An object has its own fields, a function call its arguments. One user message becomes `input`, a conversation
    `messages`.
    """
    parsed_value = parsed(value)
    if parsed_value in (None, "", []):
        return {}
    messages = conversation_of(parsed_value)
    if messages is not None:
        questions = [message for message in messages if message["role"] not in ("system", "developer")]
        is_question = len(questions) == 1 and questions[0]["role"] == "user"
        return {"input": questions[0]["content"]} if is_question else {"messages": messages}
    if isinstance(parsed_value, dict) and "args" in parsed_value and set(parsed_value) <= {"args", "kwargs"}:
        arguments, named = parsed_value["args"], parsed_value.get("kwargs")
        if not arguments:
            return dict(named) if isinstance(named, dict) else {}
        if not named and isinstance(arguments, list) and len(arguments) == 1:
            return as_inputs(arguments[0]) or {"input": arguments[0]}
    return (
        {str(key): item for key, item in parsed_value.items()}
        if isinstance(parsed_value, dict)
        else {"input": parsed_value}
    )


def as_prediction(value: Any) -> dict[str, Any] | None:
    """Fields of an output: those of an object, otherwise `output`; None without an output."""
    parsed_value = parsed(value)
    if parsed_value in (None, "", []):
        return None
    messages = conversation_of(parsed_value)
    if messages is not None:
        return _last_answer(messages)
    return (
        {str(key): item for key, item in parsed_value.items()}
        if isinstance(parsed_value, dict)
        else {"output": parsed_value}
    )


def _last_answer(messages: list[Message]) -> dict[str, Any] | None:
    """Answer of a conversation: its last text, or the arguments of the tool call that ended it.

    The result of that call may follow it. None if the last message requests other tools.
    """
    last = next((message for message in reversed(messages) if message["role"] != "tool"), messages[-1])
    calls = [call["function"] for call in last.get("tool_calls") or ()]
    if (final := next((call for call in calls if ends_run(call["name"])), None)) is not None:
        return {"output": argument_value(final["arguments"])}
    text = text_of(messages[-1]["content"])
    return {"output": text} if text or not messages[-1].get("tool_calls") else None


def as_arguments(value: Any) -> dict[str, Any]:
    """Arguments of a tool by name; a value that is not an object is stored under `arguments`."""
    arguments = parsed(value)
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict) and set(arguments) == {"args", "kwargs"}:
        named = dict(arguments["kwargs"]) if isinstance(arguments["kwargs"], dict) else {}
        return {**({"args": arguments["args"]} if arguments["args"] else {}), **named}
    return (
        {str(key): item for key, item in arguments.items()} if isinstance(arguments, dict) else {"arguments": arguments}
    )
