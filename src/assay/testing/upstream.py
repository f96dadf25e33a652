"""A scripted model server in all three dialects, for tests and benchmarks of what stands in front of one.

    python -m assay.testing.upstream [--port 0] [--log FILE] [--chunks 8] [--delay-ms 0]

It answers `echo: TEXT` to a conversation's last text, and calls the first tool offered where that text holds `use the tool` and no
result has come back yet. `#429`, `#500`, `#die`, `#hang`, `#garbage` and `#badtool` in the text make it misbehave. With a log it
writes a line a completed call before the answer's last byte is sent.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from assay.traces.dialects import DIALECTS, chat_messages, chat_tools

__all__ = ["ScriptedUpstream"]


class ScriptedUpstream:
    """Counts its calls in `calls`; `app()` is an aiohttp application."""

    def __init__(self, *, log: Path | None = None, chunks: int = 8, delay_s: float = 0.0, name: str = "echo") -> None:
        self.calls, self.chunks, self.delay_s, self.name = 0, chunks, delay_s, name
        self.headers: list[dict[str, str]] = []
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        for dialect, path in DIALECTS.items():
            app.router.add_post(path, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def _handler(self, dialect: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.calls += 1
            self.headers = [*self.headers[-99:], dict(request.headers)]
            messages = chat_messages({"dialect": dialect, "body": body})
            said = next((str(m.get("content") or "") for m in reversed(messages) if m["role"] == "user"), "")
            for status in (429, 500):
                if f"#{status}" in said:
                    told = {"error": {"message": f"scripted {status}", "type": "scripted"}}
                    return web.json_response(told, status=status, headers={"Retry-After": "7"} if status == 429 else {})
            if "#garbage" in said:
                return web.Response(body=b"{this is no json", content_type="application/json")
            tools, answered = chat_tools({"dialect": dialect, "body": body}), messages[-1]["role"] == "tool" if messages else False
            call = None
            if tools and "use the tool" in said and not answered:
                arguments = "{broken" if "#badtool" in said else json.dumps({"expression": "6*7"})
                call = (f"call_{self.calls}", tools[0]["function"]["name"], arguments)
            text = "" if call else f"echo: {messages[-1].get('content') if answered else said}"
            if not body.get("stream"):
                await self._pause(said)
                if "#die" in said and request.transport is not None:
                    request.transport.close()
                self._note(said)
                return web.json_response(_whole(dialect, self.calls, self.name, text, call))
            return await self._stream(request, dialect, said, text, call)

        return handle

    async def _pause(self, said: str) -> None:
        if "#hang" in said:
            await asyncio.sleep(3600)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    def _note(self, said: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.time():.6f} {said[:80]!r}\n")

    async def _stream(self, request: web.Request, dialect: str, said: str, text: str, call: tuple[str, str, str] | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = [event async for event in _events(dialect, self.calls, self.name, text, call, self.chunks)]
        for at, event in enumerate(events):
            if at == len(events) // 2:
                await self._pause(said)
                if "#die" in said and request.transport is not None:
                    request.transport.abort()
                    return response
            if at == len(events) - 1:
                self._note(said)
            await response.write(event)
        await response.write_eof()
        return response


def _whole(dialect: str, number: int, model: str, text: str, call: tuple[str, str, str] | None) -> dict[str, Any]:
    tokens = len(text.split())
    if dialect == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if call:
            message["tool_calls"] = [{"id": call[0], "type": "function", "function": {"name": call[1], "arguments": call[2]}}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop", "logprobs": None}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        return {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    if dialect == "responses":
        item: dict[str, Any] = {
            "type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }  # fmt: skip
        if call:
            item = {"type": "function_call", "id": f"fc_{number}", "call_id": call[0], "name": call[1], "arguments": call[2], "status": "completed"}
        return {
            "id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed", "model": model, "output": [item], "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "error": None, "incomplete_details": None, "instructions": None,
            "usage": {
                "input_tokens": 7, "output_tokens": tokens, "total_tokens": 7 + tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }  # fmt: skip
    block: dict[str, Any] = {"type": "text", "text": text}
    if call:
        try:
            given = json.loads(call[2])
        except ValueError:
            given = {}
        block = {"type": "tool_use", "id": call[0], "name": call[1], "input": given}
    return {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "content": [block],
        "stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": tokens},
    }  # fmt: skip


async def _events(
    dialect: str, number: int, model: str, text: str, call: tuple[str, str, str] | None, chunks: int
) -> AsyncIterator[bytes]:  # fmt: skip
    whole = _whole(dialect, number, model, text, call)
    said = call[2] if call else text
    size = max(1, -(-len(said) // chunks))
    parts = [said[at : at + size] for at in range(0, len(said), size)] or [""]
    if dialect == "chat":
        head = {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": model}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n".encode()

        yield chunk({"role": "assistant", "content": None if call else ""})
        for at, part in enumerate(parts):
            first = {"id": call[0], "type": "function"} if call and at == 0 else {}
            function = {"arguments": part, **({"name": call[1]} if call and at == 0 else {})}
            yield chunk({"tool_calls": [{"index": 0, **first, "function": function}]} if call else {"content": part})
        yield chunk({}, "tool_calls" if call else "stop")
        yield b"data: [DONE]\n\n"
        return

    def event(kind: str, **told: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **told})}\n\n".encode()

    if dialect == "responses":
        item = whole["output"][0]
        yield event("response.created", response={**whole, "status": "in_progress", "output": []}, sequence_number=0)
        empty = {**item, **({"arguments": ""} if call else {"content": []})}
        yield event("response.output_item.added", output_index=0, item=empty, sequence_number=1)
        where = {"item_id": item["id"], "output_index": 0}
        if not call:
            yield event(
                "response.content_part.added",
                **where,
                content_index=0,
                part={"type": "output_text", "text": "", "annotations": []},
                sequence_number=2,
            )
        for at, part in enumerate(parts):
            kind = "response.function_call_arguments.delta" if call else "response.output_text.delta"
            yield event(kind, **where, **({} if call else {"content_index": 0, "logprobs": []}), delta=part, sequence_number=3 + at)
        yield event("response.output_item.done", output_index=0, item=item, sequence_number=100)
        yield event("response.completed", response=whole, sequence_number=101)
        return
    block = whole["content"][0]
    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    yield event("content_block_start", index=0, content_block={**block, **({"input": {}} if call else {"text": ""})})
    for part in parts:
        delta = {"type": "input_json_delta", "partial_json": part} if call else {"type": "text_delta", "text": part}
        yield event("content_block_delta", index=0, delta=delta)
    yield event("content_block_stop", index=0)
    yield event("message_delta", delta={"stop_reason": whole["stop_reason"], "stop_sequence": None}, usage={"output_tokens": 3})
    yield event("message_stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    upstream = ScriptedUpstream(log=arguments.log, chunks=arguments.chunks, delay_s=arguments.delay_ms / 1000)

    async def serve() -> None:
        runner = web.AppRunner(upstream.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", arguments.port, backlog=1024).start()
        print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
