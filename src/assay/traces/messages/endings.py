"""Why an answer of a model holds no text to read: a refusal, a content filter, the token limit, reasoning alone."""

from assay.models.answers import reason_in
from assay.traces.messages.dialects import answer_to
from assay.traces.records import Transition

__all__ = ["ending_of"]

_MOST = 200  # characters of a refusal in a message


def ending_of(call: Transition) -> str:
    """Returns what ended the answer of a call, with the provider's word; empty if it ended as usual or failed."""
    if call.response is None:
        return ""
    answer = answer_to(call.request, call.response)
    word = reason_in(call.response) or str(answer.finish or "")
    if answer.refusal and word == "stop":
        word = "refusal"  # the field of OpenAI's message
    said = f": {answer.refusal[:_MOST]!r}" if answer.refusal not in ("", word) else ""
    named = f" ({word})" if word else ""
    if word == "refusal":
        return f"the model refused{named}{said}"
    if answer.finish == "content_filter":
        return f"the provider's content filter ended the answer{named}{said}"
    if answer.finish == "length":
        return f"the answer was cut at the token limit{named}"
    if answer.reasoning and not (answer.text or answer.tools or answer.media):
        return f"the answer has reasoning and no text{named}"
    return ""
