"""Extracts the output of a run from the result objects of agent libraries, graph states and API replies.

Does not read files.
"""

from collections.abc import Mapping
from typing import Any

from assay.traces.importers.answers import answers_of
from assay.traces.importers.chat import text_of
from assay.traces.importers.fields import as_prediction
from assay.traces.importers.values import parsed

__all__ = ["unwrapped"]

_REPLIES = ("choices", "candidates", "generations")  # OpenAI, Gemini, LangChain


def unwrapped(value: Any) -> dict[str, Any] | None:
    """Convert an output to the fields of a prediction; None if it has no answer.

    Reads results of pydantic-ai, the OpenAI Agents SDK and CrewAI, states of LangGraph and AutoGen with `messages`,
    replies of model APIs, and the outputs of OpenLLMetry's spans. Any other object is returned with its own fields.
    """
    output = parsed(value)
    if not isinstance(output, Mapping):
        return as_prediction(value)
    if isinstance(output.get("outputs"), dict | list | str) and set(output) <= {
        "outputs",
        "kwargs",
        "tags",
        "metadata",
    }:  # OpenLLMetry
        return unwrapped(output["outputs"])
    talk = output.get("messages")
    if isinstance(talk, list) and talk and all(isinstance(message, dict) for message in talk):
        return _state(output)
    for name, companions in (
        ("output", ("_state", "_output_tool_name")),
        ("final_output", ("raw_responses", "new_items")),
        ("raw", ("tasks_output",)),
    ):
        if name in output and any(other in output for other in companions):
            return as_prediction(output[name])
    if any(isinstance(output.get(name), list) for name in _REPLIES) or isinstance(output.get("output"), list):
        choices = answers_of(output)
        text = text_of(choices[0]["message"]["content"]) if choices else ""
        return {"output": text} if text else None
    return as_prediction(value)


def _state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Answer of the messages of a state, with the other fields of the state."""
    answer = as_prediction(state["messages"])
    fields = {
        str(name): value
        for name, value in state.items()
        if name not in ("messages", "stop_reason") and value not in (None, "", [], {})
    }
    prediction = {**fields, **({"output": answer["output"]} if answer and answer.get("output") else {})}
    return prediction or None
