"""Watches an embedded model's generation as it is made, and stops it if it repeats itself.

The reply is assembled from its chunks. Text, usage and finish reason are those of an unwatched call, but llama.cpp
reports no log-probability for the token that ends the turn, and none for tokens whose text it holds back for a
moment: their ids are then unknown.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from assay.errors import LoopStopped
from assay.models.answers import text_of
from assay.models.loops import Loop, LoopDetector, find_final_loop

if TYPE_CHECKING:
    from dspy import lm15

LOOP = "assay_loop"  # key of a stopped reply: the loop's kind, and the words it repeated


def watched_reply(
    generate: Callable[[dict[str, Any], Callable[[Any], bool]], Any], body: Mapping[str, Any]
) -> dict[str, Any]:
    """The raw reply to a chat request, cut off where the text began to repeat itself for too long.

    Args:
        generate: llama.cpp's in-process chat handler: it calls back with each chunk, and stops if that returns True.
    """
    chunks: list[dict[str, Any]] = []
    detector = LoopDetector()

    def on_chunk(chunk: Any) -> bool:
        chunk = json.loads(chunk) if isinstance(chunk, str | bytes) else chunk
        for part in chunk if isinstance(chunk, list) else [chunk]:
            chunks.append(part)
            for choice in part.get("choices") or ():
                delta = choice.get("delta") or {}
                detector.add(str(delta.get("content") or delta.get("reasoning_content") or ""))
        return detector.loop is not None

    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    generate(streaming, on_chunk)
    failed = next((chunk for chunk in chunks if "choices" not in chunk), None)
    return failed if failed is not None else _assembled(chunks, detector.loop)


def _assembled(chunks: list[dict[str, Any]], loop: Loop | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    tokens: list[Any] = []
    reply: dict[str, Any] = {}
    reason = None
    for chunk in chunks:
        reply |= {key: value for key, value in chunk.items() if key != "choices"}
        for choice in chunk.get("choices") or ():
            for name in ("content", "reasoning_content"):
                if (text := (choice.get("delta") or {}).get(name)) is not None:
                    message[name] = message.get(name, "") + text
            tokens += ((choice.get("logprobs") or {}).get("content")) or []
            reason = choice.get("finish_reason") or reason
    choice = {"index": 0, "finish_reason": "length" if loop else reason, "message": message}
    reply |= {"object": "chat.completion", "choices": [{**choice, "logprobs": {"content": tokens}}]}
    if loop is not None:  # stopped before llama.cpp reported the usage
        reply[LOOP] = _described(loop)
        reply["usage"] = {"completion_tokens": len(tokens), **(reply.get("usage") or {})}
    return reply


def stopped_loop(response: "lm15.Response | None", message: str | None = None) -> LoopStopped | None:
    """The error of an answer that ended in a loop: stopped there, or cut by its limit while it repeated itself.

    Args:
        message: of the error if it is known, as for an answer from the response cache.
    """
    if response is None:
        return None
    text = text_of(response)
    if message is not None:
        return LoopStopped(message, text=text)
    raw = response.provider_data
    stopped = raw.get(LOOP) if isinstance(raw, Mapping) else None
    if stopped is None and response.finish_reason == "length":
        thought = "".join(str(getattr(part, "text", "")) for part in response.message.parts if part.type == "thinking")
        loop = find_final_loop(text) or find_final_loop(thought)
        stopped = None if loop is None else _described(loop)
    if not isinstance(stopped, Mapping):
        return None
    tokens = response.usage.output_tokens
    after = "" if tokens is None else f" after {tokens} tokens"
    return LoopStopped(
        f"the model repeated itself ({stopped['kind']}, from word {stopped['start'] + 1} on) and ended{after}",
        text=text,
    )


def _described(loop: Loop) -> dict[str, Any]:
    return {"kind": loop.kind, "period": loop.period, "start": loop.start, "words": loop.repeated}
