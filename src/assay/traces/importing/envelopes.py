"""What a whole run gave back, taken out of what libraries wrap it in: results of agents, states of graphs, replies of APIs. Reads no files."""

from collections.abc import Mapping
from typing import Any

from assay.traces.importing.chat import answers_of, as_prediction, text_of
from assay.traces.importing.values import parsed

__all__ = ["unwrapped"]

_REPLIES = ("choices", "candidates", "generations")  # OpenAI, Gemini, LangChain


def unwrapped(value: Any) -> dict[str, Any] | None:
    """An output as the fields of a prediction; None where it holds no answer.

    Reads results of pydantic-ai, the OpenAI Agents SDK and CrewAI, states of LangGraph and AutoGen with `messages`, replies of model APIs, and
    the outputs of OpenLLMetry's spans. Any other object is its own fields.
    """
    told = parsed(value)
    if not isinstance(told, Mapping):
        return as_prediction(value)
    if isinstance(told.get("outputs"), dict | list | str) and set(told) <= {"outputs", "kwargs", "tags", "metadata"}:  # OpenLLMetry
        return unwrapped(told["outputs"])
    talk = told.get("messages")
    if isinstance(talk, list) and talk and all(isinstance(message, dict) for message in talk):
        return _state(told)
    for name, beside in (("output", ("_state", "_output_tool_name")), ("final_output", ("raw_responses", "new_items")), ("raw", ("tasks_output",))):
        if name in told and any(other in told for other in beside):
            return as_prediction(told[name])
    if any(isinstance(told.get(name), list) for name in _REPLIES) or isinstance(told.get("output"), list):
        choices = answers_of(told)
        text = text_of(choices[0]["message"]["content"]) if choices else ""
        return {"output": text} if text else None
    return as_prediction(value)


def _state(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the messages of a state ended with, beside its other fields."""
    said = as_prediction(told["messages"])
    fields = {str(name): value for name, value in told.items() if name not in ("messages", "stop_reason") and value not in (None, "", [], {})}
    found = {**fields, **({"output": said["output"]} if said and said.get("output") else {})}
    return found or None
