"""What the scripted server answers in the dialect of Google's Gemini API, whole and streamed."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["as_list", "gemini_stream", "gemini_whole"]


def gemini_whole(number: int, model: str, text: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Gemini's calls have no ids; the first call of an answer has the signature of the thought before it, which must come back."""
    parts: list[dict[str, Any]] = [{"text": text}] if text or not calls else []
    for at, call in enumerate(calls):
        parts.append({"functionCall": {"name": call[0], "args": call[1]}, **({} if at else {"thoughtSignature": "c2lnbmVk"})})
    candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": "STOP", "index": 0}
    tokens = len(text.split())
    usage = {"promptTokenCount": 7, "candidatesTokenCount": tokens, "totalTokenCount": 7 + tokens}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": f"gen-{number}"}


def gemini_stream(whole: dict[str, Any], text: str, calls: Sequence[Any], parts: Callable[[str], list[str]], usage: bool) -> Iterator[bytes]:
    """Texts in parts, calls whole; the last event says why it ended, and no mark of the end comes after it."""
    told = [{"text": part} for part in parts(text)] if text or not calls else []
    told += [part for part in whole["candidates"][0]["content"]["parts"] if "text" not in part]
    for at, part in enumerate(told):
        candidate = {"content": {"parts": [part], "role": "model"}, "index": 0, **({"finishReason": "STOP"} if at == len(told) - 1 else {})}
        yield f"data: {json.dumps({**whole, 'candidates': [candidate]})}\r\n\r\n".encode()


def as_list(events: Iterator[bytes]) -> Iterator[bytes]:
    """Events as the parts of one JSON list, as Gemini streams where no events are asked for."""
    for at, event in enumerate(events):
        yield (b"," if at else b"[") + event.removeprefix(b"data:").strip()
    yield b"]"
