"""Why an answer of a model holds no text to read: a refusal, a content filter, the token limit, reasoning alone."""

from assay.models.codec import reason_in
from assay.support.sections import without_thoughts
from assay.traces.messages.dialects import Answer, answer_to
from assay.traces.records import Transition

_MOST = 200  # characters of a refusal in a message
# words of providers, in lower case
_FILTERED = frozenset(
    {
        "content_filter", "content_filtered", "safety", "image_safety", "sensitive", "guardrail_intervened",
        "recitation", "blocklist", "prohibited_content", "spii", "error_toxic",
    }
)  # fmt: skip
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"})
_USUAL = frozenset(
    {
        "", "stop", "stop_sequence", "tool_calls", "tool_call", "function_call", "end_turn", "eos", "eos_token",
        "complete", "completed",
    }
)  # fmt: skip


def ending_of(call: Transition) -> str:
    """Returns what ended the answer of a call, with the provider's word; empty if it ended as usual or failed."""
    if call.response is None:
        return ""
    if refused := refusal_of(call):
        return refused
    answer, word = _read(call)
    named = f" ({word})" if word else ""
    words = {str(answer.finish or "").casefold(), word.casefold()}
    if words & _CUT:
        return f"the answer was cut at the token limit{named}"
    if without_thoughts(answer.text) or answer.tools or answer.media:
        return ""
    if answer.reasoning or answer.text or answer.thinking_tokens:
        return f"the answer has reasoning and no text{named}"
    return "" if words <= _USUAL else f"the provider ended the answer{named}"


def refusal_of(call: Transition) -> str:
    """As `ending_of`, for refusals and content filters alone. A text that only says no is an answer."""
    if call.response is None:
        return ""
    answer, word = _read(call)
    said = f": {answer.refusal[:_MOST]!r}" if answer.refusal not in ("", word) else ""
    if word == "refusal":
        return f"the model refused ({word}){said}"
    words = {str(answer.finish or "").casefold(), word.casefold()}
    return f"the provider's content filter ended the answer ({word}){said}" if words & _FILTERED else ""


def _read(call: Transition) -> tuple[Answer, str]:
    """The answer of a call, and the provider's word for its end."""
    response = call.response or {}
    body = response.get("body", response)  # a gateway stores the provider's answer in `body`
    answer = answer_to(call.request, body)
    word = reason_in(body) or str(answer.finish or "")
    if answer.refusal and word == "stop":
        word = "refusal"  # the field of OpenAI's message
    return answer, word
