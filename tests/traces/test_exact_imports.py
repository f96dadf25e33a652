"""What a model answered is byte for byte in an imported record."""

import json
from pathlib import Path
from typing import Any

import pytest
from exact_answers import ANSWERS, FORMATS, Sentiment, as_turn
from importing_rows import chat, lines, mlflow_span, mlflow_trace, observation, request, span

from assay.programs.adapters import make_adapter
from assay.traces import Store
from assay.traces.importers import import_traces

PROMPT = [{"role": "user", "content": "fine"}]


def trace(kind: str, message: dict[str, Any]) -> Any:
    """One LM call as a tracer writes it."""
    if kind == "langfuse":
        return observation(1, input=PROMPT, output=message)
    if kind == "mlflow":
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return mlflow_trace(mlflow_span(1, "CHAT_MODEL", {"model": "m", "messages": PROMPT}, answer))
    if "refusal" not in message:
        return request(span(1, chat(message["content"])))
    part = {"type": "refusal", "content": message["refusal"]}
    said = json.dumps([{"role": "assistant", "parts": [part], "finish_reason": "stop"}])
    return request(span(1, chat(**{"gen_ai.output.messages": said})))


@pytest.mark.parametrize("prompt_format", [*FORMATS, "refusal"])
@pytest.mark.parametrize("kind", ["otlp", "langfuse", "mlflow"])
def test_an_imported_answer_is_stored_byte_for_byte(tmp_path: Path, kind: str, prompt_format: str) -> None:
    text = ANSWERS.get(prompt_format, "I cannot help with that.")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if prompt_format not in ANSWERS:
        message = {"role": "assistant", "content": None, "refusal": text}
    with Store(tmp_path / "s.db") as store:
        import_traces(store, kind, lines(tmp_path / "x.jsonl", trace(kind, message)))
        store.flush()
        (rollout,) = store.rollouts()
        (transition,) = store.rollout(rollout.id).transitions
    assert transition.output == as_turn(transition).answer["content"] == text
    if prompt_format in FORMATS:
        assert make_adapter(prompt_format).parse(Sentiment, transition.output)["label"] == "pos"
