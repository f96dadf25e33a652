"""Responses of the scripted server in the dialect of Google's Gemini API, as one body and as a stream."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["as_list", "gemini_body", "gemini_stream"]


def gemini_body(number: int, model: str, text: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The body of a response that is not streamed.

    Gemini's calls have no ids. The first call of a response has a thought signature, which the client must send back.
    """
    parts: list[dict[str, Any]] = [{"text": text}] if text or not calls else []
    for index, (name, arguments) in enumerate(calls):
        signature = {} if index else {"thoughtSignature": "c2lnbmVk"}
        parts.append({"functionCall": {"name": name, "args": arguments}, **signature})
    candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": "STOP", "index": 0}
    tokens = len(text.split())
    usage = {"promptTokenCount": 7, "candidatesTokenCount": tokens, "totalTokenCount": 7 + tokens}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": f"gen-{number}"}


def gemini_stream(
    body: dict[str, Any], text: str, calls: Sequence[Any], split: Callable[[str], list[str]], usage: bool
) -> Iterator[bytes]:
    """The text in chunks, each call in one event. The last event has the finish reason; there is no `[DONE]`."""
    parts = [{"text": part} for part in split(text)] if text or not calls else []
    parts += [part for part in body["candidates"][0]["content"]["parts"] if "text" not in part]
    for index, part in enumerate(parts):
        candidate = {
            "content": {"parts": [part], "role": "model"},
            "index": 0,
            **({"finishReason": "STOP"} if index == len(parts) - 1 else {}),
        }
        yield f"data: {json.dumps({**body, 'candidates': [candidate]})}\r\n\r\n".encode()


def as_list(events: Iterator[bytes]) -> Iterator[bytes]:
    """The events as elements of one JSON list: Gemini's format for streams without `alt=sse`."""
    for index, event in enumerate(events):
        yield (b"," if index else b"[") + event.removeprefix(b"data:").strip()
    yield b"]"
